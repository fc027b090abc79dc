"""Feeds the alarms with what a monitor judges, and acts on those that are raised."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.types import Mode, Route
from ctxguard.errors import DataError
from ctxguard.monitor.alarms.actions import act_on
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.drift import Signals
from ctxguard.monitor.alarms.loss_monitor import Quantity
from ctxguard.monitor.alarms.reference import corrected
from ctxguard.monitor.alarms.state import AlarmState
from ctxguard.monitor.estimation.reduce import recall_loss
from ctxguard.monitor.estimation.terms import table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.comparison import DEFAULT_MAX_CORPUS_CHANGE

_log = logging.getLogger(__name__)

_REMEMBERED = 500
_LABELS_AFTER_ALARM = 30


_SAMPLES_OF_A_SETTING = 20
"""Samples in a row after which their settings are taken for those of the whole traffic."""


class _JudgedSample(NamedTuple):
    sample_id: int
    route: Route
    served: int
    losses: Mapping[AlarmKind, float | None]


class AlarmMonitor:
    """Checks one profile's promises against what one monitor judges.

    Args:
        state: The profile's detectors and alarms.
        store: Where labels are requested, and where the alarms' state outlives the process.
        series: The judge's series.
        clock: Seconds since the epoch.
        switch_path: The profile file to switch to its safe policy; None never switches.
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
        self._judged: deque[_JudgedSample] = deque(maxlen=_REMEMBERED)
        self._without_promise = Counter[Route]()
        # Rows hold the recall loss against the first few that were judged, promised or not.
        self._with_promised_baseline: dict[Route, bool] = {}

    def add_judged(
        self, sample_id: int, record: SampleRecord, verdicts: Mapping[str, Judgment], harm: float
    ) -> None:
        """Add a judged sample, all of whose served passages have a verdict."""
        if not self._is_of_profile(record):
            return
        lost = self._recall_loss(record, verdicts)
        losses = {AlarmKind.HARM: harm, AlarmKind.RECALL_LOSS: lost}
        self._judged.append(_JudgedSample(sample_id, record.route, len(record.served), losses))
        changes = self.state.add_losses(
            record.route, recall_loss=lost, harm=harm, time_seconds=record.time_seconds
        )
        for alarm in changes.raised:
            self._act_on(alarm)
        for alarm in changes.ended:
            _log.warning(
                "ended: %s route=%s, judged losses are below their target again",
                alarm.kind.value,
                alarm.route,
            )

    def add_sampled(self, record: SampleRecord) -> None:
        """Count the signals of a sample, judged or not."""
        if self._is_of_profile(record):
            signals = Signals.of(record.scores.tolist(), kept=record.kept)
            self.state.add_signals(record.route, signals)

    def add(self, kind: AlarmKind, message: str, severity: Severity = Severity.ALARM) -> None:
        """Raise an alarm about the monitor itself, unless it is active."""
        alarm = Alarm(kind, severity, message, self._clock(), profile_id=self.state.profile_id)
        if self.state.add(alarm):
            self._act_on(alarm)

    def clear(self, kind: AlarmKind) -> None:
        """End an alarm about the monitor itself."""
        self.state.clear(kind)

    def check_corpus(self, present: CorpusSketch) -> None:
        """Warn while more of the corpus has changed since calibration than a profile holds for."""
        former, profile_id = self.state.profile.corpus, self.state.profile_id
        if former is None:
            return
        change = former.changed_share(present)
        if change <= DEFAULT_MAX_CORPUS_CHANGE:
            self.clear(AlarmKind.CORPUS_CHANGED)
            return
        alarm = Alarm(
            AlarmKind.CORPUS_CHANGED,
            Severity.WARNING,
            f"{change:.0%} of the corpus has changed since profile {profile_id} was calibrated "
            f"({present.passages:,} passages, were {former.passages:,}); a profile holds up to "
            f"{DEFAULT_MAX_CORPUS_CHANGE:.0%}. Calibrate again",
            self._clock(),
            value=change,
            target=DEFAULT_MAX_CORPUS_CHANGE,
            profile_id=profile_id,
        )
        if self.state.add(alarm):
            self._act_on(alarm)

    def correct_judge(self) -> None:
        """Translate the promises to the scale of a judge that errs, by what people graded too.

        Weighted by 1 / the probability of grading alone: losses are compared as they are judged,
        and those that an alarm targeted are left out.
        """
        graded = self._store.graded(self._series)
        n = len(graded.sample_ids)
        human, judge = table_of(graded.human, n), table_of(graded.judge, n)
        routes = np.array(graded.routes, dtype=object)
        for promise in self.state.promises:
            if promise.quantity is Quantity.RECALL_LOSS:
                if not self._with_promised_baseline.get(promise.route):
                    continue
                probability = graded.pool_probability
            else:
                probability = graded.served_probability
            usable = (routes == promise.route.value) & (probability > 0.0)
            column = promise.quantity.value
            correction = corrected(
                np.minimum(human[column][usable] / promise.bound, 1.0),
                np.minimum(judge[column][usable] / promise.bound, 1.0),
                1.0 / probability[usable],
                promise.at_most / promise.bound,
            )
            if correction is not None:
                self.state.correct(promise, correction)

    def restore(self) -> None:
        """Continue from the state that another monitor of this store saved."""
        saved = self._store.get_state(self._state_key)
        if saved is None:
            return
        try:
            self.state.restore(saved)
        except DataError as error:
            _log.warning("the alarms start afresh: %s", error)

    def save(self) -> None:
        """Save the alarms' state in the store, for the next process."""
        self._store.set_state(self._state_key, self.state.to_json())

    def _is_of_profile(self, record: SampleRecord) -> bool:
        """Whether the profile's own policy served the sample."""
        return record.profile_id == self.state.profile_id and record.mode is Mode.ENFORCE

    def _recall_loss(self, record: SampleRecord, verdicts: Mapping[str, Judgment]) -> float | None:
        """The loss that the route's certificate bounds; None where it was not judged."""
        route = self.state.profile.routes.get(record.route)
        certificate = None if route is None else route.certificate
        if certificate is None:
            return None
        k = _baseline_k(certificate.baseline)
        self._check_rates(record, k)
        self._with_promised_baseline[record.route] = k == record.rates.baseline_k
        return recall_loss(record, verdicts, k)

    def _check_rates(self, record: SampleRecord, k: int | None) -> None:
        """Warn where no sample shows the loss that is promised, until one may."""
        route = record.route
        if record.rates.judges_first(k):
            self._without_promise[route] = 0
            self.state.clear(AlarmKind.PROMISE_NOT_MONITORED, route)
            return
        self._without_promise[route] += 1
        if self._without_promise[route] < _SAMPLES_OF_A_SETTING:
            return
        certificate, mend = (
            ("the whole pool", "JudgingRates(full_pool_rate=0.05)")
            if k is None
            else (f"the retriever's first {k}", f"JudgingRates(baseline_k={k}, baseline_rate=0.2)")
        )
        alarm = Alarm(
            AlarmKind.PROMISE_NOT_MONITORED,
            Severity.WARNING,
            f"Route {route.value}: the promise on recall loss cannot be monitored. The certificate "
            f"is about {certificate}, and the samples' settings never have all of these judged. "
            f"Give sample_to rates={mend}",
            self._clock(),
            route=route,
            profile_id=self.state.profile_id,
        )
        if self.state.add(alarm):
            self._act_on(alarm)

    def _act_on(self, alarm: Alarm) -> None:
        self._store.queue_labels(self._samples_to_label(alarm), reason=alarm.kind.value)
        act_on(alarm, self.state.profile, self._switch_path)

    def _samples_to_label(self, alarm: Alarm) -> list[int]:
        """The recent samples of the alarm's route with the largest losses.

        The alarm rests on these: if the judge is wrong, it is wrong there. Of equal losses, those
        with the fewest passages to read. Labels of these confirm or refute the alarm. They are no
        random sample, and enter no estimate.
        """
        order = sorted(
            (-loss, sample.served, sample.sample_id)
            for sample in self._judged
            if sample.route is alarm.route and (loss := sample.losses.get(alarm.kind)) is not None
        )
        return [sample_id for _, _, sample_id in order[:_LABELS_AFTER_ALARM]]


def _baseline_k(baseline: str) -> int | None:
    """How many of the retriever's first a certificate is relative to; None for the whole pool."""
    return None if baseline == "pool" else int(baseline.removeprefix("k="))
