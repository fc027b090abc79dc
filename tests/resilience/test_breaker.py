"""The circuit breaker: when it opens, when a probe is due, and what closes it again."""

from ctxguard.resilience.breaker import FAILURES, MAX_RETRY_SECONDS, REFUSED, RETRY_SECONDS, Breaker
from tests.timing import Clock


def opened() -> Breaker:
    breaker = Breaker("dense")
    for _ in range(FAILURES):
        breaker.failed(None)
    return breaker


def test_opens_after_consecutive_failures(clock: Clock) -> None:
    breaker = Breaker("dense")
    for _ in range(FAILURES - 1):
        breaker.failed(None)
    assert breaker.admit(None) is None
    breaker.failed(None)
    assert breaker.admit(None) is REFUSED


def test_success_restarts_the_count(clock: Clock) -> None:
    breaker = Breaker("dense")
    for _ in range(3 * FAILURES):
        breaker.failed(None)
        breaker.succeeded(None)
    assert breaker.is_closed


def test_due_probe_is_one_call(clock: Clock) -> None:
    breaker = opened()
    clock.now += RETRY_SECONDS + 0.01
    probe = breaker.admit(None)
    assert probe not in (None, REFUSED)
    assert breaker.admit(None) is REFUSED
    breaker.succeeded(probe)
    assert breaker.admit(None) is None


def test_failed_probe_doubles_the_wait(clock: Clock) -> None:
    breaker = opened()
    wait = RETRY_SECONDS
    for _ in range(8):
        clock.now += wait - 0.01
        assert breaker.admit(None) is REFUSED
        clock.now += 0.02
        probe = breaker.admit(None)
        assert probe not in (None, REFUSED)
        breaker.failed(probe)
        wait = min(2.0 * wait, MAX_RETRY_SECONDS)
    clock.now += wait + 0.01
    probe = breaker.admit(None)
    assert probe not in (None, REFUSED)
    breaker.succeeded(probe)
    for _ in range(FAILURES):
        breaker.failed(None)
    clock.now += RETRY_SECONDS + 0.01
    assert breaker.admit(None) not in (None, REFUSED)


def test_late_probe_has_failed(clock: Clock) -> None:
    breaker = opened()
    clock.now += RETRY_SECONDS + 0.01
    late = breaker.admit(0.2)
    assert late not in (None, REFUSED)
    clock.now += 0.3
    assert breaker.admit(0.2) is REFUSED
    breaker.succeeded(late)
    assert not breaker.is_closed
    clock.now += 2.0 * RETRY_SECONDS + 0.01
    assert breaker.admit(0.2) not in (None, REFUSED)


def test_lost_probe_is_not_final(clock: Clock) -> None:
    """Without a limit a lost probe does not keep the stage out for ever."""
    breaker = opened()
    clock.now += RETRY_SECONDS + 0.01
    breaker.admit(None)
    clock.now += MAX_RETRY_SECONDS + 0.01
    assert breaker.admit(None) is REFUSED
    clock.now += MAX_RETRY_SECONDS
    assert breaker.admit(None) not in (None, REFUSED)


def test_earlier_calls_change_nothing(clock: Clock) -> None:
    breaker = opened()
    breaker.succeeded(None)
    breaker.failed(None)
    assert breaker.admit(None) is REFUSED
    clock.now += RETRY_SECONDS + 0.01
    probe = breaker.admit(None)
    assert probe not in (None, REFUSED)
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
    assert told == [("dense", True)]
    for _ in range(2):
        clock.now += MAX_RETRY_SECONDS
        probe = breaker.admit(None)
        assert probe not in (None, REFUSED)
        breaker.failed(probe)
    assert told == [("dense", True)]
    clock.now += MAX_RETRY_SECONDS
    probe = breaker.admit(None)
    assert probe not in (None, REFUSED)
    breaker.succeeded(probe)
    assert told == [("dense", True), ("dense", False)]
