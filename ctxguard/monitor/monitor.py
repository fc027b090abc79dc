"""The monitor: takes samples off the queue, has them judged, and keeps the estimates current.

Runs beside the request path, on its own thread or stepped by hand; nothing here can slow or fail
a request. A sample whose served passages did not all get a valid verdict is left out and counted.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ctxguard.errors import ConfigurationError
from ctxguard.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.monitor.estimates import (
    DEFAULT_CONFIDENCE,
    DEFAULT_MIN_N,
    Estimate,
    JudgedRequest,
    Metric,
    RatioSums,
    estimate,
    ratio_sums,
)
from ctxguard.monitor.forks import start_afresh_in_children
from ctxguard.monitor.judges import Judge
from ctxguard.monitor.judging import DEFAULT_RATES, Judging, JudgingRates
from ctxguard.monitor.sampler import Sample, Sampler

_log = logging.getLogger(__name__)

DEFAULT_WINDOW_SECONDS = 3600.0
_BUCKETS = 60
_STEP_LIMIT = 100


class Window(StrEnum):
    """Over which requests an estimate is taken. A closed set: it labels a metric."""

    RECENT = "recent"
    """The last ``window_seconds``, give or take a sixtieth of it."""
    ALL_TIME = "all_time"
    """Since the monitor was made."""


class Outcome(StrEnum):
    """What became of a drained sample. A closed set: it labels a metric."""

    JUDGED = "judged"
    FORCED = "forced"
    """Not a random sample: left out."""
    INCOMPLETE = "incomplete"
    """A served passage got no valid verdict."""
    JUDGE_FAILED = "judge_failed"
    """The judge raised, or the sample could not be read."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the monitor can say at one moment, consistent in itself.

    Attributes:
        sums: The additive statistics of each metric, all-time.
        estimates: By window and metric.
        outcomes: Drained samples by what became of them; they add up to those drained.
        verdicts: Passages that the judge was asked about.
        invalid_verdicts: Those among them without a valid verdict.
        errors: Steps of the background thread that failed as a whole.
        age_seconds: Since the last request was judged; None before the first.
    """

    sums: Mapping[Metric, RatioSums]
    estimates: Mapping[Window, Mapping[Metric, Estimate]]
    outcomes: Mapping[Outcome, int]
    verdicts: int
    invalid_verdicts: int
    errors: int
    age_seconds: float | None


@dataclass(slots=True)
class _Counts:
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    verdicts: int = 0
    invalid_verdicts: int = 0
    errors: int = 0


Sums = dict[Metric, RatioSums]


class Monitor:
    """Judges sampled requests and estimates the live quality of what is served.

    Args:
        sampler: Where the samples wait.
        judge: Who grades passages.
        rates: How much of what was dropped is judged.
        window_seconds: Length of the recent window, > 0.
        utilities: What a passage is worth; every served passage that is not relevant costs.
        confidence: Of the intervals, in (0, 1).
        min_n: Requests below which there is no estimate.
        max_width: By metric, the interval width above which there is no estimate.
        clock: Monotonic seconds.

    Raises:
        ConfigurationError: a window that is not > 0.
    """

    def __init__(
        self,
        sampler: Sampler,
        judge: Judge,
        *,
        rates: JudgingRates = DEFAULT_RATES,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
        utilities: Utilities = DEFAULT_UTILITIES,
        confidence: float = DEFAULT_CONFIDENCE,
        min_n: int = DEFAULT_MIN_N,
        max_width: Mapping[Metric, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0.0 < window_seconds < float("inf"):
            raise ConfigurationError(f"window_seconds {window_seconds!r} must be > 0 and finite")
        self.sampler = sampler
        self.judge = judge
        self.confidence = confidence
        self.min_n = min_n
        self.max_width = {} if max_width is None else max_width
        self._judging = Judging(judge, rates, utilities=utilities, seed=sampler.seed)
        self._bucket_seconds = window_seconds / _BUCKETS
        self._clock = clock
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget every sum and count; the background thread does not exist in a forked child."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failing = False
        self._counts = _Counts()
        self._all_time: Sums = {metric: RatioSums() for metric in Metric}
        self._recent: deque[tuple[int, Sums]] = deque()
        self._judged_at: float | None = None

    def step(self, limit: int = _STEP_LIMIT) -> int:
        """Judge up to ``limit`` waiting samples.

        Returns:
            How many were taken off the queue; 0 when none waited.
        """
        samples = self.sampler.drain(limit)
        for sample in samples:
            outcome = Outcome.FORCED
            if not sample.forced and sample.probability > 0.0:
                try:
                    outcome = self._judge(sample)
                    self._failing = False
                except Exception:
                    outcome = Outcome.JUDGE_FAILED
                    if not self._failing:
                        _log.warning("judge %s failed on a sample", self.judge.name, exc_info=True)
                    # Logged once until it works again: a dead judge must not fill the log.
                    self._failing = True
            with self._lock:
                self._counts.outcomes[outcome] += 1
        return len(samples)

    def estimates(self, window: Window = Window.RECENT) -> dict[Metric, Estimate]:
        """Every metric with its interval; without a value where the data do not suffice."""
        return dict(self.report().estimates[window])

    def report(self) -> Report:
        """Estimates, sums and counts of one moment."""
        with self._lock:
            now = self._clock()
            self._forget_before(now)
            all_time = dict(self._all_time)
            buckets = [dict(sums) for _, sums in self._recent]
            counts = self._counts
            outcomes = dict(counts.outcomes)
            verdicts, invalid, errors = counts.verdicts, counts.invalid_verdicts, counts.errors
            age = None if self._judged_at is None else now - self._judged_at
        recent = {
            metric: sum([bucket[metric] for bucket in buckets], RatioSums()) for metric in Metric
        }
        return Report(
            sums=all_time,
            estimates={
                Window.RECENT: self._estimates(recent),
                Window.ALL_TIME: self._estimates(all_time),
            },
            outcomes=outcomes,
            verdicts=verdicts,
            invalid_verdicts=invalid,
            errors=errors,
            age_seconds=age,
        )

    def start(self, interval_seconds: float = 1.0) -> None:
        """Judge on a background thread, looking for samples every ``interval_seconds``.

        Errors are logged and counted, and never reach a request. A second call does nothing.
        """
        if self._thread is not None:
            return
        # A new event each time: a thread that was left behind must stay told to stop.
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(interval_seconds, self._stopping),
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

    def _run(self, interval_seconds: float, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                taken = self.step(1)
            except Exception:
                _log.exception("a step of the monitor failed")
                with self._lock:
                    self._counts.errors += 1
                taken = 0
            if not taken:
                stopping.wait(interval_seconds)

    def _estimates(self, sums: Sums) -> dict[Metric, Estimate]:
        return {
            metric: estimate(
                metric,
                sums[metric],
                confidence=self.confidence,
                min_n=self.min_n,
                max_width=self.max_width.get(metric),
            )
            for metric in Metric
        }

    def _judge(self, sample: Sample) -> Outcome:
        judged = self._judging(sample)
        with self._lock:
            self._counts.verdicts += judged.asked
            self._counts.invalid_verdicts += judged.invalid
            if judged.request is None:
                return Outcome.INCOMPLETE
            self._add(judged.request)
        return Outcome.JUDGED

    def _add(self, request: JudgedRequest) -> None:
        now = self._clock()
        self._forget_before(now)
        bucket = int(now // self._bucket_seconds)
        if not self._recent or self._recent[-1][0] != bucket:
            self._recent.append((bucket, {metric: RatioSums() for metric in Metric}))
        for metric in Metric:
            sums = ratio_sums(metric, [request])
            self._all_time[metric] += sums
            self._recent[-1][1][metric] += sums
        self._judged_at = now

    def _forget_before(self, now: float) -> None:
        oldest = int(now // self._bucket_seconds) - _BUCKETS
        while self._recent and self._recent[0][0] <= oldest:
            self._recent.popleft()
