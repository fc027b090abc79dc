"""Monitor: judges the stored samples, and says what live traffic is worth.

Runs beside the request path, usually in a process of its own (``ctxguard monitor``); any number of
them may share a store. Judging may be slow or fail altogether without a request noticing.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ctxguard.errors import ConfigurationError
from ctxguard.forks import start_afresh_in_children
from ctxguard.hygiene import describe_error
from ctxguard.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.monitor.alarms import AlarmActions, AlarmBoard, AlarmKind
from ctxguard.monitor.allowance import Allowance
from ctxguard.monitor.batches import Batches, verdicts_to_json
from ctxguard.monitor.budget import Budget
from ctxguard.monitor.estimates import Estimate, Metric, RatioSums
from ctxguard.monitor.judges import Judge
from ctxguard.monitor.judging import Audit, Judging, PassageLookup
from ctxguard.monitor.report import (
    DEFAULT_PRECISION,
    LiveEstimates,
    Precision,
    Window,
    fleet_accounts,
    live_estimates,
)
from ctxguard.monitor.sampler import Accounts
from ctxguard.monitor.store import SampleStore, State
from ctxguard.monitor.tally import WATCHED, Outcome, Tally
from ctxguard.monitor.watch import Watch
from ctxguard.monitor.writer import account_for_the_dead

__all__ = [
    "DEFAULT_WINDOW_SECONDS",
    "WATCHED",
    "Monitor",
    "Outcome",
    "Report",
    "verdicts_to_json",
]

_log = logging.getLogger(__name__)

DEFAULT_WINDOW_SECONDS = 3600.0
_STEP_LIMIT = 100
_FEW = 10
"""At once: what is claimed waits for its turn while a slow judge is at work."""
_QUICK_SECONDS = 0.5
"""A judge that needs less for all that was claimed is given more at once."""
_LEADER_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the monitor can say at one moment.

    Attributes:
        judge: The series of judgments that it speaks of.
        live: Estimates of live traffic, over all that the store holds.
        sums: The additive statistics of each metric, of what this process judged.
        sequences: By metric, the interval that may be looked at as often as one likes, of the
            judge's own verdicts since this process began.
        outcomes: Claimed samples by what became of them in this process.
        waiting: Samples in the store that are not judged yet.
        oldest_waiting_seconds: How long the oldest of them has waited; None where none does.
        verdicts: Passages that the judge was asked about by this process.
        invalid_verdicts: Those among them without a valid verdict.
        time_seconds: When it was made, in seconds since the epoch.
        share: The probability with which samples are taken up within the budget.
        accounts: Samples of all serving processes, as far as the store was told.
        feedback: Users' reactions by kind. They see only what was served, so they are no
            judgments and enter no estimate.
        leads: Whether this one of the monitors on a store rings, cleans and settles accounts.
    """

    judge: str
    live: LiveEstimates
    sums: Mapping[Metric, RatioSums]
    sequences: Mapping[Metric, tuple[float, float]]
    outcomes: Mapping[Outcome, int]
    waiting: int
    oldest_waiting_seconds: float | None
    verdicts: int
    invalid_verdicts: int
    time_seconds: float
    share: float
    accounts: Accounts
    feedback: Mapping[str, int]
    leads: bool

    @property
    def estimates(self) -> Mapping[Window, Mapping[Metric, Estimate]]:
        """What people would say, by window and metric."""
        return self.live.estimates


