"""Merges several annotators' labels of the same passage into one.

Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable
from statistics import median_low
from typing import NamedTuple

from ctxguard.measure.worth import Negative

RULES = (
    "of several labels by one annotator, the latest counts",
    "of several annotators' grades, the lower median",
    "a passage of grade 0 misleads as the latest label says that says how",
)
"""The rules that merge several labels into one."""


class Vote(NamedTuple):
    """One annotator's label of a passage.

    Attributes:
        grade: 0 for not relevant, higher for more relevant.
        negative: How a passage of grade 0 misleads; None if it does not.
        annotator: Name; None counts as a separate annotator.
        time_seconds: Time of the label; among equal times the later in order counts as later.
    """

    grade: int
    negative: Negative | None
    annotator: str | None
    time_seconds: float


class Adjudicated(NamedTuple):
    """The label merged from several.

    Attributes:
        grade: The passage's grade.
        negative: How a passage of grade 0 misleads; None if it does not.
        relevance_disputed: Whether annotators disagree on relevance.
    """

    grade: int
    negative: Negative | None
    relevance_disputed: bool


def adjudicate(votes: Iterable[Vote]) -> Adjudicated:
    """Apply ``RULES`` to the labels of one passage; there must be at least one.

    >>> ann, ben = Vote(3, None, "ann", 1.0), Vote(0, None, "ben", 2.0)
    >>> adjudicate([ann, ben])
    Adjudicated(grade=0, negative=None, relevance_disputed=True)
    """
    latest: dict[object, Vote] = {}
    for position, vote in enumerate(sorted(votes, key=lambda vote: vote.time_seconds)):
        annotator = position if vote.annotator is None else vote.annotator
        latest.pop(annotator, None)  # so that the values stay in order of time
        latest[annotator] = vote
    counted = list(latest.values())
    grade = median_low([vote.grade for vote in counted])
    negatives = [vote.negative for vote in counted if vote.grade == 0 and vote.negative is not None]
    return Adjudicated(
        grade,
        negatives[-1] if grade == 0 and negatives else None,
        len({vote.grade > 0 for vote in counted}) > 1,
    )
