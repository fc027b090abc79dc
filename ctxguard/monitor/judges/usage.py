"""A judge's counts: calls, verdicts, invalid ones by reason, tokens and their cost."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import RedactionError
from ctxguard.monitor.redaction import redact

_MAX_REPLIES = 1000
_MAX_CHARS = 4000


class InvalidReason(StrEnum):
    """The reason why a passage has no valid verdict. A closed set: it labels a metric."""

    REFUSED = "refused"
    """The model or a content filter declined to answer."""
    TRUNCATED = "truncated"
    """The reply was cut at the limit of tokens."""
    TOO_LONG = "too_long"
    """The endpoint's answer has more bytes than any verdict needs, and was not read."""
    EMPTY = "empty"
    """A reply without a choice, or a choice without text."""
    MALFORMED = "malformed"
    """Text that is not JSON: prose, another language, half an object."""
    OFF_SCHEMA = "off_schema"
    """JSON that is not one object with one integer grade."""
    OUT_OF_RANGE = "out_of_range"
    """An integer outside the judge's grades."""
    NOT_FINITE = "not_finite"
    """A NaN or infinite score, from a judge that scores."""
    REJECTED = "rejected"
    """The endpoint refused this request: too long, filtered, or an unknown option."""
    DENIED = "denied"
    """The endpoint refused the key, does not know the model, or is elsewhere (a redirect)."""
    RATE_LIMITED = "rate_limited"
    TIMED_OUT = "timed_out"
    SERVER_ERROR = "server_error"
    UNREACHABLE = "unreachable"


UNAVAILABLE = frozenset(
    {
        InvalidReason.DENIED,
        InvalidReason.RATE_LIMITED,
        InvalidReason.TIMED_OUT,
        InvalidReason.SERVER_ERROR,
        InvalidReason.UNREACHABLE,
    }
)
"""Reasons that do not depend on the passage: the judge was unreachable, or refused all."""


@dataclass(frozen=True, slots=True)
class JudgeAccounts:
    """A judge's counts at one moment, consistent with each other.

    Every submitted passage is counted once: as a verdict, or as invalid for one reason.

    Attributes:
        calls: Requests sent to the model, retries included.
        retries: Requests that repeated a failed one.
        verdicts: Passages with a valid verdict.
        invalid: Passages without a valid verdict, by reason.
        cut_passages: Passages truncated because they were longer than the judge reads.
        input_tokens: Prompt tokens, as the endpoint reported them.
        output_tokens: Reply tokens, as the endpoint reported them.
        unmetered: Replies that did not report tokens; tokens and cost are then too low.
        cost: Cost of the reported tokens, in the currency of the prices; None without prices.
    """

    calls: int
    retries: int
    verdicts: int
    invalid: Mapping[InvalidReason, int]
    cut_passages: int
    input_tokens: int
    output_tokens: int
    unmetered: int
    cost: float | None


@dataclass(frozen=True, slots=True)
class RejectedReply:
    """A reply that gave no valid verdict, for inspection.

    Attributes:
        passage_id: The passage to be graded.
        reason: Why the reply is no verdict.
        reply: Its first 4,000 characters, redacted; empty if redaction failed. It may quote the
            passage.
    """

    passage_id: str
    reason: InvalidReason
    reply: str


class Ledger:
    """A judge's counts and rejected replies, under one lock. A forked child starts at zero."""

    def __init__(self) -> None:
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Reset every count, and drop the replies kept."""
        self._lock = threading.Lock()
        self._calls = self._retries = self._verdicts = self._cut = 0
        self._input_tokens = self._output_tokens = self._unmetered = 0
        self._invalid = dict.fromkeys(InvalidReason, 0)
        self._rejected: deque[RejectedReply] = deque(maxlen=_MAX_REPLIES)

    def called(self, *, again: bool = False) -> None:
        """Count a request that was sent; ``again`` for a retry."""
        with self._lock:
            self._calls += 1
            self._retries += again

    def cut(self) -> None:
        """Count a passage that was truncated."""
        with self._lock:
            self._cut += 1

    def used(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the tokens of a reply; None if it does not report them."""
        with self._lock:
            self._input_tokens += input_tokens or 0
            self._output_tokens += output_tokens or 0
            self._unmetered += input_tokens is None or output_tokens is None

    def valid(self) -> None:
        """Count a valid verdict."""
        with self._lock:
            self._verdicts += 1

    def invalid(self, passage_id: str, reason: InvalidReason, reply: str) -> None:
        """Count a passage without a valid verdict, and keep the reply's beginning, redacted."""
        kept = RejectedReply(passage_id, reason, _redacted(reply[:_MAX_CHARS]))
        with self._lock:
            self._invalid[reason] += 1
            self._rejected.append(kept)

    def rejected(self) -> tuple[RejectedReply, ...]:
        """Return the replies that gave no verdict and were not taken, the last 1,000 at most."""
        with self._lock:
            return tuple(self._rejected)

    def take_rejected(self) -> tuple[RejectedReply, ...]:
        """Return the rejected replies and forget them."""
        with self._lock:
            taken = tuple(self._rejected)
            self._rejected.clear()
        return taken

    def snapshot(self, prices_per_million: tuple[float, float] | None = None) -> JudgeAccounts:
        """Return the counts now, with the cost at these prices of input and output tokens."""
        with self._lock:
            cost = None
            if prices_per_million is not None:
                of_input, of_output = prices_per_million
                cost = (self._input_tokens * of_input + self._output_tokens * of_output) / 1e6
            return JudgeAccounts(
                calls=self._calls,
                retries=self._retries,
                verdicts=self._verdicts,
                invalid=dict(self._invalid),
                cut_passages=self._cut,
                input_tokens=self._input_tokens,
                output_tokens=self._output_tokens,
                unmetered=self._unmetered,
                cost=cost,
            )


def _redacted(reply: str) -> str:
    try:
        return redact(reply)
    except RedactionError:
        return ""
