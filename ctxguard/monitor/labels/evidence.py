"""Turns a judge's and people's grades of one sample into evidence: its rows.

All served passages are judged, and dropped ones with the probabilities that the sample holds.
Rows are made while the text is available and outlive it; labels that arrive later replace them.
Pure, but for ``update_graded``, which reads and writes the store.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ctxguard.core.scores import log_odds
from ctxguard.measure.rows import (
    FAILED,
    FAR,
    MISSING,
    NEAR,
    NEAR_DROPPED,
    NO,
    PASSAGE,
    REQUEST,
    ROUTES,
    UNGRADED,
    YES,
    Rows,
    hash_number,
    rank_group,
    session_number,
)
from ctxguard.measure.worth import Utilities
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import OPENED, PickKind, SampleStore

_NO_GRADE = Judgment("", 0, judged=False)


class Scale(NamedTuple):
    """What grades are worth: the utilities, and the highest grades of the judge and of people."""

    utilities: Utilities
    max_grade: int
    people_max_grade: int = 0

    def worth(self, given: Judgment, *, by_people: bool = False) -> float:
        """Return the utility of a passage with a grade."""
        return self.utilities.of(
            given.grade,
            top_grade=self.people_max_grade if by_people else self.max_grade,
            negative=given.negative,
            is_judged=given.judged,
        )


def judged_request(
    sample: GradedSample,
    scale: Scale,
    *,
    probability: float,
    first: Mapping[str, Judgment] | None = None,
) -> Rows:
    """Reduce a sample to its rows.

    A passage that should have a grade of the judge but has none failed: its row has no grade.

    Args:
        probability: Probability with which it was sampled and then taken up for judging.
        first: Grades of the judge whose hits decided which passages were judged; None for the
            same judge.
    """
    record, first = sample.record, sample.judge if first is None else first
    rates, has_hit = record.rates, record.has_hit(first)
    places, probabilities = record.to_judge(first), record.judging_chances(first)
    names = [record.passage_ids[place] for place in places]
    given = [sample.judge.get(name) for name in names]
    whole, is_fair = record.has_full_pool(has_hit=has_hit), True
    of_dropped = of_pool = 1.0
    if record.dropped:
        # Of the last passages of a long pool, whether this one is long or not: else a figure would
        # be that of short pools alone.
        of_dropped = rates.dropped_probability(has_hit=has_hit, in_baseline=False)
        of_pool = rates.full_pool_probability(has_hit=has_hit) if whole else math.nan
        # Pools judged only where nothing relevant was served would show a recall of 0.
        is_fair = rates.full_pool_probability(has_hit=True) > 0.0
    request, passages = np.zeros(1, REQUEST), np.zeros(len(places), PASSAGE)
    request["sample_id"], request["time_seconds"] = sample.sample_id, record.time_seconds
    request["route"] = ROUTES.index(record.route)
    request["n_passages"], request["n_served"] = len(places), len(record.served)
    request["probability"] = probability
    request["session"] = session_number(record.session_id)
    request["question"] = _question_number(record)
    request["dropped_probability"], request["pool_probability"] = of_dropped, of_pool
    request["has_recall"] = whole and is_fair and None not in given
    request["is_graded"], request["disagreements"] = bool(sample.people), sample.disagreements
    request["run_probability"] = 1.0
    rank = np.arange(1, len(places) + 1)
    rank[len(record.served) :] = 0
    is_near = np.isin(places, record.dropped[:NEAR_DROPPED])
    passages["position"], passages["rank"] = places, rank
    passages["group"] = np.where(rank > 0, rank_group(rank), np.where(is_near, NEAR, FAR))
    passages["judge_grade"] = [_grade(one) for one in given]
    passages["score"] = [_log_odds(one) for one in given]
    passages["worth"] = [scale.worth(one or _NO_GRADE) for one in given]
    passages["size"] = [1.0 / probabilities[place] for place in places]
    passages["people_grade"] = UNGRADED
    for row, name in enumerate(names):
        if (by_people := sample.people.get(name)) is not None:
            passages["people_grade"][row] = by_people.grade
            passages["people_worth"][row] = scale.worth(by_people, by_people=True)
    if asked := asked_probabilities(sample):
        passages["asked_probability"] = [asked.get(place, 0.0) for place in places]
        opened = next(one for one in sample.picked if one.kind in OPENED)
        request["draw"], request["run_probability"] = opened.pick_id, opened.probability
        request["is_run"] = opened.kind is PickKind.RUN
    return with_first(Rows.of(request, passages), record, rates.baseline_k)


def with_first(rows: Rows, record: SampleRecord, k: int) -> Rows:
    """Return a sample's row with recall loss measured against the retriever's first k."""
    requests, passages = rows.requests.copy(), rows.passages.copy()
    is_first = np.isin(passages["position"], record.first(k))
    passages["in_baseline"] = is_first
    has_failed = (passages["judge_grade"][is_first] == FAILED).any()
    requests["has_baseline"] = record.judges_first(k) and not has_failed
    return Rows(requests, passages, rows.request)


def _question_number(record: SampleRecord) -> int:
    """Hash the question to a number, ignoring case and spaces; without text, hash the request."""
    text = record.request_id if record.query is None else " ".join(record.query.casefold().split())
    return hash_number(text)


def _grade(given: Judgment | None) -> int:
    if given is None:
        return FAILED
    if not given.judged:
        return MISSING
    return YES if given.grade > 0 else NO


def _log_odds(given: Judgment | None) -> float:
    if given is None or given.score is None:
        return 0.0
    return float(log_odds(given.score).clip(-8.0, 8.0))


def asked_probabilities(sample: GradedSample) -> dict[int, float]:
    """Compute the probability with which each passage's grade was asked for, by position.

    Given the grades above it, and whether the request is graded on, a passage is asked about for
    certain down to the first relevant one that is served, and else by its coin.

    Returns:
        Empty unless a draw opened the sample and everything it asks about is graded.
    """
    record, picked = sample.record, sample.picked
    kinds = {one.kind for one in picked}
    if not kinds & OPENED or not sample.is_graded:
        return {}
    found = {one.position: one.probability for one in picked if one.kind is PickKind.COIN}
    for position in record.served if PickKind.RUN in kinds else ():
        found[position] = 1.0
        if record.grade(sample.people, position):
            break
    return found


def update_graded(store: SampleStore, series: str, scale: Scale) -> None:
    """Remake the rows of samples that have newer labels.

    Call this before text is deleted.

    Args:
        series: The series of judgments that the labels correct.
        scale: Its ``max_grade`` is that of people too if the labels name none.
    """
    newest_label = store.to_grade(series)
    if not newest_label:
        return
    ids = list(newest_label)
    judged, first = store.first_rows(ids), store.grades(None, ids)
    # Grades given before a text was deleted stay.
    samples = graded_samples(store, series, list(judged), store.picked(None, ids))
    given = [one.grade for sample in samples.values() for one in sample.people.values()]
    scale = scale._replace(people_max_grade=max([store.top_grade() or scale.max_grade, *given]))
    rows = []
    for sample_id, sample in samples.items():
        if sample_id not in first:
            continue
        before = judged[sample_id]
        own = judged_request(
            sample, scale, probability=before["probability"], first=first[sample_id]
        )
        own.requests["last_label"] = newest_label[sample_id]
        for name in ("profile", "recall_loss", "loss_probability"):
            own.requests[name] = before[name]
        rows.append(own)
    store.save_graded(series, Rows.joined(rows))
