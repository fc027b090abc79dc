"""Handles people's labels on sampled passages: which passages they grade, and their grades.

Human labels correct the judge, so people grade a random part of the judged passages. Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow, PickedPassage, PickKind

ALWAYS = "always"
IF_NONE_ABOVE = "if all above are 0"
"""When people grade a row."""


def human_grades(
    labels: Iterable[tuple[int, LabelRow]],
) -> dict[int, tuple[dict[str, Judgment], int]]:
    """Merge the labels that were not withdrawn into one grade for each passage.

    Args:
        labels: Pairs of sample id and label, as ``SampleStore.labels`` gives them.

    Returns:
        By sample, the grades by passage id, and the number of passages on whose relevance the
        annotators disagree.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> bob = LabelRow("r", "a", 0, None, "bob", 2.0)
    >>> grades, disagreements = human_grades([(7, ann), (7, bob)])[7]
    >>> grades["a"].grade, disagreements
    (0, 1)
    """
    by_sample: dict[int, dict[str, list[LabelRow]]] = {}
    for sample_id, label in standing(labels):
        by_sample.setdefault(sample_id, {}).setdefault(label.passage_id, []).append(label)
    found = {}
    for sample_id, by_passage in by_sample.items():
        merged = {name: adjudicated(given) for name, given in by_passage.items()}
        grades = {name: judgment for name, (judgment, _) in merged.items()}
        found[sample_id] = grades, sum(is_disputed for _, is_disputed in merged.values())
    return found


def adjudicated(labels: Sequence[LabelRow]) -> tuple[Judgment, bool]:
    """Merge one passage's labels, of which there is at least one and none is withdrawn.

    Of several labels by one annotator, the latest counts; of several annotators' grades, the lower
    median. A passage of grade 0 misleads as the latest label says that says how.

    Returns:
        The grade, and whether annotators disagree on relevance.
    """
    latest: dict[str, LabelRow] = {}
    for label in sorted(labels, key=lambda label: label.time_seconds):
        latest.pop(label.annotator, None)  # so that the values stay in order of time
        latest[label.annotator] = label
    grades = [label.grade or 0 for label in latest.values()]
    negative = None
    for label in latest.values():
        # If the column is damaged, the grade stands without a kind.
        if label.grade == 0 and label.negative in set(Negative):
            negative = Negative(label.negative)
    grade = median_low(grades)
    judgment = Judgment(labels[0].passage_id, grade, None if grade else negative)
    return judgment, len({one > 0 for one in grades}) > 1


def standing(labels: Iterable[tuple[int, LabelRow]]) -> list[tuple[int, LabelRow]]:
    """Drop withdrawn labels; keep the order of the pairs of sample id and label.

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
