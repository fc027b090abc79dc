"""Writing samples: nothing lost without a reason, nothing written that may not be."""

import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from contexts import make_context
from prometheus_client import CollectorRegistry
from watching import Watching

from ctxguard import ContextGuard
from ctxguard.core.assembly import Assembly
from ctxguard.core.metadata_filter import Where
from ctxguard.core.passages import estimate_tokens
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_K, Hit, Mode, Passage, ScoreKind
from ctxguard.errors import ConfigurationError, DataError, StoreFullError, StoreLockedError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.record import FORMAT, Privacy, SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import HOUR_SECONDS, JudgingRates, LostReason, Sampler
from ctxguard.monitor.store import Batch, SampleStore
from ctxguard.monitor.store.writer import SampleWriter, sample_to
from tests.timing import PATIENCE_SECONDS, until

POOL = [f"p{rank}" for rank in range(10)]


def written(live: Watching) -> list[SampleRecord]:
    states = sum(live.store.states().values())
    return list(live.store.records(range(1, states + 1)).values())


def test_samples_are_stored_redacted_and_weighted() -> None:
    live = Watching(LabelJudge({}), rate=0.25)
    live.serve(
        make_context(["mail a@b.example"], 1, query="from joe@mail.example?", request_id="r7")
    )
    (record,) = written(live)
    assert (record.request_id, record.probability) == ("r7", 0.25)
    assert record.query == "from [e-mail]?"
    assert record.passage(0).text == "mail [e-mail]"
    accounts = live.writer.accounts()
    assert (accounts.sampled, accounts.stored, accounts.pending) == (1, 1, 0)


def test_raising_redactor_loses_the_sample(caplog: pytest.LogCaptureFixture) -> None:
    def broken(text: str) -> str:
        raise ValueError(f"cannot redact {text}")

    live = Watching(LabelJudge({}), privacy=Privacy(redactor=broken))
    live.serve(*[make_context(POOL, 2, query="a secret")] * 3)
    accounts = live.writer.accounts()
    assert accounts.lost[LostReason.REDACTION_FAILED] == 3
    assert (accounts.stored, accounts.pending) == (0, 0)
    assert live.store.states() == {} or not sum(live.store.states().values())
    assert "a secret" not in caplog.text


def test_queries_and_passages_are_optional() -> None:
    live = Watching(LabelJudge({}), privacy=Privacy(query="omitted"))
    live.serve(make_context(POOL, 2, query="a secret"))
    bare = Watching(LabelJudge({}), privacy=Privacy(passages="omitted"))
    bare.serve(make_context(POOL, 2, query="a question"))
    ((unasked,), (untold,)) = written(live), written(bare)
    assert unasked.query is None
    assert unasked.passages
    assert (untold.query, untold.passages) == ("a question", {})
    assert untold.passage_ids == tuple(POOL)
    with pytest.raises(ConfigurationError, match="'omit' must be one of"):
        Privacy(passages="omit")  # type: ignore[arg-type]


def test_unrecordable_sample_is_lost_alone() -> None:
    live = Watching(LabelJudge({}))
    context = make_context(POOL, 2)
    ranking = replace(context.decision.ranking, scores=("no", "numbers") * 5)
    torn = replace(context, decision=replace(context.decision, ranking=ranking))
    live.serve(context, torn, context)
    accounts = live.writer.accounts()
    assert (accounts.stored, accounts.lost[LostReason.UNREADABLE]) == (2, 1)


@pytest.mark.parametrize(
    "odd",
    [Passage("p0", "text", None), Passage("p0", "text", 7), Passage(0, "text"), Passage("p0", b"")],  # type: ignore[arg-type]
    ids=["no title", "a number for a title", "a number for an id", "bytes for a text"],
)
@pytest.mark.parametrize("kept", [2, 0], ids=["served", "dropped"])
def test_foreign_passage_costs_no_sample(odd: Passage, kept: int) -> None:
    """The guard serves or drops it alone; that must not blind the monitor to the request."""
    ids = [odd.passage_id, "p1"]
    context = make_context(ids, kept)
    passages = [odd, Passage("p1", "other")]
    ranking = replace(context.decision.ranking, passages=passages)
    decision = replace(context.decision, ranking=ranking)
    served = tuple([one for one in passages[:kept] if isinstance(one.text, str)])
    live = Watching(LabelJudge({}), rates=JudgingRates(dropped_rate=1.0))
    live.serve(replace(context, decision=decision, passages=served))
    (record,) = written(live)
    assert record.passage_ids == (f"{odd.passage_id}", "p1")
    assert record.passage(0).text == ("text" if isinstance(odd.text, str) else "")
    assert record.passage(1).text == "other"


