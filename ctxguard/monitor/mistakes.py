"""Finds a day's requests whose answer-bearing passages the guard dropped, largest loss first.

Only passages among today's first k count as lost: no reader ever saw the others. Reads the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.decision import Decision
from ctxguard.core.scores import discounts
from ctxguard.core.types import Mode
from ctxguard.measure.rows import YES
from ctxguard.measure.worth import READERS
from ctxguard.monitor.explanation import ExplainedCandidate, candidates_of, decided
from ctxguard.monitor.labels.human import standing
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow, SampleStore
from ctxguard.profile.schema import Profile

DAY_SECONDS = 86_400.0
MOST_DAYS = 30
MOST_READ = 200
"""The most requests of a day, a judge and a tenant whose texts are read, largest loss first."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A request with relevant passages among today's first k that the policy dropped.

    Attributes:
        query: The question; None where it is not stored.
        mode: The guard's mode; in shadow nothing was lost: the policy would have dropped these.
        dropped: The relevant passages that it dropped, best first.
        n_relevant: The relevant passages of today's first k and of what was kept, as far as they
            were judged or graded.
        udcg_loss: UDCG that appending these passages would add to the context.
        recall_loss: Share of ``n_relevant`` that was dropped.
        note: How the profile that gives the reasons differs from the one that decided.
    """

    request_id: str
    time_seconds: float
    query: str | None
    mode: Mode
    dropped: tuple[ExplainedCandidate, ...]
    n_relevant: int
    udcg_loss: float
    recall_loss: float
    note: str


@dataclass(frozen=True, slots=True)
class DayOfMistakes:
    """The mistakes of one day.

    Attributes:
        judged: Judged requests of the day, of all tenants.
        unread: Those that may have lost a passage but were not read, as less is at stake.
        mistakes: Largest loss of UDCG first, then of recall.
    """

    day: date
    judged: int
    unread: int
    mistakes: tuple[Mistake, ...]


def mistakes_of(
    store: SampleStore, day: date, profile: Profile | None, *, tenant: str | None = None
) -> DayOfMistakes:
    """Find the judged requests of a day whose relevant passages the policy dropped from today's k.

    Requests that the guard enforced its policy on lost what it dropped. Those in shadow are decided
    on again, and need the profile for it.

    Args:
        day: In UTC.
        profile: Gives the reasons, P(relevant) and the worth of passages; None for none.
        tenant: As ``GradedSample.is_of_tenant`` takes it; None for all.
    """
    since = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    judged = unread = 0
    found: list[Mistake] = []
    for series in store.series():
        n_judged, ids = _suspects(store, series, since, in_shadow=profile is not None)
        samples: list[GradedSample] = []
        n_read = 0
        while n_read < len(ids) and len(samples) < MOST_READ:
            page = graded_samples(store, series, ids[n_read : n_read + MOST_READ].tolist(), {})
            samples += [one for one in page.values() if tenant is None or one.is_of_tenant(tenant)]
            n_read += MOST_READ
            if tenant is None:
                break
        judge_top = max([1, *(one.grade for each in samples for one in each.judge.values())])
        # The highest grades given by the judge so far, and of people's scale.
        tops = judge_top, store.top_grade() or judge_top
        labels = standing(store.labels([one.sample_id for one in samples]))
        for one in samples:
            own = [label for sample_id, label in labels if sample_id == one.sample_id]
            found += _mistake(one, own, profile, tops)
        judged, unread = judged + n_judged, unread + max(len(ids) - n_read, 0)
    found.sort(key=lambda one: (-one.udcg_loss, -one.recall_loss, one.time_seconds))
    return DayOfMistakes(day, judged, unread, tuple(found))


def latest_mistakes(
    store: SampleStore, now: date, profile: Profile | None, *, tenant: str | None = None
) -> DayOfMistakes:
    """Find the mistakes of the latest day that has any, of the last `MOST_DAYS`.

    Yesterday's if no day has any; ``now`` is today, in UTC.
    """
    quiet: list[DayOfMistakes] = []
    for ago in range(MOST_DAYS):
        found = mistakes_of(store, now - timedelta(days=ago), profile, tenant=tenant)
        if found.mistakes:
            return found
        quiet.append(found)
    return quiet[1]


def _suspects(
    store: SampleStore, series: str, since: float, *, in_shadow: bool
) -> tuple[int, NDArray[np.int64]]:
    """Count a day's judged requests; list those that may have lost passages, largest loss first."""
    labelled = [one.sample_id for one in store.picked_samples(series) if one.n_labels]
    n, ids, losses = 0, [np.empty(0, np.int64)], [np.empty(0)]
    for rows in store.judged_pages(series, since=since, until=since + DAY_SECONDS):
        passages, sample_ids = rows.passages, rows.requests["sample_id"]
        says_yes, is_dropped = passages["judge_grade"] == YES, passages["rank"] == 0
        loss = rows.total(says_yes * is_dropped * passages["size"])
        may_be = (loss > 0.0) | np.isin(sample_ids, labelled)
        if in_shadow:
            may_be |= rows.total(says_yes * ~is_dropped * 1.0) > 0.0
        n += len(sample_ids)
        ids.append(sample_ids[may_be])
        losses.append(loss[may_be])
    joined = np.concatenate(ids)
    return n, joined[np.lexsort((-joined, -np.concatenate(losses)))]


def _mistake(
    sample: GradedSample, labels: Sequence[LabelRow], profile: Profile | None, tops: tuple[int, int]
) -> list[Mistake]:
    """Describe a request; empty if no passage known to be relevant was dropped.

    ``tops`` are the highest grades of the judge and of people.
    """
    record = sample.record
    decision, notes = decided(record, profile)
    kept, dropped = _kept_and_dropped(record, decision)
    route = None if profile is None else profile.routes.get(record.route)
    today = None if route is None else route.safe_policy
    k = record.rates.baseline_k if today is None else today.k
    first = set(sorted((*record.served, *record.dropped))[:k])
    lost = [place for place in dropped if place in first and sample.grade(place) > 0]
    if not lost:
        return []
    n_relevant = sum(sample.grade(place) > 0 for place in {*kept, *first})
    udcg_loss, utilities = 0.0, READERS if profile is None else profile.utilities
    for rank, place in enumerate(lost, start=len(kept) + 1):
        top_grade = tops[record.passage_ids[place] in sample.people]
        worth = utilities.of(sample.grade(place), top_grade=top_grade)
        udcg_loss += max(worth, 0.0) * float(discounts(rank)[-1])
    explained = candidates_of(record, decision, sample.judge, labels)
    by_place = {one.rank - 1: one for one in explained}
    return [
        Mistake(
            request_id=record.request_id,
            time_seconds=record.time_seconds,
            query=record.query,
            mode=record.mode,
            dropped=tuple([by_place[place] for place in lost]),
            n_relevant=n_relevant,
            udcg_loss=udcg_loss,
            recall_loss=len(lost) / n_relevant,
            note="; ".join(notes),
        )
    ]


def _kept_and_dropped(
    record: SampleRecord, decision: Decision | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Find the positions that the policy kept and dropped; none if it decided nothing."""
    if record.mode is Mode.ENFORCE:
        return record.served, record.dropped
    if record.mode is not Mode.SHADOW or decision is None:
        return (), ()
    return decision.kept, decision.order[decision.n_kept :]
