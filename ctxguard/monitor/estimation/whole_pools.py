"""Judged requests whose whole pool has verdicts: they can be decided on again by any policy.

The verdicts are the judge's, or those of people where they graded. A pool is judged in full with a
higher probability where nothing relevant was served, and so such a request weighs less.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.errors import DataError
from ctxguard.monitor.estimation.rise import Rise, rise
from ctxguard.monitor.estimation.terms import table_of
from ctxguard.monitor.judges import PEOPLE_ALONE, Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json
from ctxguard.monitor.labels.human import human_verdicts
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.transactions import chunks
from ctxguard.profile.schema import Profile, RouteVerdict

_log = logging.getLogger(__name__)

IN_PART = "whose pool was judged in part"
NEVER_WHOLE = "whose pool is judged in full only where nothing relevant was served"

_AT_ONCE = 200
"""Samples whose texts are in memory at once."""
_DAY_SECONDS = 86_400.0

People = Mapping[int, Mapping[str, Judgment]]
"""The verdicts of people by sample and passage id."""


@dataclass(frozen=True)
class JudgedPool:
    """A judged request with the verdicts on its candidates, by passage id.

    Attributes:
        unusable: Why its pool cannot be decided on again; empty where it can.
        labels: A person's verdict where there is one, else the judge's.
        by_people: Those of ``labels`` that people gave.
        weight: 1/π: how many requests it stands for; NaN where it is unusable.
    """

    sample_id: int
    record: SampleRecord
    unusable: str
    labels: Mapping[str, Judgment]
    by_people: Mapping[str, Judgment]
    weight: float

    @property
    def query_id(self) -> str:
        """The sample's id, as that of a query."""
        return str(self.sample_id)

    @property
    def text(self) -> str:
        """The query."""
        return str(self.record.query)


def verdicts_of_people(store: SampleStore) -> People:
    """All that people graded."""
    found = human_verdicts(store.labels())
    return {sample_id: verdicts.by_passage for sample_id, verdicts in found.items()}


def judged_pools(
    store: SampleStore,
    series: str,
    people: People,
    *,
    skip: Collection[int] = (),
    whole_only: bool = False,
) -> Iterator[JudgedPool]:
    """The judged requests of a series whose text is kept, oldest first.

    Args:
        people: From ``verdicts_of_people``.
        skip: Samples that are not read.
        whole_only: Whether to leave out, unread, what was judged in part.
    """
    alone = series == PEOPLE_ALONE
    for page in store.judged_pages(series):
        table = table_of(page.summaries, len(page))
        wanted = _is_whole(table) | (alone or not whole_only)
        rows = {
            sample_id: row
            for sample_id, row in zip(page.sample_ids[wanted].tolist(), table[wanted], strict=True)
            if sample_id not in skip
        }
        for ids in chunks(list(rows), _AT_ONCE):
            verdicts = store.verdicts(series, ids)
            for sample_id, payload in store.payloads(ids).items():
                by_people = people.get(sample_id, {})
                judge = {} if alone else verdicts_from_json(verdicts.get(sample_id, ""))
                try:
                    record = SampleRecord.from_bytes(payload)
                except DataError as error:
                    _log.warning("sample %d is left out: %s", sample_id, error)
                    continue
                labels = {**judge, **by_people}
                row = rows[sample_id]
                chance = _whole_pool_chance(record, row, alone=alone)
                unusable = _unusable(record, chance, labels)
                weight = np.nan if unusable else 1.0 / float(row["probability"] * chance)
                yield JudgedPool(sample_id, record, unusable, labels, by_people, weight)


def _whole_pool_chance(record: SampleRecord, row: np.void, *, alone: bool) -> float | None:
    """The probability with which the whole pool was to be judged; None where it was not.

    Without a judge nothing is known of what was served when pools are chosen.
    """
    if alone:
        whole = record.full_pool or record.rates.dropped_rate == 1.0
        chance = record.rates.full_pool_probability(has_hit=True)
        return 1.0 if not record.dropped else chance if whole else None
    return float(row["full_pool_probability"]) if _is_whole(row) else None


