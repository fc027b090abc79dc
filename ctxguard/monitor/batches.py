"""From the queue to the store: claims waiting samples, has each judged, and writes what it is.

Each sample is dealt with once, whichever monitor of the store has it; one on which the judge
fails keeps no other from being judged.
"""

import json
import logging
import random
import time
from collections.abc import Sequence

from ctxguard.errors import DataError
from ctxguard.hygiene import describe_error
from ctxguard.monitor.alarms import AlarmKind, Severity
from ctxguard.monitor.allowance import Allowance
from ctxguard.monitor.chance import Draw
from ctxguard.monitor.finishing import Ended, Finishing
from ctxguard.monitor.judging import Judged, Judging
from ctxguard.monitor.records import Record
from ctxguard.monitor.store import Claimed, Finished, SampleStore, State
from ctxguard.monitor.table import served_bytes, summary, table_of
from ctxguard.monitor.tally import Outcome, Tally
from ctxguard.monitor.watch import Watch

_log = logging.getLogger(__name__)

_LEASE_SECONDS = 600.0
_IN_HAND_SECONDS = 120.0
"""What a slow judge has not come to by then waits again, long before its lease ends."""
_MOST_ATTEMPTS = 5
_FAILURES_OF_AN_OUTAGE = 2

_STATES = {
    Outcome.JUDGED: State.JUDGED,
    Outcome.INCOMPLETE: State.INCOMPLETE,
    Outcome.SKIPPED: State.SKIPPED,
    Outcome.UNREADABLE: State.FAILED,
}


