"""From judged samples to alarms: what a profile's board is told, and what is done when it rings."""

import json
import logging
from collections import deque
from collections.abc import Callable

from ctxguard.errors import DataError
from ctxguard.monitor.alarms import (
    Alarm,
    AlarmActions,
    AlarmBoard,
    AlarmKind,
    JudgedSample,
    Severity,
    Signals,
    where_labels_tell_most,
)
from ctxguard.monitor.estimates import JudgedRequest
from ctxguard.monitor.records import Record
from ctxguard.monitor.store import SampleStore
from ctxguard.types import Mode, Route

_log = logging.getLogger(__name__)

_REMEMBERED = 500
_LABELS_AFTER_ALARM = 30


class Watch:
    """Watches one profile's promises over what one monitor judges.

    Args:
        board: The watches and the alarms that are up.
        actions: What is done about a new alarm beside showing it.
        store: Where labels are asked for, and where the board's state outlives the process.
        series: The judge's.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        board: AlarmBoard,
        actions: AlarmActions,
        store: SampleStore,
        series: str,
        clock: Callable[[], float],
    ) -> None:
        self.board = board
        self._actions = actions
        self._store = store
        self._series = series
        self._clock = clock
        self._judged: deque[dict[AlarmKind, JudgedSample]] = deque(maxlen=_REMEMBERED)

    def judged(self, sample_id: int, record: Record, request: JudgedRequest, harm: float) -> None:
        """Take in a judged sample."""
        if not self._is_watched(record):
            return
        recall_loss = request.recall_loss if self._on_promised_baseline(record) else None
        losses = {AlarmKind.HARM: harm, AlarmKind.RECALL_LOSS: recall_loss}
        self._judged.append(
            {
                kind: JudgedSample(str(sample_id), record.route, loss, len(record.served))
                for kind, loss in losses.items()
                if loss is not None
            }
        )
        for alarm in self.board.judged(
            record.route,
            recall_loss=recall_loss,
            harm=harm,
            time_seconds=record.time_seconds,
        ):
            self._ring(alarm)

    def signals(self, record: Record) -> None:
        """Take in what a sample shows without being judged."""
        if not self._is_watched(record):
            return
        signals = Signals.of(record.scores.tolist(), kept=record.kept)
        for alarm in self.board.signals(record.route, signals, time_seconds=record.time_seconds):
            self._ring(alarm)

    def raise_(self, kind: AlarmKind, message: str, severity: Severity = Severity.ALARM) -> None:
        """Put up an alarm about the monitor itself."""
        alarm = Alarm(kind, severity, message, self._clock(), profile_id=self.board.profile_id)
        if self.board.raise_(alarm):
            self._ring(alarm)

    def over(self, kind: AlarmKind) -> None:
        """What an alarm about the monitor itself was about is over."""
        self.board.acknowledge(kind)

    def restore(self) -> None:
        """Go on where another monitor of this store stopped."""
        known = self._store.get_state(state_key(self._series))
        if known is None:
            return
        try:
            self.board.restore(known)
        except DataError as error:
            _log.warning("the alarms start afresh: %s", error)

    def keep(self) -> None:
        """Take down what people acknowledged, and keep the state for the next process."""
        key = acknowledged_key(self._series)
        for kind, route, signal in json.loads(self._store.get_state(key) or "[]"):
            self.board.acknowledge(AlarmKind(kind), None if route is None else Route(route), signal)
        self._store.set_state(key, "[]")
        self._store.set_state(state_key(self._series), self.board.state())

    def _is_watched(self, record: Record) -> bool:
        """Whether a sample was served by the policy that is watched: not by one before it."""
        return record.profile_id == self.board.profile_id and record.mode is Mode.ENFORCE

    def _on_promised_baseline(self, record: Record) -> bool:
        """Whether the sample's recall loss is relative to what the certificate's is."""
        route = self.board.profile.routes.get(record.route)
        certificate = None if route is None else route.certificate
        return certificate is not None and certificate.baseline == f"k={record.rates.baseline_k}"

    def _ring(self, alarm: Alarm) -> None:
        of_kind = [losses[alarm.kind] for losses in self._judged if alarm.kind in losses]
        telling = where_labels_tell_most(of_kind, _LABELS_AFTER_ALARM)
        self._store.queue_labels([int(sample_id) for sample_id in telling], why=alarm.kind.value)
        self._actions(alarm, self.board.profile)


def state_key(series: str) -> str:
    """Under which a store keeps the state of the alarms."""
    return f"alarms {series}"


def acknowledged_key(series: str) -> str:
    """Under which a store keeps what people acknowledged until the monitor has taken it down."""
    return f"acknowledged {series}"


def acknowledge(
    store: SampleStore, series: str, kind: AlarmKind, route: Route | None, signal: str | None
) -> bool:
    """Have the monitor take an alarm down when it next tends to things.

    Returns:
        Whether such an alarm was up when the monitor last kept its state.
    """
    up = any(alarm.key == (kind, route, signal) for alarm in alarms_up(store, series))
    key = acknowledged_key(series)
    told = json.loads(store.get_state(key) or "[]")
    told.append([kind.value, None if route is None else route.value, signal])
    store.set_state(key, json.dumps(told))
    return up


def alarms_up(store: SampleStore, series: str) -> list[Alarm]:
    """The alarms that were up when the monitor last kept its state.

    Raises:
        DataError: a state that this release cannot read.
    """
    known = store.get_state(state_key(series))
    if known is None:
        return []
    try:
        return [Alarm.from_json(entry["alarm"]) for entry in json.loads(known)["active"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the alarms' state cannot be read ({type(error).__name__})") from error