class Through:
    """A store whose batches go through a function of a test."""

    def __init__(self, store: SampleStore, append: Callable[..., bool]) -> None:
        self._store, self.append = store, append

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def refusing(store: SampleStore, times: int) -> Through:
    """A store that refuses for a while."""
    left = [times]

    def append(worker_id: str, batch: Batch) -> bool:
        if not left[0]:
            return store.append(worker_id, batch)
        left[0] -= 1
        raise StoreFullError("no space")

    return Through(store, append)


def test_refusing_store_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    live = Watching(LabelJudge({}))
    live.writer.store = refusing(live.store, times=2)
    live.offer(*[make_context(POOL, 2)] * 250)
    with caplog.at_level(logging.WARNING):
        assert not live.writer.flush(timeout_seconds=0.0)
        waiting = live.writer.accounts()
        assert (waiting.stored, waiting.pending, sum(waiting.lost.values())) == (0, 250, 0)
        assert live.writer.flush()
    after = live.writer.accounts()
    assert (after.stored, after.pending, sum(after.lost.values())) == (250, 0, 0)
    assert sum(live.store.states().values()) == 250
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("takes_counts", [True, False])
def test_never_stored_is_lost_with_reason(takes_counts: bool) -> None:
    """Also where the store can still be told: it takes none of the samples."""

    def choosy(worker_id: str, batch: Batch) -> bool:
        if batch.samples or not takes_counts:
            raise StoreFullError("no space")
        return live.store.append(worker_id, batch)

    live = Watching(LabelJudge({}))
    live.writer = SampleWriter(live.sampler, Through(live.store, choosy), exit_seconds=0.05)
    live.offer(make_context(POOL, 2))
    live.writer.stop()
    accounts = live.writer.accounts()
    assert (accounts.pending, accounts.lost[LostReason.STORE_FAILED]) == (0, 1)
    told = live.store.accounts()
    assert told == accounts if takes_counts else told.sampled == 0


@pytest.mark.parametrize("later_seconds", [0.0, HOUR_SECONDS])
@pytest.mark.parametrize("is_late", [False, True])
def test_unanswered_batch_counts_as_stored(
    monkeypatch: pytest.MonkeyPatch, is_late: bool, later_seconds: float
) -> None:
    """A server may get what a process sent before it gave up, or after that; never both ways."""
    live = Watching(LabelJudge({}))
    late: list[Batch] = []
    began = live.now
    monkeypatch.setattr(time, "time", lambda: live.now)

    def deaf(worker_id: str, batch: Batch) -> bool:
        if not batch.samples:
            return live.store.append(worker_id, batch)
        if is_late:
            late.append(batch)
        else:
            live.store.append(worker_id, batch)
        live.now = began + later_seconds
        raise StoreLockedError("no answer")

    live.writer = SampleWriter(live.sampler, Through(live.store, deaf), exit_seconds=0.05)
    live.offer(*[make_context(POOL, 2)] * 3)
    live.writer.stop()
    for batch in late:
        assert not live.store.append(live.sampler.worker_id, batch)
    n_stored, accounts = 0 if is_late else 3, live.writer.accounts()
    assert (accounts.stored, accounts.pending) == (n_stored, 0)
    assert accounts.lost[LostReason.STORE_FAILED] == 3 - n_stored
    assert live.store.accounts() == accounts
    assert sum(live.store.states().values()) == n_stored


def test_waiting_is_measured_errors_show() -> None:
    live = Watching(LabelJudge({}), capacity=3)
    live.serve(*[make_context(POOL, 2)] * 3)
    live.offer(*[make_context(POOL, 2)] * 5)
    accounts = live.writer.accounts()
    assert (accounts.sampled, accounts.stored, accounts.pending) == (8, 3, 3)
    assert accounts.unaccounted == 0
    live.sampler._queue.pop()
    assert live.writer.accounts().unaccounted == 1
    live.writer.flush()
    assert live.monitor.report().accounts.unaccounted == 1
    live.sampler.lose(2, LostReason.CLOSED)
    assert live.writer.accounts().unaccounted == -1


