"""Samples that are lost in bursts: the stored ones of an hour stand for the lost ones."""

import time
from itertools import count
from types import SimpleNamespace

import pytest
from contexts import make_context
from storing import NOW, Clock, OpenStore, entry, judged, weights
from watching import Watching

from ctxguard.errors import StoreLockedError
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import HOUR_SECONDS, LostReason
from ctxguard.monitor.store import Batch, SampleStore, writer
from tests.stored import all_judged

HOUR = int(NOW // HOUR_SECONDS)
POOL = [f"p{rank}" for rank in range(4)]


def test_share_is_of_answering_hour(store: SampleStore, clock: Clock) -> None:
    """A share is that of the hour in which requests were answered."""
    store.append("w", Batch([entry(n) for n in range(3)], 3))
    # The store was away for two hours: of the first, two samples waited for it.
    clock.now += 2 * HOUR_SECONDS
    waited = [entry(n, time_seconds=NOW + HOUR_SECONDS) for n in (3, 4)]
    store.append("w", Batch(waited, 1, pending=1, earlier={HOUR + 1: 8}))
    store.finish("judge", [judged(one) for one in store.waiting(9)])
    assert weights(all_judged(store, "judge")) == [1.0] * 3 + [4.0] * 2
    assert (store.accounts().sampled, store.accounts().stored) == (12, 5)


def test_estimate_stands_for_bursts_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every busy, bad hour loses half of its samples: from traffic to /metrics."""
    live = Watching(LabelJudge({"good": {"p0": 1}, "bad": {"p3": 1}}), capacity=20)
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: live.now, **CLOCKS))
    for hour in range(30):
        query, n = ("bad", 40) if hour % 2 else ("good", 20)
        live.watch(
            *[make_context(POOL, 1, query=query, request_id=f"{hour}-{i}") for i in range(n)]
        )
        live.now += HOUR_SECONDS
    lost = live.store.accounts().lost[LostReason.QUEUE_FULL]
    assert lost == 15 * 20
    live.monitor.report()
    labels = {"judge": live.monitor.series, "metric": "precision", "window": "all_retained"}
    assert live.registry.get_sample_value("ctxguard_estimate", labels) == pytest.approx(1 / 3)


CLOCKS = {"monotonic": time.monotonic, "sleep": time.sleep}


def test_counts_never_fall(
    open_store: OpenStore, any_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Watching(LabelJudge({}), store=open_store(any_store_url), capacity=5)
    append, calls = SampleStore.append, count()

    def unreliable(self: SampleStore, *arguments: object, **named: object) -> bool:
        number = next(calls)
        if number % 3 == 1:
            raise StoreLockedError("not stored")
        done = append(self, *arguments, **named)  # type: ignore[arg-type]
        if number % 3 == 2:
            raise StoreLockedError("stored, and the answer was lost")
        return done

    monkeypatch.setattr(SampleStore, "append", unreliable)
    before: dict[LostReason, int] = dict.fromkeys(LostReason, 0)
    sampled = 0
    for number in range(12):
        for each in range(8):
            context = make_context(POOL, 1, request_id=f"{number}-{each}")
            live.sampler.offer(context, 1.0, live.now)
        live.writer.flush(0.0)
        found = live.store.accounts()
        assert all(found.lost[reason] >= n for reason, n in before.items())
        assert found.sampled >= sampled
        before, sampled = dict(found.lost), found.sampled
    monkeypatch.undo()
    live.writer.flush()
    live.writer.stop()
    found = live.store.accounts()
    assert found.sampled == 12 * 8 == found.stored + sum(found.lost.values())