def _is_whole(rows: Any) -> Any:
    """Whether the whole pool was to be judged, of a row or of each of a table."""
    return ~(np.isnan(rows["pool_relevant"]) & np.isnan(rows["partial_pool_relevant"]))


def _unusable(record: SampleRecord, chance: float | None, labels: Mapping[str, Judgment]) -> str:
    if record.query is None:
        return "without the query's text"
    if chance is None:
        return IN_PART
    if record.dropped and not record.rates.full_pool_probability(has_hit=True):
        return NEVER_WHOLE
    pool = {record.passage_ids[place] for place in (*record.served, *record.dropped)}
    return "" if pool <= labels.keys() else "with passages that have no verdict"


@dataclass(frozen=True, slots=True)
class _Difference:
    """How a policy in shadow differs from what is served today on one request.

    Attributes:
        value: Its recall less that of today's first k; None where the request does not count.
        is_graded: Whether people graded all that either keeps.
        by_people: What people said when this was computed.
    """

    route: Route
    value: float | None
    weight: float
    time_seconds: float
    is_graded: bool
    by_people: Mapping[str, Judgment]


class ShadowedTraffic:
    """The judged requests of a profile in shadow, and whether they let its verdicts rise.

    Only requests that this profile decided count: none of them can have chosen it. Each is read
    once, and again when people grade it.

    Args:
        profile: The profile in force.
        exact: Whether the judge's verdicts equal people's.
    """

    def __init__(self, store: SampleStore, series: str, profile: Profile, *, exact: bool) -> None:
        self._store = store
        self._series = series
        self._profile_id = profile.profile_id
        self._exact = exact or series == PEOPLE_ALONE
        self._routes = {
            route: (own.policy, own.verdict)
            for route, own in profile.routes.items()
            if own.verdict is not None and own.verdict.decision == "shadow"
        }
        self._seen: dict[int, _Difference] = {}

    def look(self) -> dict[Route, Rise]:
        """What the requests that are judged by now say of each route in shadow."""
        if not self._routes:
            return {}
        people = verdicts_of_people(self._store)
        known = {
            sample_id
            for sample_id, seen in self._seen.items()
            if seen.by_people == people.get(sample_id, {})
        }
        for pool in judged_pools(self._store, self._series, people, skip=known, whole_only=True):
            self._seen[pool.sample_id] = self._difference(pool)
        return {route: self._rise(route, verdict) for route, (_, verdict) in self._routes.items()}

    def _difference(self, pool: JudgedPool) -> _Difference:
        record, value, is_graded = pool.record, None, False
        counts = record.profile_id == self._profile_id and record.route in self._routes
        relevant = {name for name, verdict in pool.labels.items() if verdict.grade}
        if counts and relevant and not pool.unusable:
            ranking, (policy, verdict) = record.ranking(), self._routes[record.route]
            kept, today = (
                {ranking.passage_ids[place] for place in decide(ranking, each).kept}
                for each in (policy, RatioPolicy(k=verdict.serving_k))
            )
            value = (len(relevant & kept) - len(relevant & today)) / len(relevant)
            is_graded = kept | today <= pool.by_people.keys()
        weight, answered = pool.weight, record.time_seconds
        return _Difference(record.route, value, weight, answered, is_graded, pool.by_people)

    def _rise(self, route: Route, verdict: RouteVerdict) -> Rise:
        seen = [
            each
            for _, each in sorted(self._seen.items())
            if each.route is route and each.value is not None
        ]
        weights = np.array([each.weight for each in seen])
        times = [each.time_seconds for each in seen]
        return rise(
            np.array([each.value for each in seen], np.float64),
            weights / weights.max(initial=0.0) if seen else None,
            tolerance=verdict.tolerance,
            max_loss=verdict.max_loss,
            labelled=None
            if self._exact
            else np.array([each.value for each in seen if each.is_graded], np.float64),
            days=(max(times) - min(times)) / _DAY_SECONDS if seen else None,
        )
