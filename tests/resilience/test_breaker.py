"""The circuit breaker: when a probe is due, and what closes it; see also the tests of a stage."""

from ctxguard.resilience.breaker import (
    FAILURES,
    MAX_RETRY_SECONDS,
    REFUSED,
    RETRY_SECONDS,
    Breaker,
    Probe,
)
from tests.timing import Clock


def opened() -> Breaker:
    breaker = Breaker("dense")
    for _ in range(FAILURES):
        assert breaker.admit(None) is None
        breaker.failed(None)
    assert breaker.admit(None) is REFUSED
    return breaker


def probe_of(breaker: Breaker, seconds: float | None = None) -> Probe:
    """The probe that is due."""
    probe = breaker.admit(seconds)
    assert probe is not None
    assert probe is not REFUSED
    return probe


def test_failed_probe_doubles_the_wait(clock: Clock) -> None:
    breaker = opened()
    wait = RETRY_SECONDS
    for _ in range(8):
        clock.now += wait - 0.01
        assert breaker.admit(None) is REFUSED
        clock.now += 0.02
        breaker.failed(probe_of(breaker))
        wait = min(2.0 * wait, MAX_RETRY_SECONDS)
    clock.now += wait + 0.01
    breaker.succeeded(probe_of(breaker))
    for _ in range(FAILURES):
        breaker.failed(None)
    clock.now += RETRY_SECONDS + 0.01
    probe_of(breaker)


def test_late_probe_has_failed(clock: Clock) -> None:
    breaker = opened()
    clock.now += RETRY_SECONDS + 0.01
    late = probe_of(breaker, 0.2)
    clock.now += 0.3
    assert breaker.admit(0.2) is REFUSED
    breaker.succeeded(late)
    assert not breaker.is_closed
    clock.now += 2.0 * RETRY_SECONDS + 0.01
    probe_of(breaker, 0.2)


def test_lost_probe_is_not_final(clock: Clock) -> None:
    """Without a limit a lost probe does not keep the stage out for ever."""
    breaker = opened()
    clock.now += RETRY_SECONDS + 0.01
    probe_of(breaker)
    clock.now += MAX_RETRY_SECONDS + 0.01
    assert breaker.admit(None) is REFUSED
    clock.now += MAX_RETRY_SECONDS
    probe_of(breaker)


def test_earlier_calls_change_nothing(clock: Clock) -> None:
    breaker = opened()
    breaker.succeeded(None)
    breaker.failed(None)
    assert breaker.admit(None) is REFUSED
    clock.now += RETRY_SECONDS + 0.01
    probe = probe_of(breaker)
    breaker.failed(None)
    breaker.succeeded(None)
    assert not breaker.is_closed
    breaker.succeeded(probe)
    assert breaker.is_closed


def test_watchers_are_told_once_each(clock: Clock) -> None:
    """Watchers are told once when it opens and once when it is closed again."""
    told: list[tuple[str, bool]] = []
    breaker = Breaker("dense")

    def watcher(stage: str, is_open: bool) -> None:
        told.append((stage, is_open))
        raise RuntimeError("a watcher must not matter")

    breaker.watch(watcher)
    breaker.watch(watcher)
    for _ in range(FAILURES):
        breaker.failed(None)
    for _ in range(2):
        clock.now += MAX_RETRY_SECONDS
        breaker.failed(probe_of(breaker))
    assert told == [("dense", True)]
    clock.now += MAX_RETRY_SECONDS
    breaker.succeeded(probe_of(breaker))
    assert told == [("dense", True), ("dense", False)]