def test_store_hears_what_waits() -> None:
    live = Watching(LabelJudge({}))
    told: list[Batch] = []

    def listening(worker_id: str, batch: Batch) -> bool:
        told.append(batch)
        return live.store.append(worker_id, batch)

    live.writer.store = Through(live.store, listening)
    live.serve(*[make_context(POOL, 2)] * 250)
    sampled = [counts.sampled + sum(counts.earlier.values()) for counts in told]
    pending = [counts.pending for counts in told]
    assert list(zip(sampled, pending, strict=True)) == [(250, 150), (0, 50), (0, 0)]


def test_counts_add_up_under_threads() -> None:
    live = Watching(LabelJudge({}), capacity=50)
    context, stopping = make_context(POOL, 2), threading.Event()

    def offer() -> None:
        while not stopping.is_set():
            live.sampler.offer(context, 1.0, live.now)
            stopping.wait(0.0005)

    threads = [threading.Thread(target=offer) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            live.writer.flush(timeout_seconds=0.01)
            assert live.monitor.report().accounts.unaccounted == 0
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    live.writer.stop()
    accounts = live.monitor.report().accounts
    assert (accounts.pending, accounts.unaccounted) == (0, 0)


def test_flushing_ends_despite_the_store() -> None:
    live = Watching(LabelJudge({}))
    live.writer.store = refusing(live.store, times=10**9)
    with live.writer._writing:  # as its thread holds it while it tries again and again
        live.offer(make_context(POOL, 2))
        assert not live.writer.flush(timeout_seconds=0.05)
    assert live.writer.accounts().pending == 1
    live.writer.store = live.store


def test_lost_is_told_without_followers() -> None:
    live = Watching(LabelJudge({}), capacity=1)
    live.offer(*[make_context(POOL, 2)] * 5)
    live.writer.flush()
    for _ in range(5):
        live.sampler.lose(1, LostReason.CLOSED)
    live.writer.start()
    live.writer.start()
    lost = {**dict.fromkeys(LostReason, 0), LostReason.QUEUE_FULL: 4, LostReason.CLOSED: 5}
    until(lambda: live.store.accounts().lost == lost)
    live.writer.stop()
    assert live.store.accounts().stored == 1


def test_damaged_store_stops_no_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "samples.db"
    path.write_bytes(b"no database" * 1_000)
    samples = sample_to(f"sqlite:///{path}", rate=1.0)
    assert "no samples are stored until the store is repaired" in caplog.text
    samples.sampler.offer(make_context(POOL, 2), 1.0, 1.0)
    path.rename(tmp_path / "damaged")
    until(lambda: samples.accounts().stored == 1)
    samples.stop()


def test_hanging_store_holds_nothing() -> None:
    released = threading.Event()

    def hanging(*_: object) -> bool:
        released.wait(PATIENCE_SECONDS)
        return False

    live = Watching(LabelJudge({}))
    writer = SampleWriter(
        Sampler(1.0), Through(live.store, hanging), interval_seconds=0.001, exit_seconds=0.05
    )
    writer.start()
    for _ in range(3):
        assert writer.sampler.offer(make_context(POOL, 2), 1.0, live.now)
    writer.stop()
    released.set()


_SERVING = """
import os, sys, time
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.store.writer import sample_to
from ctxguard.core.types import Hit
samples = sample_to(sys.argv[1], rate=1.0)
guard = ContextGuard(
    lambda query, depth: [Hit("a", 1.0, text="t")], score_kind="cosine", sampler=samples.sampler
)
for i in range(20):
    guard.retrieve("q", request_id=f"{os.getpid()}-{i}")
if sys.argv[2] == "fork":
    for _ in range(3):
        if os.fork() == 0:
            for i in range(20):
                guard.retrieve("q", request_id=f"{os.getpid()}-{i}")
            samples.stop()
            os._exit(0)
    for _ in range(3):
        os.wait()
"""


@pytest.mark.parametrize(("how", "samples"), [("exit", 20), ("fork", 80)])
def test_each_process_writes_its_own(tmp_path: Path, how: str, samples: int) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_SERVING), url, how],
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    store = SampleStore.open(url)
    found = store.accounts()
    assert sum(store.states().values()) == found.stored == found.sampled == samples
    assert (found.pending, found.unaccounted) == (0, 0)


