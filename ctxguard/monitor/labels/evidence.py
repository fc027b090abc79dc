"""Turns a judge's and people's grades of one sample into evidence: a block of rows.

All served passages are judged, and dropped ones with the probabilities that the sample holds.
Blocks are made while the text is available and outlive it; labels that arrive later replace them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ctxguard.core.scores import log_odds
from ctxguard.errors import DataError
from ctxguard.measure.metrics import (
    FAILED,
    FAR,
    MISSING,
    NEAR,
    NEAR_DROPPED,
    NO,
    PASSAGE,
    REQUEST,
    UNGRADED,
    YES,
    Rows,
    rank_group,
    session_number,
    to_block,
)
from ctxguard.measure.worth import Utilities, worths
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.protocol import grades_from_json
from ctxguard.monitor.labels.human import rows_left
from ctxguard.monitor.labels.samples import graded_samples
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import OPENED, GradedBlock, PickedPassage, PickKind, SampleStore

_NO_GRADE = Judgment("", 0, judged=False)


class Scale(NamedTuple):
    """The worth of grades: the utilities, and the highest grade."""

    utilities: Utilities
    max_grade: int

    def worths(self, verdicts: Sequence[Judgment]) -> Sequence[float]:
        """Return the utility of passages with these verdicts."""
        return worths(
            [verdict.grade for verdict in verdicts],
            top_grade=self.max_grade,
            negatives=[verdict.negative for verdict in verdicts],
            judged=[verdict.judged for verdict in verdicts],
            utilities=self.utilities,
        )


class PeopleGrades(NamedTuple):
    """People's verdicts on a sample by passage id, their scale, and the draws' requests."""

    verdicts: Mapping[str, Judgment]
    scale: Scale
    picked: Sequence[PickedPassage] = ()


def judged_request(
    record: SampleRecord,
    verdicts: Mapping[str, Judgment],
    scale: Scale,
    *,
    probability: float | None = None,
    first: Mapping[str, Judgment] | None = None,
    people: PeopleGrades | None = None,
) -> bytes:
    """Reduce a sample to its block of ``Rows``.

    Args:
        verdicts: The judge's grades by passage id. A passage that should have a verdict but has
            none failed: its row has no grade.
        probability: Probability with which it was sampled and then taken up for judging; None for
            the probability of sampling alone.
        first: Verdicts of the judge whose hits decided which passages were judged; None for the
            same judge.
        people: People's verdicts; None if nobody graded any of it.
    """
    first = verdicts if first is None else first
    rates, has_hit = record.rates, record.has_hit(first)
    places, chances = record.to_judge(first), record.judging_chances(first)
    baseline = record.first(rates.baseline_k)
    lacking = {place for place in places if record.passage_ids[place] not in verdicts}
    whole, is_fair = record.has_full_pool(has_hit=has_hit), True
    dropped_chance = pool_chance = 1.0
    if record.dropped:
        # Of the last passages of a long pool, whether this one is long or not: else a figure would
        # be that of short pools alone.
        dropped_chance = rates.dropped_probability(has_hit=has_hit, in_baseline=False)
        pool_chance = rates.full_pool_probability(has_hit=has_hit) if whole else math.nan
        # Pools judged only where nothing relevant was served would show a recall of 0.
        is_fair = rates.full_pool_probability(has_hit=True) > 0.0
    request = np.array(
        [
            (
                len(places),
                len(record.served),
                record.probability if probability is None else probability,
                session_number(record.session_id),
                dropped_chance,
                pool_chance,
                whole and is_fair and not lacking,
                record.judges_first(rates.baseline_k) and lacking.isdisjoint(baseline),
                *(0, False, 1.0),
            )
        ],
        REQUEST,
    )
    passages = np.zeros(len(places), PASSAGE)
    graded = [verdicts.get(record.passage_ids[place]) for place in places]
    found = [_NO_GRADE if one is None else one for one in graded]
    rank = np.arange(1, len(places) + 1)
    rank[len(record.served) :] = 0
    is_near = np.isin(places, record.dropped[:NEAR_DROPPED])
    passages["position"], passages["rank"] = places, rank
    passages["group"] = np.where(rank > 0, rank_group(rank), np.where(is_near, NEAR, FAR))
    passages["in_baseline"] = np.isin(places, baseline)
    passages["verdict"] = [_grade(one) for one in graded]
    passages["score"] = [_log_odds(one.score) for one in found]
    passages["worth"] = scale.worths(found)
    passages["size"] = [1.0 / chances[place] for place in places]
    passages["grade"] = UNGRADED
    if people is not None:
        _add_grades(record, people, places, request, passages)
    return to_block(request, passages)


def _add_grades(
    record: SampleRecord,
    people: PeopleGrades,
    places: Sequence[int],
    request: np.ndarray,
    passages: np.ndarray,
) -> None:
    """Write people's grades into the rows."""
    rows, given = [], []
    for row, place in enumerate(places):
        verdict = people.verdicts.get(record.passage_ids[place])
        if verdict is not None:
            rows.append(row)
            given.append(verdict)
    passages["grade"][rows] = [one.grade for one in given]
    passages["people_worth"][rows] = people.scale.worths(given)
    chances = grade_chances(record, people.picked, people.verdicts)
    if chances:
        passages["chance"] = [chances.get(place, 0.0) for place in places]
        opened = next(one for one in people.picked if one.kind in OPENED)
        request["draw"], request["run_chance"] = opened.pick_id, opened.probability
        request["goes_on"] = opened.kind is PickKind.RUN


