"""Waiting for what threads and processes do, and the durations of tests with late calls."""

import time
from collections.abc import Callable

SOON = 0.05
"""Seconds after which a call that hangs is late."""

NEVER = 600.0
"""Seconds that no call in a test takes."""

PATIENCE_SECONDS = 300.0
"""Ends a test that hangs. Nothing is timed by it: no machine is so busy."""


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until a condition holds; fails the test where it never does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.005)


class Clock:
    """The circuit breakers' monotonic clock, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
