"""Judged requests whose whole pool has verdicts: they can be decided on again by any policy.

The verdicts are the judge's, or those of people where they graded. A pool is judged in full with a
higher probability where nothing relevant was served, and so such a request weighs less.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.monitor.estimation.metrics import Rows
from ctxguard.monitor.estimation.promotion import Rise, rise
from ctxguard.monitor.judges import PEOPLE_ALONE, Judgment
from ctxguard.monitor.labels.human import NOBODY, human_verdicts
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.transactions import chunks
from ctxguard.profile.schema import Profile, RouteVerdict

_AT_ONCE = 200
"""Samples whose texts are in memory at once."""
_DAY_SECONDS = 86_400.0


def _whole_pool_chance(record: SampleRecord, row: np.void, *, alone: bool) -> float | None:
    """Return the probability with which the whole pool was to be judged; None where it was not.

    Without a judge nothing is known of what was served when pools are chosen.
    """
    if alone:
        whole = record.full_pool or record.rates.dropped_rate == 1.0
        chance = record.rates.full_pool_probability(has_hit=True)
        return 1.0 if not record.dropped else chance if whole else None
    return None if np.isnan(row["pool_chance"]) else float(row["pool_chance"])


def _is_usable(record: SampleRecord, labels: Mapping[str, Judgment]) -> bool:
    if record.query is None:
        return False
    if record.dropped and not record.rates.full_pool_probability(has_hit=True):
        return False
    pool = {record.passage_ids[place] for place in (*record.served, *record.dropped)}
    return pool <= labels.keys()


_Seen = tuple[Mapping[str, Judgment], Route, tuple[float, ...]]
"""What people said of a request when it was read, its route, and how a policy in shadow differs
from what is served today: its recall less that of today's first k, the request's weight and time,
and whether people graded all that either keeps; empty where the request does not count."""


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
        self._is_alone = series == PEOPLE_ALONE
        self._exact = exact or self._is_alone
        self._routes = {
            route: (own.policy, own.verdict)
            for route, own in profile.routes.items()
            if own.verdict is not None and own.verdict.decision == "shadow"
        }
        self._seen: dict[int, _Seen] = {}

    def look(self) -> dict[Route, Rise]:
        """Judge what the requests that are judged by now say of each route in shadow."""
        if not self._routes:
            return {}
        people = human_verdicts(self._store.labels())
        known = {
            sample_id
            for sample_id, (by_people, _, _) in self._seen.items()
            if by_people == people.get(sample_id, NOBODY).by_passage
        }
        for sample, row in self._whole_pools(skip=known):
            seen = sample.people, sample.record.route, self._difference(sample, row)
            self._seen[sample.sample_id] = seen
        return {route: self._rise(route, verdict) for route, (_, verdict) in self._routes.items()}

    def _whole_pools(self, skip: Collection[int]) -> Iterator[tuple[GradedSample, np.void]]:
        """Read the requests of which all was to be judged, and whose text is kept."""
        for page in self._store.judged_pages(self._series):
            table = Rows.read(page.blocks).requests
            wanted = ~np.isnan(table["pool_chance"]) | self._is_alone
            ids, own = page.sample_ids[wanted].tolist(), table[wanted]
            rows = {one: row for one, row in zip(ids, own, strict=True) if one not in skip}
            for some in chunks(list(rows), _AT_ONCE):
                for sample in graded_samples(self._store, self._series, some, {}).values():
                    yield sample, rows[sample.sample_id]

    def _difference(self, sample: GradedSample, row: np.void) -> tuple[float, ...]:
        record, labels = sample.record, {**sample.judge, **sample.people}
        counts = record.profile_id == self._profile_id and record.route in self._routes
        relevant = {name for name, verdict in labels.items() if verdict.grade}
        chance = _whole_pool_chance(record, row, alone=self._is_alone)
        if not counts or not relevant or chance is None or not _is_usable(record, labels):
            return ()
        ranking, (policy, verdict) = record.ranking(), self._routes[record.route]
        kept, today = (
            {ranking.passage_ids[place] for place in decide(ranking, each).kept}
            for each in (policy, RatioPolicy(k=verdict.serving_k))
        )
        value = (len(relevant & kept) - len(relevant & today)) / len(relevant)
        is_graded = kept | today <= sample.people.keys()
        weight = 1.0 / float(row["probability"] * chance)
        return value, weight, record.time_seconds, is_graded

    def _rise(self, route: Route, verdict: RouteVerdict) -> Rise:
        own = [row for _, (_, each, row) in sorted(self._seen.items()) if each is route and row]
        values, weights, times, graded = np.array(own, np.float64).reshape(-1, 4).T
        return rise(
            values,
            weights / weights.max() if own else None,
            tolerance=verdict.tolerance,
            max_loss=verdict.max_loss,
            labelled=None if self._exact else values[graded > 0.0],
            days=float(np.ptp(times)) / _DAY_SECONDS if own else None,
        )
