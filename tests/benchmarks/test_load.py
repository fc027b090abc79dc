"""The load benchmark: what clients saw is what the guard counted."""

import pytest

from benchmarks._load_bursts import BURSTS, burst

N = 60


@pytest.mark.parametrize("name", BURSTS)
def test_a_burst_is_counted_exactly(name: str) -> None:
    outcome = burst(name, N)
    assert outcome.exact
    assert sum(outcome.burst.load.ends.values()) == N
    assert outcome.counted["received"] == N + 1
