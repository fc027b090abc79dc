"""Has waiting samples judged, and writes the results to the store.

A sample on which the judge fails does not keep the others from being judged: it is stored with the
grades that it has, and asked about again in the next round. The first round begins with the
process. Calls the judge, reads and writes the store, feeds the alarms, reads the clocks, shuffles
at random, and logs.
"""

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ctxguard._support.error_text import describe_error
from ctxguard.core.types import Flag, Route
from ctxguard.errors import DataError, JudgeError, StoreError
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.alarms.feed import AlarmMonitor
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judging.budget import JudgingBudget
from ctxguard.monitor.judging.counts import MISMATCHED, JudgingOutcome
from ctxguard.monitor.judging.sample_judge import JudgingAgain, SampleJudge
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import Counts, Finished, SampleStore, State

_log = logging.getLogger(__name__)

_IN_HAND_SECONDS = 120.0
"""Seconds after which a step ends, so that a slow judge does not hold up the monitor."""
_AGAIN_SECONDS = 30.0
"""How long a step judges again before it turns to fresh samples."""
_FAILURES_OF_AN_OUTAGE = 5
"""Consecutive samples on which the judge fails: fewer may be the samples' own fault."""
_ROUND_SECONDS = (60.0, 3_600.0)
"""Seconds between two rounds of asking about failures: the first and the longest wait."""

MAX_HELD = 100
"""The most results that wait for one transaction."""
HELD_SECONDS = 0.25
"""The least seconds between two of these; a transaction takes a few milliseconds."""

