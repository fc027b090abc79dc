"""How long each stage of a search may take, and the search as a whole."""

import math
from dataclasses import dataclass, fields
from time import monotonic

from ctxguard.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits on an embedded search; without one a stage takes as long as it takes.

    A stage with a limit runs on a thread of its own pool, which costs a hand-over of some 20 to
    40 µs; one that is late is left out of the answer.

    Attributes:
        total_seconds: For the whole search; it bounds every stage too.
        lexical_seconds: For the lexical leg.
        dense_seconds: For the dense leg, encoding the query included.
        rerank_seconds: For the reranker, reading the passages included.

    Raises:
        ConfigurationError: a limit that is not a positive, finite number.
    """

    total_seconds: float | None = None
    lexical_seconds: float | None = None
    dense_seconds: float | None = None
    rerank_seconds: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            check_seconds(each.name, getattr(self, each.name))

    def start(self) -> "Budget":
        """The time of one search, which begins now."""
        return Budget(self)


class Budget:
    """What is left of one search's time.

    Each property is the most that a stage which begins now may take: None where neither the
    stage nor the search has a limit, and ≤ 0 where no time is left.
    """

    __slots__ = ("_deadlines", "_until")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        total = deadlines.total_seconds
        self._until = None if total is None else monotonic() + total

    @property
    def lexical_seconds(self) -> float | None:
        """For the lexical leg."""
        return self._seconds(self._deadlines.lexical_seconds)

    @property
    def dense_seconds(self) -> float | None:
        """For the dense leg."""
        return self._seconds(self._deadlines.dense_seconds)

    @property
    def rerank_seconds(self) -> float | None:
        """For the reranker."""
        return self._seconds(self._deadlines.rerank_seconds)

    def _seconds(self, stage_seconds: float | None) -> float | None:
        if self._until is None:
            return stage_seconds
        left = self._until - monotonic()
        return left if stage_seconds is None else min(stage_seconds, left)


def check_seconds(name: str, seconds: float | None) -> None:
    """Refuse what is no duration.

    Raises:
        ConfigurationError: not a positive, finite number; None is no limit.
    """
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name} {seconds!r} must be a positive number of seconds, or None for no limit"
        )
