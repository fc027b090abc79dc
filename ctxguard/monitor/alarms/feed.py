"""Feeds the alarms with judged requests, a day at a time, and acts on those that are raised.

An alarm is logged and may switch to the safe policy. Notifying people is left to Prometheus and
Alertmanager, which see the alarm as a metric. Reads and writes the store and the profile's file,
reads the clock, and logs.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.types import Mode, Route
from ctxguard.errors import CtxguardError, DataError, ProfileError
from ctxguard.measure.metrics import Metric, losses
from ctxguard.measure.rows import ROUTES, Rows, hash_number
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.alarms.reference import corrected
from ctxguard.monitor.alarms.state import AlarmState
from ctxguard.monitor.labels.evidence import with_first
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.comparison import DEFAULT_MAX_CORPUS_CHANGE
from ctxguard.profile.schema import Profile

_log = logging.getLogger(__name__)

_DAY_SECONDS = 86_400.0
_LATE_SECONDS = 600.0
"""How long after the end of a day its samples may still reach the store."""


def act_on(alarm: Alarm, profile: Profile, switch_path: Path | None = None) -> None:
    """Log a new alarm and, for recall loss, switch to the safe policy. Never raises.

    It switches the file that guards watch (``switch_path``, if any) only if the loss was compared
    with the promise, not with the judge's own mean.
    """
    _log.warning(
        "%s route=%s value=%s target=%s reference=%s n=%d profile=%s",
        alarm.kind.value,
        None if alarm.route is None else alarm.route.value,
        _short(alarm.value),
        _short(alarm.target),
        None if alarm.reference is None else alarm.reference.value,
        alarm.n,
        alarm.profile_id,
    )
    # More passages lower recall loss but raise harm, so this is safe only against the former.
    if switch_path is None or alarm.kind is not AlarmKind.RECALL_LOSS:
        return
    if alarm.reference is None or not alarm.reference.is_of_promise:
        _log.warning(
            "no switch to the safe policy: the loss rose above the judge's own mean, which does "
            "not show that the promise is broken"
        )
        return
    try:
        safe, current = profile.safe(), Profile.load(switch_path)
        if current.profile_id == safe.profile_id:
            return
        if current.profile_id != profile.profile_id:
            raise ProfileError(
                f"{switch_path} now holds profile {current.profile_id}, but the alarm is about "
                f"{profile.profile_id}: the file was not changed"
            )
        safe.save(switch_path)
        _log.warning("switched %s to its safe policy", switch_path)
    except (CtxguardError, OSError) as error:
        _log.error("no switch to the safe policy: %s", error)


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


class AlarmMonitor:
    """Checks one profile's promises against the judged losses in a store.

    Losses are compared a day at a time, once no sample of the day waits: losses vary over a day,
    and its first hours alone may look like a rise. Days begin at the time of day of the first loss.
    The store keeps the alarms' state over a restart.
    """

    def __init__(
        self,
        state: AlarmState,
        store: SampleStore,
        series: str,
        clock: Callable[[], float],
        switch_path: Path | None = None,
    ) -> None:
        self.state = state
        self._store = store
        self._series = series
        self._state_key = f"alarms {series}"
        self._clock = clock
        self._switch_path = switch_path
        # Rows hold the recall loss against the first few that were judged, even without a promise.
        self._with_promised_baseline: dict[Route, bool] = {}

    def follow(self, profile: Profile) -> None:
        """From now on check another profile, which has replaced the former one in its file.

        Alarms stay active where it is the former's safe policy; otherwise they end.
        """
        former = self.state
        self.state = AlarmState(profile, exact=former.is_exact)
        self.state.restore(former.to_json())
        self._with_promised_baseline.clear()

    def note_loss(self, record: SampleRecord, rows: Rows) -> None:
        """Note the loss of a judged sample in its row, if the profile's own policy served it.

        One of which a served passage has no grade is left out.
        """
        is_own = record.profile_id == self.state.profile_id and record.mode is Mode.ENFORCE
        if is_own and rows.without_failed[0].all():
            request = rows.requests
            request["profile"] = hash_number(self.state.profile_id)
            request["recall_loss"], request["loss_probability"] = self._recall_loss(record, rows)

    def evaluate(self) -> None:
        """Compare the losses of each day that has ended since the last call, and act on alarms."""
        while (end := self._end_of_next_day()) is not None:
            of_day = self._store.judged_pages(
                self._series,
                since=end - _DAY_SECONDS,
                until=end,
                profile_id=self.state.profile_id,
            )
            raised, ended = self.state.add_day(Rows.joined(list(of_day)), end)
            for alarm in raised:
                act_on(alarm, self.state.profile, self._switch_path)
            for alarm in ended:
                _log.warning(
                    "ended: %s route=%s, judged losses are below their target again",
                    alarm.kind.value,
                    alarm.route,
                )

    def _end_of_next_day(self) -> float | None:
        """Return the end of the next day with losses; None until it is over and fully judged."""
        begin = self.state.report().evaluated_until
        first = self._store.first_loss_seconds(self._series, self.state.profile_id, since=begin)
        if first is None:
            return None
        begin = first if begin is None else begin
        end = begin + (math.floor((first - begin) / _DAY_SECONDS) + 1) * _DAY_SECONDS
        waiting = self._store.oldest_waiting()
        is_judged = waiting is None or waiting >= end
        return end if is_judged and self._clock() >= end + _LATE_SECONDS else None

    def add(self, kind: AlarmKind, message: str, **about: Any) -> None:
        """Raise a warning about the monitor itself, unless it is active."""
        profile_id = self.state.profile_id
        alarm = Alarm(kind, message, self._clock(), profile_id=profile_id, **about)
        if self.state.add(alarm):
            act_on(alarm, self.state.profile, self._switch_path)

    def check_corpus(self, present: CorpusSketch) -> None:
        """Warn while the corpus has changed since calibration by more than a profile allows."""
        former, profile_id = self.state.profile.corpus, self.state.profile_id
        if former is None:
            return
        change = former.changed_share(present)
        if change <= DEFAULT_MAX_CORPUS_CHANGE:
            self.state.clear(AlarmKind.CORPUS_CHANGED)
            return
        self.add(
            AlarmKind.CORPUS_CHANGED,
            f"{change:.0%} of the corpus has changed since profile {profile_id} was calibrated "
            f"({present.passages:,} passages, were {former.passages:,}); a profile is valid up to "
            f"{DEFAULT_MAX_CORPUS_CHANGE:.0%}. Calibrate again",
            value=change,
            target=DEFAULT_MAX_CORPUS_CHANGE,
        )

    def correct_judge(self) -> None:
        """Translate the promises to an erring judge's scale, using requests people graded.

        Only requests that were wholly graded count, each alike (``label export --whole``): losses
        are compared as they are judged.
        """
        rows = self._store.graded(self._series)
        n_unasked = rows.total(np.asarray(rows.passages["asked_probability"] < 1.0))
        whole = np.asarray((rows.requests["draw"] > 0) & (n_unasked == 0.0))
        rows = rows.take(whole)
        human, judge = losses(rows.by_people()), losses(rows)
        for promise in self.state.promises:
            if promise.quantity is AlarmKind.RECALL_LOSS and not self._with_promised_baseline.get(
                promise.route
            ):
                continue
            usable = rows.requests["route"] == ROUTES.index(promise.route)
            metric = Metric(promise.quantity.value)
            correction = corrected(
                np.minimum(human[metric][usable] / promise.bound, 1.0),
                np.minimum(judge[metric][usable] / promise.bound, 1.0),
                np.ones(np.count_nonzero(usable)),
                promise.at_most / promise.bound,
            )
            if correction is not None:
                self.state.correct(promise, *correction)

    def restore(self) -> None:
        """Continue from the state that another monitor of this store saved."""
        saved = self._store.get_state(self._state_key)
        if saved is None:
            return
        try:
            self.state.restore(saved)
        except DataError as error:
            _log.warning("the alarms start again from nothing: %s", error)

    def save(self) -> None:
        """Save the alarms' state in the store, for the next process."""
        self._store.set_state(self._state_key, self.state.to_json())

    def _recall_loss(self, record: SampleRecord, rows: Rows) -> tuple[float, float]:
        """Return the loss that the route promises to bound, and the probability of judging it."""
        route = self.state.profile.routes.get(record.route)
        promise = None if route is None else route.recall_promise
        if promise is None:
            return math.nan, 0.0
        _, k, _ = promise
        self._check_rates(record, k)
        self._with_promised_baseline[record.route] = k == record.rates.baseline_k
        n = len(record.served) + len(record.dropped)
        [loss] = losses(with_first(rows, record, k))[Metric.RECALL_LOSS]
        return loss, record.rates.first_probability(min(k, n))

    def _check_rates(self, record: SampleRecord, k: int) -> None:
        """Warn while samples cannot show the promised loss."""
        route = record.route
        if record.rates.first_probability(k) > 0.0:
            self.state.clear(AlarmKind.PROMISE_NOT_MONITORED, route)
            return
        self.add(
            AlarmKind.PROMISE_NOT_MONITORED,
            f"Route {route.value}: the promise on recall loss cannot be monitored. It is about the "
            f"retriever's first {k}, but with these sampling settings not all of them are ever "
            f"judged. Give sample_to rates=JudgingRates(baseline_k={k}, baseline_rate=0.2)",
            route=route,
        )
