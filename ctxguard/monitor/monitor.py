"""Monitor: judges the stored samples, and says what live traffic is worth.

Runs beside the request path, usually in a process of its own (``ctxguard monitor``); any number of
them may share a store. Judging may be slow or fail altogether without a request noticing.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from ctxguard.errors import ConfigurationError, DataError
from ctxguard.forks import start_afresh_in_children
from ctxguard.hygiene import describe_error
from ctxguard.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.monitor.alarms import (
    AlarmActions,
    AlarmBoard,
    AlarmKind,
    Severity,
)
from ctxguard.monitor.budget import Budget, Spending
from ctxguard.monitor.chance import Draw
from ctxguard.monitor.estimates import Estimate, JudgedRequest, Metric, RatioSums
from ctxguard.monitor.judges import Judge
from ctxguard.monitor.judging import Audit, Judged, Judging, PassageLookup
from ctxguard.monitor.records import Record
from ctxguard.monitor.report import (
    DEFAULT_PRECISION,
    LiveEstimates,
    Precision,
    Window,
    fleet_accounts,
    live_estimates,
)
from ctxguard.monitor.sampler import Accounts
from ctxguard.monitor.sequences import BettingSequence
from ctxguard.monitor.store import Claimed, Finished, SampleStore, State
from ctxguard.monitor.table import served_bytes, summary, sums_of, table_of
from ctxguard.monitor.watch import Watch
from ctxguard.monitor.writer import account_for_the_dead

_log = logging.getLogger(__name__)

DEFAULT_WINDOW_SECONDS = 3600.0
_STEP_LIMIT = 100
_RUN_LIMIT = 10
"""Few at once: what is claimed waits for its turn while a slow judge is at work."""
_LEASE_SECONDS = 600.0
_LEADER_SECONDS = 60.0
_MOST_ATTEMPTS = 5
_FAILURES_OF_AN_OUTAGE = 2
_LONGEST_WAIT_SECONDS = 60.0
_ARRIVALS_SECONDS = 10.0

WATCHED = (Metric.PRECISION, Metric.DISTRACTOR_RATE, Metric.RECALL_LOSS)
"""Means of what lies in [0, 1] in every single request: what a confidence sequence can follow."""


class Outcome(StrEnum):
    """What became of a claimed sample. A closed set: it labels a metric."""

    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A served passage got no valid verdict: left out, and counted."""
    SKIPPED = "skipped"
    """Passed over at random to keep within the budget."""
    UNREADABLE = "unreadable"
    """It was written by another release, or is damaged."""
    JUDGE_FAILED = "judge_failed"
    """The judge could not be asked; the sample waits for another attempt, up to five."""


_STATES = {
    Outcome.JUDGED: State.JUDGED,
    Outcome.INCOMPLETE: State.INCOMPLETE,
    Outcome.SKIPPED: State.SKIPPED,
    Outcome.UNREADABLE: State.FAILED,
}


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


