"""Samples and labels for a store, by the number of their request, and a clock that tests set."""

from collections.abc import Callable

import sqlalchemy as sa

from ctxguard.monitor.store import (
    Entry,
    Finished,
    LabelRow,
    SampleStore,
    State,
    WorkerCounts,
    schema,
)

OpenStore = Callable[..., SampleStore]
DAY = 86_400.0
NOW = 1.8e9


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def entry(
    n: int,
    *,
    request_id: str | None = None,
    time_seconds: float = NOW,
    probability: float = 0.5,
    label_order: float = 0.5,
    payload: bytes = b"payload",
) -> Entry:
    return Entry(
        request_id=request_id or f"r{n}",
        time_seconds=time_seconds,
        probability=probability,
        label_order=label_order,
        payload=payload,
    )


def fill(store: SampleStore, n: int, **columns: object) -> list[int]:
    """Store n samples; their ids, oldest first."""
    entries = [entry(i, **columns) for i in range(n)]  # type: ignore[arg-type]
    store.append("w", entries, WorkerCounts(n))
    return store.find([one.request_id for one in entries])[-n:]


def judged(sample_id: int, *, block: bytes = b"block") -> Finished:
    return Finished(
        sample_id,
        State.JUDGED,
        '{"p": 1}',
        block,
        rejected=(("p", "why", "raw"),),
    )


def judge_all(store: SampleStore, series: str = "judge") -> list[int]:
    waiting = list(store.waiting(1_000))
    store.finish(series, [judged(one) for one in waiting])
    return waiting


def label(
    n: int, grade: int = 1, *, annotator: str = "ann", time_seconds: float = NOW, passage: str = "p"
) -> LabelRow:
    return LabelRow(f"r{n}", passage, grade, None, annotator, time_seconds)


def replace_payload(store: SampleStore, sample_id: int, payload: bytes) -> None:
    """Damage a sample, or its record."""
    table = schema.payloads
    with store.transaction(writes=True) as connection:
        connection.execute(
            sa.update(table).where(table.c.sample_id == sample_id).values(payload=payload)
        )
