"""Monitors: has stored samples judged, and estimates the quality of live traffic.

It runs beside the request path, usually in a process of its own (``ctxguard monitor``). One monitor
owns a store; others wait for it to end. Judging may be slow or fail without any effect on requests.
Reads and writes the store and the profile's file, asks the judge, reads the clocks, logs, and may
run a thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ctxguard._support.checks import check_positive
from ctxguard._support.error_text import describe_error
from ctxguard._support.fork_safety import reset_in_children
from ctxguard._support.regular_file import FileVersion, file_version
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.errors import (
    ConfigurationError,
    JudgeError,
    ProfileFormatError,
    StoreError,
    StoreLockedError,
)
from ctxguard.measure.estimate import DEFAULT_MIN_N
from ctxguard.measure.worth import READERS, Utilities
from ctxguard.monitor.alarms import AlarmState
from ctxguard.monitor.alarms.feed import AlarmMonitor
from ctxguard.monitor.estimation.live import Report, live_report
from ctxguard.monitor.judges import Judge, PeopleAlone
from ctxguard.monitor.judging.budget import NO_LIMITS, BudgetLimits, JudgingBudget
from ctxguard.monitor.judging.counts import JudgingOutcome
from ctxguard.monitor.judging.sample_judge import PassageLookup, SampleJudge
from ctxguard.monitor.judging.worker import JudgingWorker
from ctxguard.monitor.labels.evidence import Scale, update_graded
from ctxguard.monitor.redaction import Redactor, redact
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile

__all__ = ["DEFAULT_WINDOW_SECONDS", "JudgingOutcome", "Monitor", "Report"]

_log = logging.getLogger(__name__)

DEFAULT_WINDOW_SECONDS = 3600.0
MOST_UNJUDGED = 2_000
"""How many samples one call lets people grade without a judge."""
_STEP_LIMIT = 100
_FIRST_LIMIT = 10
"""How many samples a step judges at first: the others wait while a slow judge works on one."""
_QUICK_SECONDS = 0.5
"""A judge that finishes a step in less time is given more samples at once."""
_LONGEST_WAIT_SECONDS = 60.0


class Monitor:
    """Judges stored samples and estimates the quality of live traffic.

    Args:
        judge: Grades passages. Another name or version begins another series of estimates.
        window_seconds: Length of the recent window, > 0.
        utilities: The utility of a passage; every served passage that is not relevant costs.
        min_n: Effective number of clusters (sessions, and requests without one) below which there
            is no estimate, ≥ 2.
        lookup: Finds the texts of passages that were not stored; None if all are stored.
        redactor: Applied to texts that ``lookup`` finds before the judge reads them, as the
            samples' own (``Privacy.redactor``) is to texts that are stored; one that fails costs
            the passage its grade. None for no redaction.
        profile: Its promises are watched by alarms, which resume from the state that an earlier
            monitor saved; None for no alarms.
        path: The profile's file; when its profile is replaced, the alarms follow. None for a fixed
            profile.
        corpus_sketch: Returns the sketch of what the guard searches now, which is compared with
            that of the profile; None compares nothing.
        switch_to_safe: Whether to replace that file by its safe policy when recall loss breaks its
            promise.
        clock: Seconds since the epoch.

    Attributes:
        latest: The last report; None before the first.
        store_fault: The ``StoreError`` that the background thread met last; None once all went
            well again.
        judge_fault: Why the background thread has stopped; None while it runs.

    Raises:
        ConfigurationError: a window that is not > 0 and finite, or a ``min_n`` below 2.
    """

    def __init__(
        self,
        store: SampleStore,
        judge: Judge,
        *,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
        utilities: Utilities = READERS,
        min_n: int = DEFAULT_MIN_N,
        budget: BudgetLimits = NO_LIMITS,
        lookup: PassageLookup | None = None,
        redactor: Redactor | None = redact,
        profile: Profile | None = None,
        path: Path | None = None,
        corpus_sketch: Callable[[], CorpusSketch] | None = None,
        switch_to_safe: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_positive(window_seconds=window_seconds)
        if min_n < 2:
            raise ConfigurationError(f"min_n {min_n!r} must be at least 2: one value has no spread")
        self.store = store
        self.judge = judge
        self.exact = bool(getattr(judge, "exact", False))
        self.window_seconds = window_seconds
        self.min_n = min_n
        self.series = f"{judge.name} {judge.version}"
        self._limits = budget
        self._begin_judging = partial(SampleJudge, judge, utilities, lookup, redactor)
        # Makes the rows of samples that people have graded since.
        self._update_graded = partial(
            update_graded, store, self.series, Scale(utilities, judge.max_grade)
        )
        self._clock = clock
        self._path = path
        self._corpus_sketch = corpus_sketch
        self._alarms: AlarmMonitor | None = None
        if profile is not None:
            state = AlarmState(profile, exact=self.exact)
            safe = path if switch_to_safe else None
            self._alarms = AlarmMonitor(state, store, self.series, clock, safe)
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Reset every sum and count; a forked child has no background thread."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.latest: Report | None = None
        self._profile_version: FileVersion | None = None
        self._is_owner = False
        self.store_fault: str | None = None
        self.judge_fault: str | None = None
        self._errors = 0
        self._budget: JudgingBudget | None = None
        if self._limits != NO_LIMITS:
            self._budget = JudgingBudget(self._limits, self.store, self.series, self._clock)
        self._worker = JudgingWorker(
            self.store,
            self._begin_judging(),
            self.series,
            budget=self._budget,
            alarms=self._alarms,
            clock=self._clock,
        )

    @property
    def alarms(self) -> AlarmState | None:
        """The alarms, and which of them are active; None without alarms."""
        return None if self._alarms is None else self._alarms.state

    def own(self) -> bool:
        """Become or stay the store's only monitor, and continue where the last one stopped.

        Returns:
            False while another one owns the store.

        Raises:
            StoreError: the store cannot be used at present.
        """
        was_owner, self._is_owner = self._is_owner, self.store.own()
        if self._is_owner and not was_owner and self._alarms is not None:
            self._alarms.restore()
        return self._is_owner

    def _check_owner(self) -> None:
        if not self.own():
            raise StoreLockedError(
                f"another monitor owns {self.store.name}: only one judges at a time, and the "
                "others wait for it to end"
            )

    def step(self, limit: int = _STEP_LIMIT) -> int:
        """Judge up to ``limit`` waiting samples; return how many were finished or skipped.

        That is 0 when none waited, the budget is used up, or the judge could not be called.

        Raises:
            StoreLockedError: another monitor owns the store.
        """
        self._check_owner()
        return self._worker.step(limit)

    @property
    def why_judge_failed(self) -> str:
        """The last failure of the judge, in words."""
        return f"the judge failed ({self._worker.why})"

    def report(self) -> Report:
        """Report on the current state; the owner first takes in people's new grades."""
        if self.own():
            self._update_graded()
        return self._report()

    def _report(self) -> Report:
        self.latest = live_report(
            self.store,
            self.series,
            exact=self.exact,
            now_seconds=self._clock(),
            window_seconds=self.window_seconds,
            min_n=self.min_n,
            outcomes=self._worker.outcomes,
            judging_sampling_probability=1.0 if self._budget is None else self._budget.probability,
        )
        return self.latest

    @property
    def errors(self) -> int:
        """How many steps and reports of this process failed, and results the store refused."""
        return self._errors + self._worker.errors

    def maintain(self) -> Report:
        """Do the periodic work: clean the store, check the alarms, and report.

        Raises:
            StoreLockedError: another monitor owns the store.
        """
        self._check_owner()
        self.store.fold_accounts()
        # While the text that labels are about is at hand.
        self._update_graded()
        self.store.clean()
        if self._alarms is not None:
            if self._corpus_sketch is not None:
                self._alarms.check_corpus(self._corpus_sketch())
            if not self.exact:
                self._alarms.correct_judge()
            self._alarms.evaluate()
            self._alarms.save()
        self._follow_profile()
        return self._report()

    def _follow_profile(self) -> None:
        """Switch to the profile now in the file, if it has changed."""
        path, alarms = self._path, self._alarms
        if path is None or alarms is None:
            return
        if (version := file_version(path)) == self._profile_version:
            return
        try:
            profile = Profile.load(path)
        except ProfileFormatError as error:
            _log.warning("profile %s stays in force: %s", alarms.state.profile_id, error)
        else:
            if profile != alarms.state.profile:
                alarms.follow(profile)
        self._profile_version = version

    def start(self, interval_seconds: float = 1.0, refresh_seconds: float = 15.0) -> None:
        """Judge on a background thread, as soon as no other monitor owns the store.

        Errors are logged and counted. A second call does nothing.

        Args:
            interval_seconds: How long to wait when no sample waits.
            refresh_seconds: How often ``maintain`` is called.
        """
        if self._thread is not None:
            return
        # A new event each time: a thread that was left behind must see its own event set.
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._stopping, interval_seconds, refresh_seconds),
            name="ctxguard-monitor",
            daemon=True,
        )
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the background thread after the current sample.

        Returns:
            Whether it ended in time; a judge that hangs is left behind on its daemon thread.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._stopping.set()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _run(
        self, stopping: threading.Event, interval_seconds: float, refresh_seconds: float
    ) -> None:
        """Judge, and call ``maintain`` from time to time, until stopped."""
        refresh_at, failures, limit = 0.0, 0, _FIRST_LIMIT
        is_failing = is_waiting = False
        while not stopping.is_set():
            n_finished, began = 0, time.monotonic()
            try:
                if not self.own():
                    if not is_waiting:
                        _log.warning("another monitor owns %s: waiting for it", self.store.name)
                    is_waiting = True
                    stopping.wait(interval_seconds)
                    continue
                is_waiting = False
                n_finished = self.step(limit)
                limit = _next_limit(limit, n_finished, time.monotonic() - began)
                if time.monotonic() >= refresh_at:
                    self.maintain()
                    refresh_at = time.monotonic() + refresh_seconds
                    self.store_fault = None
                    if is_failing:
                        _log.warning("the monitor's steps succeed again")
                    is_failing = False
            except JudgeError as error:
                _log.error("%s", error)
                self.judge_fault = str(error)
                return
            except Exception as error:
                if isinstance(error, StoreError):
                    self.store_fault = type(error).__name__
                # Logged once until it works again: it is tried again every second.
                if not is_failing:
                    _log.warning("a step of the monitor failed: %s", describe_error(error))
                is_failing = True
                self._errors += 1
            failures = failures + 1 if self._worker.failing and not n_finished else 0
            if not n_finished:
                # A judge that is down is called less and less often, at least once a minute.
                longer = min(interval_seconds * 2.0 ** min(failures, 20), _LONGEST_WAIT_SECONDS)
                stopping.wait(longer if failures else interval_seconds)


def let_people_grade(store: SampleStore, most: int = MOST_UNJUDGED) -> None:
    """Let people grade waiting samples that no judge has seen, the oldest first.

    Does nothing while a monitor of another process owns the store: it judges them.

    Args:
        most: The most samples to let through; no judge gets these.
    """
    was_owned = store.is_owned
    if not store.own():
        return
    try:
        monitor, left = Monitor(store, PeopleAlone()), most
        while left > 0 and (n_finished := monitor.step(min(left, _STEP_LIMIT))):
            left -= n_finished
    finally:
        if not was_owned:
            store.disown()


def _next_limit(limit: int, n_finished: int, seconds: float) -> int:
    """Choose how many samples to judge next: more if the judge is quick, few if it is slow.

    >>> _next_limit(10, 10, 0.01), _next_limit(80, 80, 0.1), _next_limit(80, 80, 3.0)
    (20, 100, 10)
    >>> _next_limit(40, 3, 0.01)
    40
    """
    if seconds >= _QUICK_SECONDS:
        return _FIRST_LIMIT
    return min(2 * limit, _STEP_LIMIT) if n_finished == limit else limit