@dataclass(slots=True)
class _Counts:
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    verdicts: int = 0
    invalid_verdicts: int = 0
    errors: int = 0


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
        self._taken_up = Draw("budget")
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget every sum and count; the background thread does not exist in a forked child."""
        self._claimant = uuid4().hex
        self._order = random.Random(self._claimant)  # noqa: S311 - an order, not a secret
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failing = False
        self._counts = _Counts()
        self._sums = {metric: RatioSums() for metric in Metric}
        self._sequences = {metric: BettingSequence(self.precision.confidence) for metric in WATCHED}
        self._latest: Report | None = None
        self._leads = False
        self._cost = 0.0
        self._arrivals: tuple[float, int] | None = None
        self._arriving_per_second = 0.0
        self._waiting = 0
        self._share = 1.0
        self._spending: Spending | None = None

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
        if self._within_budget() <= 0.0:
            return 0
        claimed = self.store.claim(self._claimant, limit, lease_seconds=_LEASE_SECONDS)
        # In any order, or a few samples on which the judge fails would look like an outage for
        # as long as they are the oldest.
        self._order.shuffle(claimed)
        still_open = {sample.sample_id for sample in claimed}
        dealt_with, failed = 0, list[int]()
        for sample in claimed:
            outcome = self._deal_with(sample)
            if outcome is None:
                break
            with self._lock:
                self._counts.outcomes[outcome] += 1
            if outcome is Outcome.JUDGE_FAILED:
                failed.append(sample.sample_id)
                if len(failed) == _FAILURES_OF_AN_OUTAGE:
                    break
                continue
            dealt_with += 1
            self._waiting = max(self._waiting - 1, 0)
            # The judge answers: what it failed on before was the fault of the sample.
            self._tried_in_vain(failed)
            still_open -= {sample.sample_id, *failed}
            failed = []
        # A judge that is down is down for all of them: they keep their attempts.
        self.store.give_back(sorted(still_open), max_attempts=None)
        return dealt_with

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
        with self._lock:
            counts = self._counts
            self._latest = Report(
                judge=self.series,
                live=live,
                sums=dict(self._sums),
                sequences={
                    metric: interval
                    for metric, sequence in self._sequences.items()
                    if sequence.n and (interval := sequence.interval) is not None
                },
                outcomes=dict(counts.outcomes),
                waiting=states.get(State.PENDING, 0) + states.get(State.CLAIMED, 0),
                oldest_waiting_seconds=self.store.oldest_pending_seconds(),
                verdicts=counts.verdicts,
                invalid_verdicts=counts.invalid_verdicts,
                time_seconds=self._clock(),
                share=self._share,
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
        """Steps of this process that failed as a whole, reports among them."""
        return self._counts.errors

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
        refresh_at, in_vain = 0.0, 0
        while not stopping.is_set():
            taken = 0
            try:
                taken = self.step(_RUN_LIMIT)
                if time.monotonic() >= refresh_at:
                    self.tend()
                    if tidy is not None:
                        tidy()
                    refresh_at = time.monotonic() + refresh_seconds
            except Exception as error:
                _log.warning("a step of the monitor failed: %s", describe_error(error))
                with self._lock:
                    self._counts.errors += 1
            in_vain = in_vain + 1 if self._failing and not taken else 0
            if not taken:
                # A judge that is down is asked less and less often, up to once a minute.
                longer = interval_seconds * 2.0 ** min(in_vain, 20)
                stopping.wait(
                    interval_seconds if not in_vain else min(longer, _LONGEST_WAIT_SECONDS)
                )

    @property
    def _budget_key(self) -> str:
        return f"budget {self.series}"

    def _within_budget(self) -> float:
        """The probability with which the next sample is taken up; 0.0 once all is spent."""
        if self._budget is None:
            return 1.0
        if self._spending is None:
            self._spending = Spending(self._budget, self._clock)
            if known := self.store.get_state(self._budget_key):
                self._spending.restore(known)
        now = time.monotonic()
        if self._arrivals is None or now - self._arrivals[0] >= _ARRIVALS_SECONDS:
            stored = sum(worker.stored for worker in self.store.workers())
            if self._arrivals is not None:
                since, before = self._arrivals
                self._arriving_per_second = max(stored - before, 0) / (now - since)
            self._arrivals = (now, stored)
            self._waiting = self.store.states().get(State.PENDING, 0)
        self._share = self._spending.share(self._waiting, self._arriving_per_second)
        return self._share

    def _deal_with(self, sample: Claimed) -> Outcome | None:
        """What became of it; None where the budget has no room for it at present."""
        share = self._within_budget()
        if share <= 0.0:
            return None
        try:
            record = Record.from_bytes(sample.payload)
        except DataError as error:
            _log.warning("sample %d is left out: %s", sample.sample_id, error)
            self._finish(sample, Outcome.UNREADABLE)
            return Outcome.UNREADABLE
        if not self._taken_up.chooses(sample.request_id, share):
            if self._finish(sample, Outcome.SKIPPED) and self._watch is not None:
                self._watch.signals(record)
            return Outcome.SKIPPED
        most = len(record.served) + len(record.to_judge(answered=False))
        if self._spending is not None and not self._spending.affords(most):
            return None
        try:
            judged = self._judging(record, sample.probability * share)
        except Exception as error:
            self._judge_failed(error)
            return Outcome.JUDGE_FAILED
        if self._watch is not None:
            # Also where it was another process, before a restart, that saw the judge fail.
            self._watch.over(AlarmKind.JUDGE_DOWN)
        self._failing = False
        outcome = Outcome.INCOMPLETE if judged.request is None else Outcome.JUDGED
        accepted = self._finish(sample, outcome, judged, record)
        self._spend(judged)
        if accepted and self._watch is not None:
            self._watch.signals(record)
        if accepted and judged.request is not None:
            self._add(sample.sample_id, record, judged.request)
        return outcome

    def _judge_failed(self, error: Exception) -> None:
        if not self._failing:
            # Once until it works again: a dead judge must not fill the log.
            _log.warning("judge %s failed: %s", self.judge.name, describe_error(error))
            if self._watch is not None:
                self._watch.raise_(
                    AlarmKind.JUDGE_DOWN,
                    f"The judge {self.judge.name} could not be asked ({type(error).__name__}): "
                    "samples wait, and estimates grow old",
                    Severity.WARNING,
                )
        self._failing = True

    def _tried_in_vain(self, sample_ids: Sequence[int]) -> None:
        given_up = self.store.give_back(sample_ids, max_attempts=_MOST_ATTEMPTS)
        if given_up:
            _log.warning(
                "%d samples are left out: the judge failed on them %d times",
                given_up,
                _MOST_ATTEMPTS,
            )

    def _finish(
        self,
        sample: Claimed,
        outcome: Outcome,
        judged: Judged | None = None,
        record: Record | None = None,
    ) -> bool:
        """Whether it was this monitor's to finish: its lease may have ended meanwhile."""
        request = None if judged is None else judged.request
        finished = Finished(
            sample_id=sample.sample_id,
            time_seconds=sample.time_seconds,
            state=_STATES[outcome],
            verdicts="" if judged is None else verdicts_to_json(judged),
            summary=b"" if request is None else summary(request),
            grades=b"" if request is None else served_bytes(request),
            rejected=() if record is None else self._rejected(record),
        )
        return self.store.finish(self.series, [finished]) == 1

    def _rejected(self, record: Record) -> tuple[tuple[str, str, str], ...]:
        """Replies that were no verdict; they may quote a passage whose text is not kept."""
        take = getattr(self.judge, "take_rejected", None)
        kept = {passage.passage_id for passage in record.passages.values() if passage.text}
        return tuple(
            [
                (one.passage_id, one.reason.value, one.reply if one.passage_id in kept else "")
                for one in (() if take is None else take())
            ]
        )

    def _spend(self, judged: Judged) -> None:
        with self._lock:
            self._counts.verdicts += judged.asked
            self._counts.invalid_verdicts += judged.invalid
        if self._spending is None:
            return
        accounts_of = getattr(self.judge, "accounts", None)
        cost = (None if accounts_of is None else accounts_of().cost) or 0.0
        self._spending.spend(judged.asked, cost - self._cost)
        self._cost = cost
        self.store.set_state(self._budget_key, self._spending.to_json())

    def _add(self, sample_id: int, record: Record, request: JudgedRequest) -> None:
        row = table_of(summary(request))
        sums = {metric: sums_of(metric, row) for metric in Metric}
        with self._lock:
            for metric, more in sums.items():
                self._sums[metric] += more
            for metric, sequence in self._sequences.items():
                if sums[metric].b:
                    sequence.add(min(max(sums[metric].a / sums[metric].b, 0.0), 1.0))
        if self._watch is not None:
            self._watch.judged(sample_id, record, request, float(row["harm"][0]))


def verdicts_to_json(judged: Judged) -> str:
    """Grades by passage id, and how those of grade 0 mislead, for people and recalibration."""
    return json.dumps(
        {
            passage_id: [verdict.grade, None if verdict.negative is None else verdict.negative]
            for passage_id, verdict in judged.verdicts.items()
        },
        separators=(",", ":"),
    )