class Monitor:
    """Judges stored samples and estimates the live quality of what is served.

    Args:
        store: Where the samples are.
        judge: Who grades passages. Another name or version is another series of estimates.
        window_seconds: Length of the recent window, > 0.
        utilities: What a passage is worth; every served passage that is not relevant costs.
        precision: How sure an estimate has to be to be shown.
        budget: What judging may cost; None for no limit.
        lookup: Where the texts of passages are found that were not stored.
        audit: What the retriever missed; None for no audit.
        alarms: What is watched; None for nothing. It sees what this process judges: of several
            monitors on a store give it to one.
        actions: What is done about each new alarm beside showing it.
        counts_folder: Where serving processes on this host keep their counts, to account for
            those that died; None where there are none.
        clock: Seconds since the epoch.

    Raises:
        ConfigurationError: a window that is not > 0.
    """

    def __init__(
        self,
        store: SampleStore,
        judge: Judge,
        *,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
        utilities: Utilities = DEFAULT_UTILITIES,
        precision: Precision = DEFAULT_PRECISION,
        budget: Budget | None = None,
        lookup: PassageLookup | None = None,
        audit: Audit | None = None,
        alarms: AlarmBoard | None = None,
        actions: AlarmActions | None = None,
        counts_folder: Path | str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0.0 < window_seconds < float("inf"):
            raise ConfigurationError(f"window_seconds {window_seconds!r} must be > 0 and finite")
        self.store = store
        self.judge = judge
        self.series = f"{judge.name} {judge.version}"
        self.exact = bool(getattr(judge, "exact", False))
        self.window_seconds = window_seconds
        self.utilities = utilities
        self.precision = precision
        self._budget = budget
        self._counts_folder = counts_folder
        self._clock = clock
        self._judging = Judging(judge, utilities=utilities, lookup=lookup, audit=audit)
        self._watch = (
            None
            if alarms is None
            else Watch(alarms, actions or AlarmActions(), store, self.series, clock)
        )
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget every sum and count; the background thread does not exist in a forked child."""
        self._claimant = uuid4().hex
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._latest: Report | None = None
        self._leads = False
        self._tally = Tally(self.precision.confidence)
        self._allowance = Allowance(self._budget, self.store, self.judge, self.series, self._clock)
        self._batches = Batches(
            self.store,
            claimant=self._claimant,
            series=self.series,
            judging=self._judging,
            allowance=self._allowance,
            tally=self._tally,
            watch=self._watch,
        )

    @property
    def alarms(self) -> AlarmBoard | None:
        """What is watched, and which alarms are up; None where nothing is watched."""
        return None if self._watch is None else self._watch.board

    def step(self, limit: int = _STEP_LIMIT) -> int:
        """Judge up to ``limit`` waiting samples.

        Returns:
            How many were dealt with; 0 when none waited, the budget is used up, or the judge
            could not be asked.
        """
        return self._batches.step(limit)

    def report(self) -> Report:
        """Estimates, sums and counts of this moment; reads the store."""
        live = live_estimates(
            self.store,
            self.series,
            exact=self.exact,
            now_seconds=self._clock(),
            window_seconds=self.window_seconds,
            utilities=self.utilities,
            max_grade=self.judge.max_grade,
            precision=self.precision,
        )
        states = self.store.states()
        tallied = self._tally.read()
        self._latest = Report(
            judge=self.series,
            live=live,
            sums=tallied.sums,
            sequences=tallied.sequences,
            outcomes=tallied.outcomes,
            waiting=states.get(State.PENDING, 0) + states.get(State.CLAIMED, 0),
            oldest_waiting_seconds=self.store.oldest_pending_seconds(),
            verdicts=tallied.verdicts,
            invalid_verdicts=tallied.invalid_verdicts,
            time_seconds=self._clock(),
            share=self._allowance.share,
            accounts=fleet_accounts(self.store),
            feedback=self.store.feedback_counts(),
            leads=self._leads,
        )
        return self._latest

    @property
    def latest(self) -> Report | None:
        """The last report that was made; None before the first. Reads nothing."""
        return self._latest

    @property
    def errors(self) -> int:
        """Steps of this process that failed as a whole, reports among them.

        Verdicts that the store could not write for what they hold count one each.
        """
        return self._tally.errors

    def estimates(self, window: Window = Window.RECENT) -> dict[Metric, Estimate]:
        """Every metric with its interval; without a value where the data do not suffice."""
        return dict(self.report().estimates[window])

    def tend(self) -> Report:
        """What is due now and then: one monitor of a store cleans and settles; each reports."""
        self._leads = self.store.lead(self._claimant, lease_seconds=_LEADER_SECONDS)
        if self._leads:
            if self._counts_folder is not None:
                account_for_the_dead(self.store, self._counts_folder)
            self.store.clean()
            if self._watch is not None and self.store.quarantined is not None:
                self._watch.raise_(
                    AlarmKind.STORE_QUARANTINED,
                    f"The sample store was damaged; it was moved aside to "
                    f"{self.store.quarantined.name} and begun anew. What it held is missing from "
                    "the estimates",
                )
        if self._watch is not None:
            self._watch.keep()
        return self.report()

    def step_down(self) -> None:
        """Let another monitor of this store lead at once; for one that ends."""
        if self._leads:
            self.store.lead(self._claimant, lease_seconds=0.0)
            self._leads = False

    def restore_alarms(self) -> None:
        """Go on with the alarms where another monitor of this store stopped."""
        if self._watch is not None:
            self._watch.restore()

    def start(self, interval_seconds: float = 1.0, refresh_seconds: float = 15.0) -> None:
        """Judge on a background thread.

        Errors are logged and counted, and never reach a request. A second call does nothing.

        Args:
            interval_seconds: How long to wait where no sample waits.
            refresh_seconds: How often the report is made anew.
        """
        if self._thread is not None:
            return
        # A new event each time: a thread that was left behind must stay told to stop.
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self.run,
            args=(self._stopping, interval_seconds, refresh_seconds),
            name="ctxguard-monitor",
            daemon=True,
        )
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the background thread after the sample in hand.

        Returns:
            Whether it ended in time; a judge that hangs is left behind on its daemon thread.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._stopping.set()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def run(
        self,
        stopping: threading.Event,
        interval_seconds: float = 1.0,
        refresh_seconds: float = 15.0,
        *,
        tidy: Callable[[], object] | None = None,
    ) -> None:
        """Judge, and report now and then, until told to stop.

        Args:
            stopping: Set to stop.
            interval_seconds: How long to wait where no sample waits.
            refresh_seconds: How often the report is made anew.
            tidy: Called with each report, for what else is due now and then.
        """
        refresh_at, in_vain, limit = 0.0, 0, _FEW
        while not stopping.is_set():
            taken, began = 0, time.monotonic()
            try:
                taken = self.step(limit)
                limit = _next_limit(limit, taken, time.monotonic() - began)
                if time.monotonic() >= refresh_at:
                    self.tend()
                    if tidy is not None:
                        tidy()
                    refresh_at = time.monotonic() + refresh_seconds
            except Exception as error:
                _log.warning("a step of the monitor failed: %s", describe_error(error))
                self._tally.failed()
            in_vain = in_vain + 1 if self._batches.failing and not taken else 0
            if not taken:
                # A judge that is down is asked less and less often, up to once a minute.
                longer = interval_seconds * 2.0 ** min(in_vain, 20)
                stopping.wait(
                    interval_seconds if not in_vain else min(longer, _LONGEST_WAIT_SECONDS)
                )


def _next_limit(limit: int, taken: int, seconds: float) -> int:
    """How many to claim next: more at once while the judge is quick, few again once it is not.

    >>> _next_limit(10, 10, 0.01), _next_limit(80, 80, 0.1), _next_limit(80, 80, 3.0)
    (20, 100, 10)
    >>> _next_limit(40, 3, 0.01)
    40
    """
    if seconds >= _QUICK_SECONDS:
        return _FEW
    return min(2 * limit, _STEP_LIMIT) if taken == limit else limit