_NOTHING: Counts = {}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sample to judge."""

    sample_id: int
    record: SampleRecord
    probability: float
    """The probability with which it was sampled and taken up for judging."""
    known: Mapping[str, Judgment] | None = None
    """The grades that it already has; None if it was never judged."""


class JudgingWorker:
    """Judges waiting samples, some at a time, on one thread of the store's one owner.

    A quick judge's results are written many at once, a slow judge's one by one. While the store
    cannot be written they are held: they were paid for. What a process has not written when it
    dies is judged again.

    Attributes:
        failing: Whether the judge could not be called at its last call.
        outcomes: Samples of this process by how judging them ended.
        errors: Results that could not be stored, and alarms that failed.
        why: Why the judge last failed; empty if it never did.
    """

    def __init__(
        self,
        store: SampleStore,
        judge: SampleJudge,
        series: str,
        *,
        budget: JudgingBudget | None,
        alarms: AlarmMonitor | None,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._judge = judge
        self._again = JudgingAgain(store, series, judge, clock)
        self._budget = budget
        self._alarms = alarms
        self._series = series
        self._held: list[Finished] = []
        self._written_at = 0.0
        self._sampler = HashSampler("budget")
        self._cost = 0.0
        self._counted: Counts = {}
        """The judge's ledger as last reported to the store."""
        self._uncounted = Counter[tuple[str, ...]]()
        """Counts that belong to no sample."""
        self._to_ask = deque[int]()
        """Samples on which the judge had failed when the present round began."""
        self._round_at = time.monotonic()
        self._round_seconds = _ROUND_SECONDS[0]
        self._suspects: list[_Waiting] = []
        """The samples of a step on which the judge failed: it may be down."""
        self._n_failures = self._n_answers = 0
        """Failures since the judge last answered, and answers in this step."""
        self.why = ""
        self._n_judged = {"fresh": 0, "again": 0}
        """The passages judged, of fresh samples and of those judged again."""
        self._is_idle = True
        self.failing = False
        self.outcomes = Counter[JudgingOutcome]()
        self.errors = 0

    def step(self, limit: int) -> int:
        """Judge up to ``limit`` waiting samples, after rejudging up to as many graded ones.

        Returns how many were finished, as ``Monitor.step`` does. A JudgeError where the judge has
        given no valid grade so far; the samples wait.
        """
        # Left over from an outage of the store.
        self._write()
        if self._probability() <= 0.0:
            return 0
        before, self._n_answers, self._suspects = self.outcomes.copy(), 0, []
        try:
            n_again = self._judge_again(limit)
            self._ask_failed(limit)
            waiting = list(self._store.waiting(limit).items())
            # In any order, or a few samples on which the judge fails would look like an outage
            # for as long as they are the oldest.
            random.shuffle(waiting)
            self._is_idle = not waiting
            began = time.monotonic()
            for sample_id, record in waiting:
                is_up = self._take_up(sample_id, record)
                if not is_up or time.monotonic() - began >= _IN_HAND_SECONDS:
                    break
            if self._n_answers:
                # It answers about others: the fault is theirs.
                for one in self._suspects:
                    found = self._judge.as_graded(one.sample_id, one.record, one.probability)
                    self._add(one, found)
        except JudgeError:
            # Nothing that such a judge left without a grade counts as judged.
            self._held = []
            raise
        finally:
            # Whatever stopped it, the results so far are written.
            self._write()
        ended = self.outcomes - before
        return ended.total() - ended[JudgingOutcome.JUDGE_FAILED] + n_again

    def _probability(self) -> float:
        """Return the probability with which the next sample is judged."""
        return 1.0 if self._budget is None else self._budget.refresh()

    def _judge_again(self, limit: int) -> int:
        """Judge graded samples again if they are due; return how many.

        Fresh samples get as much of a budget: labels are of no use without requests to estimate.
        """
        n, began = 0, time.monotonic()
        for sample_id, is_canary in self._again.due(limit):
            is_ahead = self._n_judged["again"] > self._n_judged["fresh"]
            if self._budget is not None and is_ahead and not self._is_idle:
                break
            ready = self._again.read(sample_id)
            if ready is None:
                continue
            record, positions, before = ready
            if self._budget is not None and not self._budget.allows(len(positions)):
                break
            try:
                with self._paid("again"):
                    found = self._again.judge(
                        sample_id, record, positions, before, is_canary=is_canary
                    )
            except (JudgeError, StoreError):
                raise
            except Exception as error:
                self._judge_failed(error, record.route)
                break
            n += 1
            self._uncounted.update(found)
            if time.monotonic() - began >= _AGAIN_SECONDS:
                break
        return n

    def _ask_failed(self, limit: int) -> None:
        """Ask again, now and then, about passages that lack a grade because a call failed."""
        now = time.monotonic()
        if not self._to_ask and now >= self._round_at:
            self._to_ask.extend(self._store.failed(self._series))
            self._round_at = now + self._round_seconds
            self._round_seconds = min(2.0 * self._round_seconds, _ROUND_SECONDS[1])
        some = [self._to_ask.popleft() for _ in range(min(limit, len(self._to_ask)))]
        if not some:
            return
        records, grades = self._store.records(some), self._store.grades(self._series, some)
        rows = self._store.first_rows(some)
        for place, one in enumerate(some):
            if not {one} <= records.keys() & grades.keys() & rows.keys():
                continue
            probability = float(rows[one]["probability"])
            if not self._process(_Waiting(one, records[one], probability, grades[one])):
                self._to_ask.extendleft(reversed(some[place:]))
                return
            if now + _AGAIN_SECONDS <= time.monotonic():
                self._to_ask.extendleft(reversed(some[place + 1 :]))
                return

    def _take_up(self, sample_id: int, record: SampleRecord | DataError) -> bool:
        """Judge or skip one fresh sample; return False if no other should be taken up now."""
        probability = self._probability()
        if probability <= 0.0:
            return False
        if isinstance(record, DataError):
            _log.warning("sample %d is left out: %s", sample_id, record)
            self._finish(_unreadable(sample_id, str(record)), route="")
            return True
        if not self._sampler.selects(record.request_id, probability):
            self._finish(Finished(sample_id, State.SKIPPED), record.route, _of_request(record))
            return True
        return self._process(_Waiting(sample_id, record, record.probability * probability))

    def _process(self, sample: _Waiting) -> bool:
        """Judge one sample; return False if the budget has no room or the judge is down."""
        record, known = sample.record, sample.known or {}
        most = max(len(record.to_judge()) - len(known), 0)
        if self._budget is not None and not self._budget.allows(most):
            return False
        try:
            with self._paid("fresh"):
                found = self._judge.finish(sample.sample_id, record, sample.probability, known)
        except JudgeError:
            raise
        except Exception as error:
            self._judge_failed(error, record.route)
            self._n_failures += 1
            if sample.known is None:
                self._suspects.append(sample)
            if self._n_failures < _FAILURES_OF_AN_OUTAGE:
                return True
            self._suspects = []
            return False
        self._n_failures = 0
        self._n_answers += 1
        self.failing = False
        if self._alarms is not None:
            # Also where it was another process, before a restart, that saw the judge fail.
            self._alarms.state.clear(AlarmKind.JUDGE_DOWN)
        self._add(sample, found)
        return True

    def _add(self, sample: _Waiting, found: Finished) -> None:
        """Add a sample's result to those that are written next."""
        record = sample.record
        counts = {} if sample.known is not None else dict(_of_request(record))
        if sample.known is None and Flag.PROFILE_MISMATCH.value in record.flags:
            counts[MISMATCHED,] = 1
        self._note_loss(sample, found)
        self._finish(found, record.route, counts)

    def _finish(self, finished: Finished, route: str, counts: Counts = _NOTHING) -> None:
        """Hold a result until it is written with others, or write it now."""
        counts = {("judged_samples", route, finished.state): 1, **finished.counts, **counts}
        self._held.append(replace(finished, counts=counts))
        is_late = time.monotonic() >= self._written_at + HELD_SECONDS
        if self._judge.is_proven and (is_late or len(self._held) >= MAX_HELD):
            self._write()

    @contextmanager
    def _paid(self, kind: str) -> Iterator[None]:
        """Count judged passages, even if the judge failed on the sample: they were paid for."""
        before = self._judge.n_judged
        try:
            yield
        finally:
            if n_judged := self._judge.n_judged - before:
                known, ledger = self._cost, self._judge.ledger
                self._cost = (None if ledger is None else ledger.accounts().cost) or 0.0
                if self._budget is not None:
                    self._budget.spend(n_judged, self._cost - known)
                self._n_judged[kind] += n_judged

    def _note_loss(self, sample: _Waiting, found: Finished) -> None:
        """Note the losses that alarms compare."""
        if self._alarms is None or found.rows is None:
            return
        try:
            self._alarms.note_loss(sample.record, found.rows)
        except Exception as error:
            self.errors += 1
            _log.warning(
                "the alarms failed on sample %d: %s", sample.sample_id, describe_error(error)
            )

    def _judge_failed(self, error: Exception, route: Route) -> None:
        self.outcomes[JudgingOutcome.JUDGE_FAILED] += 1
        self._uncounted["judged_samples", route, JudgingOutcome.JUDGE_FAILED] += 1
        self.why = describe_error(error)
        if not self.failing:
            # Once until it works again: a dead judge must not fill the log.
            name = self._judge.judge.name
            _log.warning("judge %s failed: %s", name, describe_error(error))
            if self._alarms is not None:
                self._alarms.add(
                    AlarmKind.JUDGE_DOWN,
                    f"The judge {name} could not be called ({type(error).__name__}): samples wait, "
                    "and the estimates become outdated",
                )
        self.failing = True

    def _write(self) -> None:
        """Store the held results, with the counts since then and the budget's spending.

        Raises:
            StoreError: nothing can be stored now; results are held until the next call.
        """
        self._written_at = time.monotonic()
        told = self._judge.counts()
        more = Counter(self._uncounted)
        more.update({key: n - self._counted.get(key, 0.0) for key, n in told.items()})
        if not self._held and not any(more.values()):
            return
        kept = {} if self._budget is None else self._budget.kept
        refused = self._store.finish(self._series, self._held, more, kept)
        written, self._held = self._held, []
        self._uncounted.clear()
        self._counted = told
        for one in written:
            if (refusal := refused.get(one.sample_id)) is not None:
                self._give_up(one.sample_id, refusal)
            else:
                self.outcomes[JudgingOutcome(one.state)] += 1

    def _give_up(self, sample_id: int, refusal: Exception) -> None:
        """Give up a sample whose result cannot be stored."""
        self.errors += 1
        why = describe_error(refusal)
        _log.warning("the result of sample %d could not be stored: %s", sample_id, why)
        self._store.finish(self._series, [_unreadable(sample_id, why)])


def _unreadable(sample_id: int, why: str) -> Finished:
    state = State.UNREADABLE
    return Finished(sample_id, state, rejected=(("", state.value, why),))


def _of_request(record: SampleRecord) -> Counts:
    """Count the tokens of a request; each stands for all traffic."""
    return record.tokens.counts(record.mode, 1.0 / record.probability)
