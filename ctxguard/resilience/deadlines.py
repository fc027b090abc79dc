"""Time limits for each stage of a search and for the search as a whole.

Reads the monotonic clock.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic

from ctxguard._support.checks import check_positive

Budget = Callable[[str], float | None]
"""Returns the maximum seconds that a stage may take if it begins now.

None if neither the stage nor the search has a limit; ≤ 0 if no time is left.
"""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits for an embedded search; None disables a limit.

    A stage with a limit runs on a thread of its own, which adds 20 to 40 µs; a late stage is
    left out of the answer.

    Attributes:
        total_seconds: Limit of the whole search; it bounds every stage too.
        dense_seconds: Includes encoding the query.
        rerank_seconds: Includes reading the passages.

    Raises:
        ConfigurationError: a limit is not a positive, finite number.
    """

    total_seconds: float | None = None
    lexical_seconds: float | None = None
    dense_seconds: float | None = None
    rerank_seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive(**asdict(self))

    def start(self) -> Budget:
        """Begin a search; return a function that gives the time left for each stage."""
        limits: dict[str, float | None] = asdict(self)
        until = None if self.total_seconds is None else monotonic() + self.total_seconds

        def left(stage: str) -> float | None:
            limit = limits[f"{stage}_seconds"]
            if until is None:
                return limit
            return min(until - monotonic(), math.inf if limit is None else limit)

        return left
