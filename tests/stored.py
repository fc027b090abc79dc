"""What tests look up in a store of samples."""

import numpy as np

from ctxguard.monitor.store import JudgedRows, SampleStore


def request_of(store: SampleStore, sample_id: int) -> str:
    """Return the request of a sample, one of the newest thousand."""
    [found] = [one for one in store.newest_samples(1_000) if one.sample_id == sample_id]
    return found.request_id


def all_judged(store: SampleStore, series: str, **window: float) -> JudgedRows:
    """Return the judged requests of a series as one page."""
    pages = [
        JudgedRows(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), ()),
        *store.judged_pages(series, **window),
    ]
    ids, times, picks = (
        np.concatenate([getattr(page, name) for page in pages])
        for name in ("sample_ids", "time_seconds", "first_pick")
    )
    return JudgedRows(ids, times, picks, tuple([one for page in pages for one in page.blocks]))
