"""The labels of people on sampled passages: which passages they grade, and their verdicts.

Human labels correct the judge, so people grade a random part of the samples, and of each sample as
few passages as the estimates need. Where annotators disagree, ``core.adjudication`` decides. Pure:
no I/O, no clock, no logging.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ctxguard.core.adjudication import Vote, adjudicate
from ctxguard.core.metrics import Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import HashSampler
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelDepth, LabelRow

WHOLE_POOL_RATE = 0.15
"""Share of the requests, of those in which neither the judge nor people saw a relevant passage,
whose whole pool people grade."""

_WHOLE_POOL = HashSampler("label whole pool")

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
            another source than people are left out, and those that were taken back.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> bob = LabelRow("r", "a", 0, None, "bob", 2.0)
    >>> found = human_verdicts([(7, ann), (7, bob)])[7]
    >>> found.by_passage["a"].grade, found.disagreements
    (0, 1)
    """
    votes: dict[int, dict[str, list[Vote]]] = {}
    for sample_id, label in standing(labels):
        if label.source == _SOURCE and label.grade is not None:
            negative = Negative(label.negative) if label.negative else None
            vote = Vote(label.grade, negative, label.annotator, label.time_seconds)
            votes.setdefault(sample_id, {}).setdefault(label.passage_id, []).append(vote)
    return {sample_id: _adjudicated(of_sample) for sample_id, of_sample in votes.items()}


def standing(labels: Iterable[tuple[int, LabelRow]]) -> list[tuple[int, LabelRow]]:
    """The labels that were not taken back; pairs of sample id and label, in the order given.

    >>> ann = LabelRow("r", "a", 3, None, "ann", 1.0)
    >>> standing([(7, ann), (7, LabelRow("r", "a", None, None, "ann", 2.0))])
    []
    """
    labels = list(labels)
    taken_back: dict[tuple[int, str, str, str], float] = {}
    for sample_id, label in labels:
        if label.grade is None:
            taken_back[_whose(sample_id, label)] = label.time_seconds
    return [
        (sample_id, label)
        for sample_id, label in labels
        if label.grade is not None
        and label.time_seconds > taken_back.get(_whose(sample_id, label), -math.inf)
    ]


def _whose(sample_id: int, label: LabelRow) -> tuple[int, str, str, str]:
    return sample_id, label.passage_id, label.annotator, label.source


def _adjudicated(votes: Mapping[str, list[Vote]]) -> HumanVerdicts:
    labels = {passage_id: adjudicate(given) for passage_id, given in votes.items()}
    return HumanVerdicts(
        {
            passage_id: Judgment(passage_id, label.grade, label.negative)
            for passage_id, label in labels.items()
        },
        sum(label.relevance_disputed for label in labels.values()),
    )


def positions_to_label(
    record: SampleRecord,
    verdicts: Mapping[str, Judgment],
    depth: LabelDepth,
    judged: Collection[str],
) -> list[int]:
    """Positions of the passages that people may still have to grade; none once all is graded.

    First what is needed in any case, best first. Then, where nothing relevant was served, the
    passages of the search (see ``search``) one after the other: it ends at the first that is
    relevant, and the rest need no grade.

    Args:
        record: The sample.
        verdicts: Those of people so far, by passage id.
        depth: How much of the sample people grade.
        judged: Ids of the dropped passages that the judge called relevant.
    """
    ids = record.passage_ids
    needed = [
        position for position in needed_positions(record, depth) if ids[position] not in verdicts
    ]
    if has_hit(record, verdicts) or first_found(record, verdicts, depth, judged) is not None:
        return needed
    likely, rest = search(record, depth, judged)
    return needed + [
        position
        for position in (*likely, *(rest if searches_whole_pool(record) else ()))
        if ids[position] not in verdicts and position not in needed
    ]


def needed_positions(record: SampleRecord, depth: LabelDepth) -> tuple[int, ...]:
    """Positions of the passages that people grade whatever they find, best first.

    All that was served; with ``LabelDepth.POOL`` also the dropped ones that were chosen when the
    sample was taken, whatever was served.
    """
    if depth is LabelDepth.SERVED:
        return record.served
    return (*record.served, *record.to_judge(has_hit=True))


def has_hit(record: SampleRecord, verdicts: Mapping[str, Judgment]) -> bool:
    """Whether a served passage is relevant, as far as people have graded."""
    return any(_is_relevant(record, verdicts, position) for position in record.served)


def search(
    record: SampleRecord, depth: LabelDepth, judged: Collection[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where people look for a relevant passage if nothing relevant was served.

    Whether such a request counts in MRR depends on whether its pool holds a relevant passage.
    The judge says where one is likely. If people confirm none of these, the rest of the pool is
    graded for a random part of the requests only (``searches_whole_pool``), each of which stands
    for 1 / ``WHOLE_POOL_RATE``.

    Returns:
        Positions of the dropped passages that are looked at first, those needed anyway included,
        and of the others; each best first.
    """
    ids, needed = record.passage_ids, set(needed_positions(record, depth))
    likely = tuple([one for one in record.dropped if one in needed or ids[one] in judged])
    rest = tuple([one for one in record.dropped if one not in likely])
    return likely, rest


def searches_whole_pool(record: SampleRecord) -> bool:
    """Whether the rest of the pool is searched too, if the likely passages are not relevant."""
    return _WHOLE_POOL.selects(record.request_id, WHOLE_POOL_RATE)


def first_found(
    record: SampleRecord,
    verdicts: Mapping[str, Judgment],
    depth: LabelDepth,
    judged: Collection[str],
) -> float | None:
    """The probability with which a relevant passage that people found by the search was found.

    Returns:
        1.0 where it is among the likely ones; ``WHOLE_POOL_RATE`` where it is among the rest, and
        none of the likely ones is relevant; None where none was found yet.
    """
    likely, rest = search(record, depth, judged)
    if any(_is_relevant(record, verdicts, position) for position in likely):
        return 1.0
    if not searches_whole_pool(record):
        return None
    if any(record.passage_ids[position] not in verdicts for position in likely):
        return None
    found = any(_is_relevant(record, verdicts, position) for position in rest)
    return WHOLE_POOL_RATE if found else None


def _is_relevant(record: SampleRecord, verdicts: Mapping[str, Judgment], position: int) -> bool:
    verdict = verdicts.get(record.passage_ids[position])
    return verdict is not None and verdict.grade > 0