def _grade(given: Judgment | None) -> int:
    if given is None:
        return FAILED
    if not given.judged:
        return MISSING
    return YES if given.grade > 0 else NO


def _log_odds(score: float | None) -> float:
    if score is None:
        return 0.0
    return float(log_odds(score).clip(-8.0, 8.0))


def recall_loss(record: SampleRecord, verdicts: Mapping[str, Judgment], k: int) -> float | None:
    """Compute the share of the relevant among the retriever's first k that was not served.

    Args:
        k: How many of the pool's passages count, in the retriever's own order.

    Returns:
        None if they were not all judged by design, a verdict is missing, or none is relevant.
    """
    grades = {place: record.grade(verdicts, place) for place in record.first(k)}
    relevant = {place for place, grade in grades.items() if grade}
    if not record.judges_first(k) or None in grades.values() or not relevant:
        return None
    return len(relevant - set(record.served)) / len(relevant)


def grade_chances(
    record: SampleRecord, picked: Sequence[PickedPassage], verdicts: Mapping[str, Judgment]
) -> dict[int, float]:
    """Compute the probability with which each passage's grade was asked for, by position.

    Given the grades above it, and whether the request is graded on, a passage is asked about for
    certain down to the first relevant one that is served, and else by its coin.

    Args:
        picked: The draws' questions about the sample.
        verdicts: People's verdicts, by passage id.

    Returns:
        Empty unless a draw opened the sample and everything it asks about is graded.
    """
    kinds = {one.kind for one in picked}
    if not kinds & OPENED or rows_left(record, picked, verdicts):
        return {}
    chances = {one.position: one.probability for one in picked if one.kind is PickKind.COIN}
    for position in record.served if PickKind.RUN in kinds else ():
        chances[position] = 1.0
        if record.grade(verdicts, position):
            break
    return chances


def update_graded(store: SampleStore, series: str, scale: Scale) -> None:
    """Remake the blocks of samples that have newer labels.

    Call this before text is deleted.

    Args:
        series: The series of judgments that the labels correct.
        scale: Scale of the judge's grades, and of people's if the labels name none.
    """
    newest_label = store.to_grade(series)
    if not newest_label:
        return
    ids = list(newest_label)
    before, first = store.blocks(ids), store.grades(None, ids)
    # Grades given before a text was deleted stay.
    samples = graded_samples(store, series, list(before), store.picked(None, ids))
    given = [one.grade for sample in samples.values() for one in sample.people.values()]
    of_people = scale._replace(max_grade=max([store.top_grade() or scale.max_grade, *given]))
    rows = []
    for sample_id, sample in samples.items():
        try:
            by_first = grades_from_json(first.get(sample_id, ""))
        except DataError:
            # One damaged sample must not break every report.
            continue
        own = Rows.read([before[sample_id]]).requests
        block = judged_request(
            sample.record,
            sample.judge,
            scale,
            probability=float(own["probability"][0]),
            first=by_first,
            people=PeopleGrades(sample.people, of_people, sample.picked),
        )
        rows.append(
            GradedBlock(
                sample_id=sample_id,
                block=block,
                route=sample.record.route.value,
                is_graded=bool(sample.people),
                disagreements=sample.disagreements,
                last_label_id=newest_label[sample_id],
            )
        )
    store.save_graded(series, rows)


def is_whole(rows: Rows) -> np.ndarray:
    """Tell for each request whether a draw asked for all of it, whatever people found."""
    ungraded = rows.total(np.asarray(rows.passages["chance"] < 1.0, np.float64))
    return np.asarray((rows.requests["draw"] > 0) & (ungraded == 0.0))
