"""What a forked child resets, and in which order."""

import pytest

from ctxguard._support import fork_safety


class Thing:
    """Notes what happens to it."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def _reset_after_fork(self) -> None:
        self.noted.append("reset")


class Writer(Thing):
    """Starts a thread, which may use any other thing."""

    def _resume_after_fork(self) -> None:
        self.noted.append("resumed")


def test_nothing_is_resumed_before_everything_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that began before its store was reset waited for its parent's transactions."""
    noted: list[str] = []
    monkeypatch.setattr(fork_safety, "_registered", [Writer(noted), Thing(noted), Thing(noted)])
    fork_safety._reset_all()
    assert noted == ["reset", "reset", "reset", "resumed"]
