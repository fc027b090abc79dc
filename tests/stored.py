"""Samples for a store, and what tests look up in it."""

from dataclasses import replace

import numpy as np

from ctxguard.core.types import Mode, Passage, Route, ScoreKind
from ctxguard.measure.rows import Rows
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import DEFAULT_RATES
from ctxguard.monitor.store import SampleStore

_RECORD = SampleRecord(
    request_id="r",
    time_seconds=0.0,
    probability=1.0,
    label_order=0.0,
    session_id=None,
    route=Route.EXTERNAL,
    mode=Mode.ENFORCE,
    query="q",
    passage_ids=("p",),
    scores=np.ones(1, np.float32),
    kind=ScoreKind.RATIO,
    legs={},
    served=(0,),
    dropped=(),
    kept=1,
    sampled=(),
    full_pool=False,
    full_pool_if_no_hit=True,
    baseline=False,
    rates=DEFAULT_RATES,
    passages={0: Passage("p", "text")},
)


def written(
    request_id: str = "r", *, payload: bytes | None = None, **fields: object
) -> tuple[SampleRecord, bytes]:
    """Make a sample that served one passage, as a writer hands it to the store."""
    record = replace(_RECORD, request_id=request_id, **fields)  # type: ignore[arg-type]
    return record, record.to_bytes() if payload is None else payload


def request_of(store: SampleStore, sample_id: int) -> str:
    """Return the request of a sample, one of the newest thousand."""
    [found] = [one for one in store.newest_samples(1_000) if one.sample_id == sample_id]
    return found.request_id


def all_judged(store: SampleStore, series: str, **only: object) -> Rows:
    """Return the judged requests of a series as one page."""
    return Rows.joined(list(store.judged_pages(series, **only)))


def samples_in(rows: Rows) -> list[int]:
    return rows.requests["sample_id"].tolist()
