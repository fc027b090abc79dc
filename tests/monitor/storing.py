"""Samples and labels for a store, by the number of their request, and a clock that tests set."""

from collections.abc import Callable

import sqlalchemy as sa
from judged_rows import Judged, rows_of

from ctxguard.measure.rows import Rows
from ctxguard.monitor.sampling.record import Judgment, SampleRecord
from ctxguard.monitor.store import Batch, Finished, LabelRow, SampleStore, State, schema
from tests.stored import written

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
    n: int, *, request_id: str = "", payload: bytes | None = None, **fields: object
) -> tuple[SampleRecord, bytes]:
    fields = {"time_seconds": NOW, "probability": 0.5, "label_order": 0.5, **fields}
    return written(request_id or f"r{n}", payload=payload, **fields)


def fill(store: SampleStore, n: int, **columns: object) -> list[int]:
    """Store n samples; their ids, oldest first."""
    entries = [entry(i, **columns) for i in range(n)]  # type: ignore[arg-type]
    store.append("w", Batch(entries, n))
    return store.find([one.request_id for one, _ in entries])[-n:]


GRADES = {"p": Judgment("p", 1)}


def judged(sample_id: int, *, weight: float = 1.0) -> Finished:
    """Finish a sample; its weight tells its rows from others'."""
    rows = rows_of([Judged((1,), weight=weight)])
    replies = (("p", "why", "raw"),)
    return Finished(sample_id, State.JUDGED, GRADES, rows, rejected=replies)


def graded(sample_id: int, newest: int, *, weight: float) -> Rows:
    """Rows with people's grades."""
    rows = rows_of([Judged((1,), weight=weight)])
    own = {"sample_id": sample_id, "time_seconds": NOW, "last_label": newest, "is_graded": True}
    for name, value in own.items():
        rows.requests[name] = value
    return rows


def weights(rows: Rows) -> list[float]:
    """What each request weighs, and its hour's lost ones with it."""
    return [1.0 / one for one in rows.requests["probability"].tolist()]


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
