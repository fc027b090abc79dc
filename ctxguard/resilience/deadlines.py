"""Time limits for each stage of a search and for the search as a whole."""

import math
from dataclasses import asdict, dataclass
from time import monotonic

from ctxguard.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits for an embedded search; None disables a limit.

    A stage with a limit runs on a thread of its own pool, which adds 20 to 40 µs; a late stage is
    left out of the answer.

    Attributes:
        total_seconds: Limit of the whole search; it bounds every stage too.
        lexical_seconds: Limit of the lexical leg.
        dense_seconds: Limit of the dense leg, including encoding the query.
        rerank_seconds: Limit of the reranker, including reading the passages.

    Raises:
        ConfigurationError: a limit is not a positive, finite number.
    """

    total_seconds: float | None = None
    lexical_seconds: float | None = None
    dense_seconds: float | None = None
    rerank_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in asdict(self).items():
            check_seconds(name, seconds)


class Budget:
    """The time that one search, which begins now, has left."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._limits = asdict(deadlines)
        total_seconds = deadlines.total_seconds
        self._until = None if total_seconds is None else monotonic() + total_seconds

    def limits_any(self, *stages: str) -> bool:
        """Tell whether any of these stages has a time limit, its own or the search's."""
        return self._until is not None or any(
            self._limits[f"{stage}_seconds"] is not None for stage in stages
        )

    def left(self, stage: str) -> float | None:
        """Return the maximum seconds that a stage may take if it begins now.

        Returns:
            None if neither the stage nor the search has a limit; ≤ 0 if no time is left.
        """
        limit: float | None = self._limits[f"{stage}_seconds"]
        if self._until is None:
            return limit
        left = self._until - monotonic()
        return left if limit is None else min(limit, left)


def check_seconds(name: str, seconds: float | None) -> None:
    """Refuse a time limit that is not a duration.

    Raises:
        ConfigurationError: not a positive, finite number; None disables the limit.
    """
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name} {seconds!r} must be a positive number of seconds, or None for no limit"
        )
