"""Feeds the alarms with what a monitor judges, and acts on those that are raised."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.types import Flag, Mode, Route
from ctxguard.errors import DataError
from ctxguard.monitor.alarms.actions import act_on
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.drift import Signals
from ctxguard.monitor.alarms.state import AlarmState
from ctxguard.monitor.estimation.terms import JudgedRequest
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.comparison import DEFAULT_MAX_CORPUS_CHANGE

_log = logging.getLogger(__name__)

_REMEMBERED = 500
_LABELS_AFTER_ALARM = 30


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
        self._state_key = f"alarms {series}"
        self._clock = clock
        self._switch_path = switch_path
        self._judged: deque[_JudgedSample] = deque(maxlen=_REMEMBERED)

    def add_judged(
        self, sample_id: int, record: SampleRecord, request: JudgedRequest, harm: float
    ) -> None:
        """Add a judged sample."""
        if not self._is_of_profile(record):
            return
        recall_loss = request.recall_loss if self._has_promised_baseline(record) else None
        losses = {AlarmKind.HARM: harm, AlarmKind.RECALL_LOSS: recall_loss}
        self._judged.append(_JudgedSample(sample_id, record.route, len(record.served), losses))
        for alarm in self.state.add_losses(
            record.route,
            recall_loss=recall_loss,
            harm=harm,
            time_seconds=record.time_seconds,
        ):
            self._act_on(alarm)

    def add_sampled(self, record: SampleRecord) -> None:
        """Add the signals of a sample, judged or not."""
        if not self._is_of_profile(record):
            return
        signals = Signals.of(
            record.scores.tolist(),
            kept=record.kept,
            insufficient=Flag.INSUFFICIENT.value in record.flags,
        )
        for alarm in self.state.add_signals(
            record.route, signals, time_seconds=record.time_seconds
        ):
            self._act_on(alarm)

    def add(self, kind: AlarmKind, message: str, severity: Severity = Severity.ALARM) -> None:
        """Raise an alarm about the monitor itself, unless it is active."""
        alarm = Alarm(kind, severity, message, self._clock(), profile_id=self.state.profile_id)
        if self.state.add(alarm):
            self._act_on(alarm)

    def clear(self, kind: AlarmKind) -> None:
        """End an alarm about the monitor itself."""
        self.state.clear(kind)

    def check_store(self) -> None:
        """Raise an alarm while a damaged database file lies aside; end it when it is gone."""
        aside = self._store.quarantined
        if aside is None:
            self.clear(AlarmKind.STORE_QUARANTINED)
        else:
            self.add(
                AlarmKind.STORE_QUARANTINED,
                f"The sample store was damaged; it was moved aside to {aside.name} and begun anew. "
                "Its samples are missing from the estimates",
            )

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

    def _has_promised_baseline(self, record: SampleRecord) -> bool:
        """Whether the sample's recall loss has the baseline of the certificate's."""
        route = self.state.profile.routes.get(record.route)
        certificate = None if route is None else route.certificate
        return certificate is not None and certificate.baseline == f"k={record.rates.baseline_k}"

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