class Batches:
    """Judges waiting samples, a claimed batch at a time; for one thread.

    Args:
        store: Where the samples are.
        claimant: Who claims them.
        series: The judge's.
        judging: Judges one sample.
        allowance: What judging may take.
        tally: Told what became of each sample.
        watch: Told what each sample shows; None where nothing is watched.
    """

    def __init__(
        self,
        store: SampleStore,
        *,
        claimant: str,
        series: str,
        judging: Judging,
        allowance: Allowance,
        tally: Tally,
        watch: Watch | None,
    ) -> None:
        self._store = store
        self._claimant = claimant
        self._judging = judging
        self._allowance = allowance
        self._tally = tally
        self._watch = watch
        self._finishing = Finishing(store, series)
        self._taken_up = Draw("budget")
        self._order = random.Random(claimant)  # noqa: S311 - an order, not a secret
        self.failing = False
        """Whether the judge could not be asked when it last was."""

    def step(self, limit: int) -> int:
        """Judge up to ``limit`` waiting samples.

        Returns:
            How many were dealt with; 0 when none waited, the budget is used up, or the judge
            could not be asked.
        """
        if self._allowance.share_now() <= 0.0:
            return 0
        claimed = self._store.claim(self._claimant, limit, lease_seconds=_LEASE_SECONDS)
        # In any order, or a few samples on which the judge fails would look like an outage for
        # as long as they are the oldest.
        self._order.shuffle(claimed)
        still_open = {sample.sample_id for sample in claimed}
        dealt_with, failed = 0, list[int]()
        began = time.monotonic()
        try:
            for sample in claimed:
                outcome = self._deal_with(sample)
                if outcome is None:
                    break
                if outcome is Outcome.JUDGE_FAILED:
                    failed.append(sample.sample_id)
                    if len(failed) == _FAILURES_OF_AN_OUTAGE:
                        break
                    continue
                dealt_with += 1
                self._allowance.taken()
                # The judge answers: what it failed on before was the fault of the sample.
                self._tried_in_vain(failed)
                still_open -= {sample.sample_id, *failed}
                failed = []
                if time.monotonic() - began >= _IN_HAND_SECONDS:
                    break
        finally:
            # Whatever stopped it, what was judged is written.
            self._finishing.write()
            self._after_writing()
        if still_open:
            # A judge that is down is down for all of them: they keep their attempts.
            self._store.give_back(sorted(still_open), max_attempts=None)
        return dealt_with

    def _deal_with(self, sample: Claimed) -> Outcome | None:
        """What became of it; None where the budget has no room for it at present."""
        share = self._allowance.share_now()
        if share <= 0.0:
            return None
        began = time.monotonic()
        try:
            record = Record.from_bytes(sample.payload)
        except DataError as error:
            _log.warning("sample %d is left out: %s", sample.sample_id, error)
            ended = Ended(Outcome.UNREADABLE, _finished(sample, Outcome.UNREADABLE))
        else:
            if not self._taken_up.chooses(sample.request_id, share):
                ended = Ended(Outcome.SKIPPED, _finished(sample, Outcome.SKIPPED), record)
            else:
                most = len(record.served) + len(record.to_judge(answered=False))
                if not self._allowance.affords(most):
                    return None
                try:
                    ended = self._judge(sample, record, share)
                except Exception as error:
                    self._judge_failed(error)
                    return Outcome.JUDGE_FAILED
        self._finishing.add(ended, time.monotonic() - began)
        self._after_writing()
        return ended.outcome

    def _judge(self, sample: Claimed, record: Record, share: float) -> Ended:
        judged = self._judging(record, sample.probability * share)
        outcome = Outcome.INCOMPLETE if judged.request is None else Outcome.JUDGED
        finished = _finished(sample, outcome, judged, self._rejected(record))
        if self._watch is not None:
            # Also where it was another process, before a restart, that saw the judge fail.
            self._watch.over(AlarmKind.JUDGE_DOWN)
        self.failing = False
        self._tally.asked(judged.asked, judged.invalid)
        self._allowance.spend(judged.asked)
        return Ended(outcome, finished, record, judged.request)

    def _judge_failed(self, error: Exception) -> None:
        self._tally.ended(Outcome.JUDGE_FAILED)
        if not self.failing:
            # Once until it works again: a dead judge must not fill the log.
            name = self._judging.judge.name
            _log.warning("judge %s failed: %s", name, describe_error(error))
            if self._watch is not None:
                self._watch.raise_(
                    AlarmKind.JUDGE_DOWN,
                    f"The judge {name} could not be asked ({type(error).__name__}): "
                    "samples wait, and estimates grow old",
                    Severity.WARNING,
                )
        self.failing = True

    def _tried_in_vain(self, sample_ids: Sequence[int]) -> None:
        if not sample_ids:
            return
        given_up = self._store.give_back(sample_ids, max_attempts=_MOST_ATTEMPTS)
        if given_up:
            _log.warning(
                "%d samples are left out: judging them failed %d times", given_up, _MOST_ATTEMPTS
            )

    def _rejected(self, record: Record) -> tuple[tuple[str, str, str], ...]:
        """Replies that were no verdict; they may quote a passage whose text is not kept."""
        take = getattr(self._judging.judge, "take_rejected", None)
        kept = {passage.passage_id for passage in record.passages.values() if passage.text}
        return tuple(
            [
                (one.passage_id, one.reason.value, one.reply if one.passage_id in kept else "")
                for one in (() if take is None else take())
            ]
        )

    def _after_writing(self) -> None:
        """Count what was written since, and show it to whoever watches."""
        written = self._finishing.take_written()
        if not written:
            return
        refused = list[int]()
        for one in written:
            if one.refused is None:
                self._tally.ended(one.ended.outcome)
            else:
                sample_id = one.ended.finished.sample_id
                refused.append(sample_id)
                self._tally.failed()
                _log.warning(
                    "what sample %d came to cannot be written: %s",
                    sample_id,
                    describe_error(one.refused),
                )
        accepted = [one.ended for one in written if one.accepted]
        rows = [ended.finished.summary for ended in accepted if ended.request is not None]
        if rows:
            self._tally.judged(table_of(rows))
        self._allowance.keep()
        self._tried_in_vain(refused)
        if self._watch is not None:
            for ended in accepted:
                _show(self._watch, ended)


def _show(watch: Watch, ended: Ended) -> None:
    if ended.record is None:
        return
    watch.signals(ended.record)
    if ended.request is not None:
        harm = float(table_of(ended.finished.summary)["harm"][0])
        watch.judged(ended.finished.sample_id, ended.record, ended.request, harm)


def _finished(
    sample: Claimed,
    outcome: Outcome,
    judged: Judged | None = None,
    rejected: tuple[tuple[str, str, str], ...] = (),
) -> Finished:
    request = None if judged is None else judged.request
    return Finished(
        sample_id=sample.sample_id,
        time_seconds=sample.time_seconds,
        state=_STATES[outcome],
        verdicts="" if judged is None else verdicts_to_json(judged),
        summary=b"" if request is None else summary(request),
        grades=b"" if request is None else served_bytes(request),
        rejected=rejected,
    )


def verdicts_to_json(judged: Judged) -> str:
    """Grades by passage id, and how those of grade 0 mislead, for people and recalibration."""
    return json.dumps(
        {
            passage_id: [verdict.grade, None if verdict.negative is None else verdict.negative]
            for passage_id, verdict in judged.verdicts.items()
        },
        separators=(",", ":"),
    )
