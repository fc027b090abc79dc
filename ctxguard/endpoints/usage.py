"""Counts a model's calls: invalid replies by reason, tokens, cost.

Calls the given redactor; threads share the counts, and a forked child begins at zero.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.endpoints.failures import InvalidReason
from ctxguard.errors import ConfigurationError, RedactionError

_MAX_REPLIES = 1000
_MAX_CHARS = 4000


@dataclass(frozen=True, slots=True)
class JudgeAccounts:
    """A model's counts at one moment, consistent with each other.

    Attributes:
        calls: Requests sent to the model, retries included.
        retries: Requests that repeated a failed one.
        invalid: Passages without a valid grade, or questions without a valid answer, by reason.
        input_tokens, output_tokens: As far as the endpoint reported them.
        cost: Cost of the reported tokens, in the currency of the prices; None without prices.
    """

    calls: int
    retries: int
    invalid: Mapping[InvalidReason, int]
    input_tokens: int
    output_tokens: int
    cost: float | None


_COUNTED = tuple(each.name for each in fields(JudgeAccounts) if each.type is int)


Rejected = tuple[str, InvalidReason, str]
"""The passage or question whose reply has no valid grade, the reason, and the reply's redacted
start."""


class Ledger:
    """A model's counts and rejected replies, under one lock. A forked child starts at zero.

    Args:
        prices: Prices of a million input and output tokens; None counts no cost.
        redact: Redacts the replies that are kept; None keeps their reasons alone.

    Raises:
        ConfigurationError: a price is negative or not finite.
    """

    def __init__(
        self,
        prices: tuple[float, float] | None = None,
        *,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        for price in prices or ():
            if not 0.0 <= price < math.inf:
                raise ConfigurationError(f"token price {price!r} must be finite and at least 0")
        self._prices = prices
        self._redact = redact
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._invalid = dict.fromkeys(InvalidReason, 0)
        self._rejected: deque[Rejected] = deque(maxlen=_MAX_REPLIES)

    def add(self, **counts: int) -> None:
        """Add to the counts, given by their names in ``JudgeAccounts``."""
        with self._lock:
            for name, n in counts.items():
                self._counts[name] += n

    def add_invalid(self, passage_id: str, reason: InvalidReason, reply: str) -> None:
        """Count a passage without a valid grade, and keep the redacted beginning of the reply."""
        kept = passage_id, reason, self.redacted(reply[:_MAX_CHARS])
        with self._lock:
            self._invalid[reason] += 1
            self._rejected.append(kept)

    def rejected(self) -> tuple[Rejected, ...]:
        """Return the replies without a grade that were not taken yet, at most the last 1,000.

        They may quote passages.
        """
        with self._lock:
            return tuple(self._rejected)

    def take_rejected(self) -> tuple[Rejected, ...]:
        """Return the rejected replies and forget them."""
        with self._lock:
            taken = tuple(self._rejected)
            self._rejected.clear()
        return taken

    def accounts(self) -> JudgeAccounts:
        """Return the counts now."""
        with self._lock:
            counts, invalid = dict(self._counts), dict(self._invalid)
        cost = None
        if self._prices is not None:
            of_input, of_output = self._prices
            cost = (counts["input_tokens"] * of_input + counts["output_tokens"] * of_output) / 1e6
        return JudgeAccounts(**counts, invalid=invalid, cost=cost)

    def redacted(self, reply: str) -> str:
        """Redact an endpoint's text; return "" if that fails or there is no redactor."""
        try:
            return "" if self._redact is None else self._redact(reply)
        except RedactionError:
            return ""
