"""The labels of people on sampled passages: which passages they grade, and their verdicts.

Human labels correct the judge, so people grade a random part of the samples, and of each sample
the same passages as the judge. Where annotators disagree, ``core.adjudication`` decides. Pure: no
I/O, no clock, no logging.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ctxguard.core.adjudication import Vote, adjudicate
from ctxguard.core.metrics import Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow

_SOURCE = "human"
"""Other sources, such as users' reactions, see only what was served."""


@dataclass(frozen=True, slots=True)
class HumanVerdicts:
    """The verdicts of people on one sample.

    Attributes:
        by_passage: By passage id; without passages that nobody labelled.
        disagreements: Passages on whose relevance the annotators disagree.
    """

    by_passage: Mapping[str, Judgment]
    disagreements: int


def human_verdicts(labels: Iterable[tuple[int, LabelRow]]) -> dict[int, HumanVerdicts]:
    """The verdicts of people by sample.

    Args:
        labels: Pairs of sample id and label, as ``SampleStore.labels`` gives them. Labels of
            another source than people are left out.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> bob = LabelRow("r", "a", 0, None, "bob", 2.0)
    >>> found = human_verdicts([(7, ann), (7, bob)])[7]
    >>> found.by_passage["a"].grade, found.disagreements
    (0, 1)
    """
    votes: dict[int, dict[str, list[Vote]]] = {}
    for sample_id, label in labels:
        if label.source == _SOURCE:
            negative = Negative(label.negative) if label.negative else None
            vote = Vote(label.grade, negative, label.annotator, label.time_seconds)
            votes.setdefault(sample_id, {}).setdefault(label.passage_id, []).append(vote)
    return {sample_id: _adjudicated(of_sample) for sample_id, of_sample in votes.items()}


def _adjudicated(votes: Mapping[str, list[Vote]]) -> HumanVerdicts:
    labels = {passage_id: adjudicate(given) for passage_id, given in votes.items()}
    return HumanVerdicts(
        {
            passage_id: Judgment(passage_id, label.grade, label.negative)
            for passage_id, label in labels.items()
        },
        sum(label.relevance_disputed for label in labels.values()),
    )


def positions_to_label(record: SampleRecord, verdicts: Mapping[str, Judgment]) -> list[int]:
    """Positions of the passages that people still have to grade, best first.

    These are all served passages, and the dropped ones that were chosen when the sample was taken.
    Whether that is the full pool can depend on whether a served passage is relevant, so the full
    pool is included only once all served passages are graded.

    Args:
        record: The sample.
        verdicts: Those of people so far, by passage id.
    """
    ids = record.passage_ids
    missing = [position for position in record.served if ids[position] not in verdicts]
    of_served = [verdicts[ids[position]] for position in record.served if ids[position] in verdicts]
    has_hit = any(verdict.grade > 0 for verdict in of_served)
    # Until all of the served are graded, only what is needed in either case.
    to_judge = record.to_judge(has_hit=has_hit or bool(missing))
    return missing + [position for position in to_judge if ids[position] not in verdicts]
