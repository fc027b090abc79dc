"""What tests look up in a store of samples."""

from ctxguard.monitor.store import SampleStore


def request_of(store: SampleStore, sample_id: int) -> str:
    """Return the request of a sample, one of the newest thousand."""
    [found] = [one for one in store.newest_samples(1_000) if one.sample_id == sample_id]
    return found.request_id
