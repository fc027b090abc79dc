"""What people say of sampled passages: which to ask them about, and how their words are taken.

Labels correct the judge (``ppi.py``), so they are asked of samples picked at random and of the
same passages that a judge is asked about. Rule where people disagree: each annotator's last word
counts, and of several annotators the lower median; every label is kept, and disagreement on
relevance is reported. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from ctxguard.metrics import Negative, Utilities
from ctxguard.monitor.estimates import JudgedRequest
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judging import judged_request
from ctxguard.monitor.records import Record
from ctxguard.monitor.store import LabelRow

HUMAN = "human"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the labels of one sample come to.

    Attributes:
        verdicts: By passage id.
        disagreements: Passages on whose relevance the annotators disagree.
    """

    verdicts: Mapping[str, Judgment]
    disagreements: int


def resolve(labels: Iterable[LabelRow]) -> Resolved:
    """Each annotator's last word, and of several annotators the lower median.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> bob = LabelRow("r", "a", 0, None, "bob", 2.0)
    >>> resolve([ann, bob]).verdicts["a"].grade, resolve([ann, bob]).disagreements
    (0, 1)
    """
    words: dict[str, dict[str, LabelRow]] = {}
    for label in sorted(labels, key=lambda label: label.time_seconds):
        words.setdefault(label.passage_id, {})[label.annotator] = label
    verdicts, disagreements = {}, 0
    for passage_id, by_annotator in words.items():
        said = list(by_annotator.values())
        grade = median_low([label.grade for label in said])
        misleads = [label.negative for label in said if label.grade == 0 and label.negative]
        negative = Negative(misleads[-1]) if grade == 0 and misleads else None
        verdicts[passage_id] = Judgment(passage_id, grade, negative)
        disagreements += len({label.grade > 0 for label in said}) > 1
    return Resolved(verdicts, disagreements)


def wanted(record: Record, verdicts: Mapping[str, Judgment]) -> list[int]:
    """Positions of the passages that people still have to grade, best first.

    All that was served, and the dropped ones that were chosen when the sample was taken. Whether
    the whole pool is among these can depend on whether anything served is relevant, so it is asked
    for once that is known.
    """
    missing = [place for place in record.served if record.passage_ids[place] not in verdicts]
    # Until all of the served are known, only what is wanted in either case.
    chosen = record.to_judge(answered=_answered(record, verdicts) or bool(missing))
    return missing + [place for place in chosen if record.passage_ids[place] not in verdicts]


def _answered(record: Record, verdicts: Mapping[str, Judgment]) -> bool:
    of_served = [verdicts.get(record.passage_ids[place]) for place in record.served]
    return any(verdict is not None and verdict.grade > 0 for verdict in of_served)


def human_request(
    record: Record, labels: Sequence[LabelRow], *, utilities: Utilities, max_grade: int
) -> JudgedRequest | None:
    """What people say of a sample; None until they have graded all that it takes."""
    verdicts = resolve(labels).verdicts
    if wanted(record, verdicts):
        return None
    highest = max([max_grade, *(verdict.grade for verdict in verdicts.values())])
    return judged_request(record, verdicts, utilities=utilities, max_grade=highest)
