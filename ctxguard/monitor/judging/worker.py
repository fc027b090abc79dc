"""From the queue to the store: claims waiting samples, has each judged, and writes the result.

Each sample is judged once, whichever monitor of the store claims it. A sample on which the judge
fails does not keep the others from being judged.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ctxguard._support.error_text import describe_error
from ctxguard.core.types import Route
from ctxguard.errors import DataError, JudgeError, StoreError
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.monitor import AlarmMonitor
from ctxguard.monitor.estimation.metrics import Metric, Rows, losses
from ctxguard.monitor.judges.protocol import verdicts_to_json
from ctxguard.monitor.judging.budget import JudgingBudget
from ctxguard.monitor.judging.judging_again import JudgingAgain
from ctxguard.monitor.judging.sample_judge import (
    JudgedAs,
    MonitorCounters,
    SampleJudge,
    SampleVerdicts,
    token_counts,
)
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import Claimed, Finished, LossRow, SampleStore, State

_log = logging.getLogger(__name__)

T = TypeVar("T")

_IN_HAND_SECONDS = 120.0
"""Claimed samples that a slow judge has not reached by then go back to the queue."""
_AGAIN_SECONDS = 30.0
"""How long a step judges again before it turns to fresh samples."""
_MAX_ATTEMPTS = 5
_FAILURES_OF_AN_OUTAGE = 2
_ALONE_SECONDS = 3600.0
"""How often a failure counts where no other sample tells whether the judge works: an outage of some
hours costs no sample, and one on which the judge always fails is not tried for ever."""

LEASE_SECONDS = 600.0
"""A monitor that was killed, or whose judge hangs for so long, loses what it claimed."""

MAX_HELD = 100
"""Results that wait for one transaction."""
HELD_SECONDS = 0.25
"""How long the first of them may wait before the next sample is judged."""
_SLOW_SECONDS = 0.05
"""A judge that takes this long gains nothing by waiting: a transaction takes a few milliseconds."""

_STATES = {
    JudgedAs.JUDGED: State.JUDGED,
    JudgedAs.INCOMPLETE: State.INCOMPLETE,
    JudgedAs.SKIPPED: State.SKIPPED,
    JudgedAs.UNREADABLE: State.FAILED,
}


@dataclass(frozen=True, slots=True)
class _Result:
    """How the judging of one claimed sample ended; ``record`` is None if it could not be read."""

    outcome: JudgedAs
    finished: Finished
    record: SampleRecord | None = None


class JudgingWorker:
    """Judges waiting samples, a claimed batch at a time; for one thread.

    A quick judge's results are written many at once, a slow judge's one by one. While the store
    cannot be written they are held: verdicts were paid for. What a process has not written when it
    dies is judged again, once the leases of its samples end.

    Args:
        series: That of the judge.
        counters: Told the outcome of each sample.
        alarms: Told what each sample shows; None without alarms.
        clock: Seconds since the epoch.

    Attributes:
        failing: Whether the judge could not be called at its last call.
        why: Why the judge failed last; empty where it never did.
    """

    def __init__(
        self,
        store: SampleStore,
        judge: SampleJudge,
        series: str,
        *,
        claimant: str,
        budget: JudgingBudget,
        counters: MonitorCounters,
        alarms: AlarmMonitor | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._claimant = claimant
        self._judge = judge
        self._ledger = judge.ledger
        self._again = JudgingAgain(store, series, judge, claimant=claimant, clock=clock)
        self._budget = budget
        self._counters = counters
        self._alarms = alarms
        self._series = series
        self._held: list[_Result] = []
        self._held_since = 0.0
        self._sampler = HashSampler("budget")
        self._order = random.Random(claimant)  # noqa: S311 - an order, not a secret
        self._cost = 0.0
        self._in_hand: set[int] = set()
        """Claimed, and neither finished nor given back."""
        self._alone: dict[int, float] = {}
        """When a failure of a sample that waits alone last counted, by the monotonic clock."""
        self.why = ""
        self._n_judged = {"fresh": 0, "again": 0}
        """Passages judged of fresh samples and of those judged again."""
        self._is_idle = True
        self.failing = False

    def step(self, limit: int) -> int:
        """Judge up to ``limit`` waiting samples, and before them as many labelled ones again.

        Returns:
            How many were finished, skipped ones included; 0 when none waited, the budget is used
            up, or the judge could not be called.

        Raises:
            JudgeError: the judge has given no valid verdict so far; the samples wait again.
        """
        # What an outage of the store, or another error, left in hand in the last step: its samples
        # would otherwise wait until their leases end, and be judged and paid for again.
        self._write()
        self._give_back()
        if self._budget.refresh() <= 0.0:
            return 0
        n_again = self._judge_again(limit)
        claimed = self._store.claim(self._claimant, limit, lease_seconds=LEASE_SECONDS)
        # In any order, or a few samples on which the judge fails would look like an outage for
        # as long as they are the oldest.
        self._order.shuffle(claimed)
        self._in_hand = {sample.sample_id for sample in claimed}
        self._is_idle = not claimed
        try:
            n_finished, failed = self._process_all(claimed)
        except KeyboardInterrupt:
            # Whoever stops it and starts it again shall not wait for leases to end.
            self._give_back()
            raise
        if 0 < len(failed) == len(claimed) < limit:
            self._count_alone(failed)
        self._give_back()
        return n_finished + n_again

    def _judge_again(self, limit: int) -> int:
        """Judge what people graded again, where it is due; how many samples.

        Fresh samples get as much of a budget: labels are of no use without requests to estimate.
        """
        n, began = 0, time.monotonic()
        for sample_id, is_canary in self._again.due(limit):
            is_ahead = self._n_judged["again"] > self._n_judged["fresh"]
            if self._budget.is_limited and is_ahead and not self._is_idle:
                break
            record = self._again.record(sample_id)
            if record is None:
                continue
            if not self._budget.reserve(len(self._again.positions(sample_id, record))):
                break
            try:
                with self._paid("again"):
                    found = self._again.judge(sample_id, record, is_canary=is_canary)
            except (JudgeError, StoreError):
                raise
            except Exception as error:
                self._judge_failed(error, record.route)
                break
            finally:
                self._rejected(record)
            n += 1
            self._counters.add(found)
            if time.monotonic() - began >= _AGAIN_SECONDS:
                break
        self._budget.settle()
        return n

    def _process_all(self, claimed: Sequence[Claimed]) -> tuple[int, list[int]]:
        """Judge claimed samples; count the finished, and list those on which the judge failed."""
        n_finished, failed = 0, list[int]()
        began = time.monotonic()
        try:
            for sample in claimed:
                outcome = self._process(sample)
                if outcome is None:
                    break
                if outcome is JudgedAs.JUDGE_FAILED:
                    failed.append(sample.sample_id)
                    if len(failed) == _FAILURES_OF_AN_OUTAGE:
                        break
                    continue
                n_finished += 1
                self._in_hand.discard(sample.sample_id)
                self._budget.sample_finished()
                # The judge answers: what it failed on before was the fault of the sample.
                self._count_attempts(failed)
                failed = []
                if time.monotonic() - began >= _IN_HAND_SECONDS:
                    break
        except JudgeError:
            # Nothing that such a judge left without a verdict counts as judged.
            self._in_hand.update([result.finished.sample_id for result in self._held])
            self._held = []
            self._give_back()
            raise
        finally:
            # Whatever stopped it, what was judged is written.
            self._write()
            self._budget.settle()
        return n_finished, failed

    def _count_alone(self, sample_ids: Sequence[int]) -> None:
        """Count failures on the only samples that wait, now and then."""
        now = time.monotonic()
        last = {one: self._alone.get(one, now - _ALONE_SECONDS) for one in sample_ids}
        due = [one for one, counted in last.items() if now - counted >= _ALONE_SECONDS]
        self._alone = {**last, **dict.fromkeys(due, now)}
        self._count_attempts(due)

    def _give_back(self) -> None:
        """Let claimed samples that were not judged wait again, with the attempts that they had.

        A judge that is down is down for all of them.
        """
        if self._in_hand:
            self._store.give_back(sorted(self._in_hand), max_attempts=None, claimant=self._claimant)
            self._in_hand = set()

    def _process(self, sample: Claimed) -> JudgedAs | None:
        """Judge or skip one sample; None where the budget has no room for it at present."""
        probability = self._budget.refresh()
        if probability <= 0.0:
            return None
        began = time.monotonic()
        try:
            if sample.attempts >= _MAX_ATTEMPTS:
                raise DataError(f"judging it was begun {sample.attempts} times and never ended")
            record = SampleRecord.from_bytes(sample.payload)
        except DataError as error:
            _log.warning("sample %d is left out: %s", sample.sample_id, error)
            why = (("", JudgedAs.UNREADABLE.value, str(error)),)
            finished = _finished(sample, JudgedAs.UNREADABLE, rejected=why)
            result = _Result(JudgedAs.UNREADABLE, finished)
        else:
            if not self._sampler.selects(record.request_id, probability):
                result = _Result(JudgedAs.SKIPPED, _finished(sample, JudgedAs.SKIPPED), record)
            else:
                judged = self._judged_within_budget(sample, record, probability)
                if not isinstance(judged, _Result):
                    return judged
                result = judged
        now = time.monotonic()
        if not self._held:
            self._held_since = now
        self._held.append(result)
        is_late = max(now - began - _SLOW_SECONDS, now - self._held_since - HELD_SECONDS) >= 0.0
        if self._judge.is_proven and (is_late or len(self._held) >= MAX_HELD):
            self._write()
        return result.outcome

    def _judged_within_budget(
        self, sample: Claimed, record: SampleRecord, probability: float
    ) -> _Result | JudgedAs | None:
        """Judge within the budget; None where it has no room, ``JUDGE_FAILED`` on a failure.

        Raises:
            StoreError: calls could not be reserved.
        """
        if not self._budget.reserve(self._judge.most_passages(record)):
            return None
        try:
            with self._paid("fresh"):
                return self._judged(sample, record, probability)
        except JudgeError:
            raise
        except Exception as error:
            return self._judge_failed(error, record.route)

    @contextmanager
    def _paid(self, kind: str) -> Iterator[None]:
        """Count what the judge judges, also of a sample on which it failed: it was paid for it."""
        before = self._judge.n_judged
        try:
            yield
        finally:
            if n_judged := self._judge.n_judged - before:
                known, ledger = self._cost, self._ledger
                self._cost = (None if ledger is None else ledger.accounts().cost) or 0.0
                self._budget.spend(n_judged, self._cost - known)
                self._n_judged[kind] += n_judged

    def _judged(self, sample: Claimed, record: SampleRecord, probability: float) -> _Result:
        verdicts = self._judge.verdicts_on(record, record.probability * probability)
        estimated = JudgedAs.INCOMPLETE if verdicts.block is None else JudgedAs.JUDGED
        finished = _finished(sample, estimated, verdicts, self._rejected(record))
        # A judge that people correct keeps its incomplete samples, and they count as such too.
        outcome = estimated if verdicts.is_complete else JudgedAs.INCOMPLETE
        if self._alarms is not None:
            loss = self._safely("the alarms", sample, partial(self._loss, record, verdicts))
            finished = replace(finished, loss=loss)
            # Also where it was another process, before a restart, that saw the judge fail.
            self._alarms.state.clear(AlarmKind.JUDGE_DOWN)
        self.failing = False
        n_invalid, route = verdicts.n_missing, record.route
        n_wanted = len(verdicts.verdicts) + n_invalid
        self._counters.add({("verdicts", route): n_wanted, ("invalid_verdicts", route): n_invalid})
        return _Result(outcome, finished, record)

    def _loss(self, record: SampleRecord, verdicts: SampleVerdicts) -> LossRow | None:
        """Return the losses that alarms compare; None for a request without all its verdicts."""
        if self._alarms is None or verdicts.block is None:
            return None
        rows = Rows.read([verdicts.block])
        return self._alarms.loss_row(
            record,
            verdicts.verdicts,
            harm=float(losses(rows)[Metric.HARM][0]),
            probability=float(rows.requests["probability"][0]),
        )

    def _safely(self, who: str, sample: Claimed | Finished, work: Callable[[], T]) -> T | None:
        """Do work that a sample must not depend on; None where it failed."""
        try:
            return work()
        except Exception as error:
            self._counters.add_error()
            _log.warning("%s failed on sample %d: %s", who, sample.sample_id, describe_error(error))
            return None

    def _judge_failed(self, error: Exception, route: Route) -> JudgedAs:
        self._counters.add({("judged_samples", route, JudgedAs.JUDGE_FAILED): 1})
        self.why = describe_error(error)
        if not self.failing:
            # Once until it works again: a dead judge must not fill the log.
            name = self._judge.judge.name
            _log.warning("judge %s failed: %s", name, describe_error(error))
            if self._alarms is not None:
                self._alarms.add(
                    AlarmKind.JUDGE_DOWN,
                    f"The judge {name} could not be called ({type(error).__name__}): samples wait, "
                    "and the estimates grow old",
                )
        self.failing = True
        return JudgedAs.JUDGE_FAILED

    def _count_attempts(self, sample_ids: Sequence[int]) -> None:
        """Give samples back that failed by themselves; those that failed too often are left out."""
        if not sample_ids:
            return
        given_up = self._store.give_back(sample_ids, max_attempts=_MAX_ATTEMPTS, why=self.why)
        self._in_hand.difference_update(sample_ids)
        if given_up:
            _log.warning(
                "%d samples are left out: judging them failed %d times", given_up, _MAX_ATTEMPTS
            )

    def _rejected(self, record: SampleRecord) -> tuple[tuple[str, str, str], ...]:
        """List replies that were no verdict; they may quote a passage whose text is not stored."""
        if self._ledger is None:
            return ()
        stored = {passage.passage_id for passage in record.passages.values() if passage.text}
        return tuple(
            [
                (one.passage_id, one.reason.value, one.reply if one.passage_id in stored else "")
                for one in self._ledger.take_rejected()
            ]
        )

    def _write(self) -> None:
        """Store what is held, and count it.

        Raises:
            StoreError: nothing can be stored now; it is held until the next call.
        """
        if not self._held:
            return
        finished = [result.finished for result in self._held]
        accepted, refused = self._store.finish(self._series, finished)
        written, self._held = self._held, []
        for result in written:
            sample_id, record = result.finished.sample_id, result.record
            if (refusal := refused.get(sample_id)) is not None:
                self._counters.add_error()
                self.why = describe_error(refusal)
                _log.warning("the result of sample %d could not be stored: %s", sample_id, self.why)
                continue
            route = "" if record is None else record.route
            self._counters.add({("judged_samples", route, result.outcome): 1})
            if sample_id not in accepted or record is None:
                continue
            # Each stands for all traffic.
            weight = 1.0 / record.probability if record.probability else 0.0
            self._counters.add(token_counts(record.mode, record.tokens, weight))
        self._count_attempts(list(refused))


def _finished(
    sample: Claimed,
    outcome: JudgedAs,
    verdicts: SampleVerdicts | None = None,
    rejected: tuple[tuple[str, str, str], ...] = (),
) -> Finished:
    return Finished(
        sample_id=sample.sample_id,
        state=_STATES[outcome],
        verdicts="" if verdicts is None else verdicts_to_json(verdicts.verdicts.values()),
        block=b"" if verdicts is None or verdicts.block is None else verdicts.block,
        rejected=rejected,
    )
