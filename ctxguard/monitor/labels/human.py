"""People's labels on sampled passages: which passages they grade, and their grades.

Human labels correct the judge, so people grade a random part of the judged passages. Where
annotators disagree, ``adjudication`` decides. Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.adjudication import Vote, adjudicate
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow, PickedPassage, PickKind

ALWAYS = "always"
IF_NONE_ABOVE = "if all above are 0"
"""When people grade a row."""


@dataclass(frozen=True, slots=True)
class HumanGrades:
    """The grades of people on one sample.

    Attributes:
        by_passage: Grades by passage id, without passages that nobody labelled.
        disagreements: Passages on whose relevance the annotators disagree.
    """

    by_passage: Mapping[str, Judgment]
    disagreements: int


NOBODY = HumanGrades({}, 0)


def human_grades(labels: Iterable[tuple[int, LabelRow]]) -> dict[int, HumanGrades]:
    """Return the grades of people by sample.

    Args:
        labels: Pairs of sample id and label, as ``SampleStore.labels`` gives them. Labels that were
            taken back are left out.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> bob = LabelRow("r", "a", 0, None, "bob", 2.0)
    >>> found = human_grades([(7, ann), (7, bob)])[7]
    >>> found.by_passage["a"].grade, found.disagreements
    (0, 1)
    """
    votes: dict[int, dict[str, list[Vote]]] = {}
    for sample_id, label in standing(labels):
        if label.grade is not None:
            # If the column is damaged, the grade stands without a kind.
            negative = Negative(label.negative) if label.negative in set(Negative) else None
            vote = Vote(label.grade, negative, label.annotator, label.time_seconds)
            votes.setdefault(sample_id, {}).setdefault(label.passage_id, []).append(vote)
    return {sample_id: _adjudicated(of_sample) for sample_id, of_sample in votes.items()}


def standing(labels: Iterable[tuple[int, LabelRow]]) -> list[tuple[int, LabelRow]]:
    """Drop labels that were taken back; keep pairs of sample id and label in their order.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> standing([(7, ann), (7, LabelRow("r", "a", None, None, "ann", 2.0))])
    []
    """
    labels = list(labels)
    taken_back: dict[tuple[int, str, str], float] = {}
    for sample_id, label in labels:
        if label.grade is None:
            taken_back[_whose(sample_id, label)] = label.time_seconds
    return [
        (sample_id, label)
        for sample_id, label in labels
        if label.grade is not None
        and label.time_seconds > taken_back.get(_whose(sample_id, label), -math.inf)
    ]


def _whose(sample_id: int, label: LabelRow) -> tuple[int, str, str]:
    return sample_id, label.passage_id, label.annotator


def _adjudicated(votes: Mapping[str, list[Vote]]) -> HumanGrades:
    labels = {passage_id: adjudicate(given) for passage_id, given in votes.items()}
    return HumanGrades(
        {
            passage_id: Judgment(passage_id, label.grade, label.negative)
            for passage_id, label in labels.items()
        },
        sum(label.relevance_disputed for label in labels.values()),
    )


def rows_left(
    record: SampleRecord, picked: Sequence[PickedPassage], grades: Mapping[str, Judgment]
) -> list[tuple[int, str]]:
    """List the passages that people may still need to grade, each with its condition.

    Served passages come by rank, then dropped ones. An opened request is graded down to its first
    relevant passage, and also wherever a coin came up (``sampling_design``).

    Args:
        picked: The passages draws ask about.
        grades: People's grades so far, by passage id.

    Returns:
        Pairs of position and ``ALWAYS`` or ``IF_NONE_ABOVE``; empty once all is graded.
    """
    always = {one.position for one in picked if one.kind is PickKind.COIN}
    is_open = any(one.kind is PickKind.RUN for one in picked)
    rows = []
    for position in (*record.served, *record.dropped):
        grade = record.grade(grades, position)
        if grade is None and position in always:
            rows.append((position, ALWAYS))
        elif grade is None and is_open and position in record.served:
            rows.append((position, IF_NONE_ABOVE))
        is_open = is_open and not grade
    return rows