def test_record_reads_as_written() -> None:
    """And can be decided on again."""
    context = replace(make_context(POOL, 3), session_id="s")
    record = record_of(context, 1.0, 0.0)
    again = SampleRecord.from_bytes(record.to_bytes())
    assert again == record
    assert again.session_id == "s"
    ranking = again.ranking()
    assert ranking.passage_ids == tuple(POOL)
    assert list(ranking.scores) == list(context.decision.ranking.scores)
    assert isinstance(ranking.passages[0], Passage)
    assert json.loads(zlib.decompress(record.to_bytes()))["format"] == FORMAT


@pytest.mark.parametrize("mode", Mode)
def test_served_copies_are_not_dropped(mode: Mode) -> None:
    """A relevant passage whose text was served is not lost, and of other copies one is judged."""
    texts = ["one", "two", "ONE", "three", "four", "Three", "four", "one "]
    hits = [Hit(f"p{rank}", 1.0 - rank / 20, text) for rank, text in enumerate(texts)]
    guard = ContextGuard(
        policy=RatioPolicy(k=2),
        score_kind=ScoreKind.COSINE,
        mode=mode,
        telemetry=Telemetry(CollectorRegistry()),
        k=2,
    )
    record = record_of(guard.filter("q", hits), 1.0, 0.0)
    assert record.served == (0, 1)
    assert record.dropped == (3, 4)
    assert record.copies == {2: 0, 5: 3, 6: 4, 7: 0}
    again = SampleRecord.from_bytes(record.to_bytes())
    assert again.copies == again.ranking().copies == record.copies
    with pytest.raises(DataError):
        SampleRecord.from_bytes(replace(record, copies={2: 8}).to_bytes())


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("max_tokens", [None, 60, 10], ids=["whole", "some dropped", "one cut"])
def test_kept_and_dropped_tokens_add_up(mode: Mode, max_tokens: int | None) -> None:
    texts = [f"It is on shelf {rank}. " * (1 + rank % 3) for rank in range(12)]
    hits = [Hit(f"p{rank}", 1.0 - rank / 20, text) for rank, text in enumerate(texts)]
    guard = ContextGuard(
        policy=RatioPolicy(k=7),
        score_kind=ScoreKind.COSINE,
        mode=mode,
        assembly=Assembly(max_tokens=max_tokens, template="{text}"),
        telemetry=Telemetry(CollectorRegistry()),
    )
    context = guard.filter("q", hits)
    tokens = record_of(context, 1.0, 0.0).tokens
    counts = [estimate_tokens(text) for text in texts]
    assert sum(tokens[:3]) == sum(counts)
    assert tokens.today == sum(counts[:DEFAULT_K])
    if mode is Mode.ENFORCE:
        served = [estimate_tokens(passage.text) for passage in context.passages]
        assert tokens.kept == sum(served)
    is_decided = mode is not Mode.OFF
    assert tokens.dropped_by_policy == sum(counts[7 if is_decided else DEFAULT_K :])
    assert bool(tokens.dropped_in_assembly) is (is_decided and max_tokens is not None)


FILTER = Where(tenant="a", groups=["staff", "board"], level=3, is_open=True, none=[])


def test_record_keeps_its_filter() -> None:
    live = Watching(LabelJudge({}))
    live.serve(replace(make_context(POOL, 3), where=FILTER), make_context(POOL, 3, request_id="s"))
    filtered, unfiltered = written(live)
    assert (filtered.where, filtered.where_withheld) == (FILTER, False)
    assert (unfiltered.where, unfiltered.where_withheld) == (None, False)


@pytest.mark.parametrize("secret", ["joe@example.org", "half a pair \ud800", 4111111111111111])
def test_personal_filter_is_withheld(secret: str | int) -> None:
    live = Watching(LabelJudge({}))
    live.serve(replace(make_context(POOL, 3), where=Where(tenant="a", user=["ann", secret])))
    (record,) = written(live)
    assert (record.where, record.where_withheld) == (None, True)
