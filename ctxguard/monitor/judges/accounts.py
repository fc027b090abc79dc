"""What judging came to: calls, verdicts, what was invalid and why, tokens and their cost."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ctxguard.forks import start_afresh_in_children

_KEPT_REPLIES = 100
_UNTAKEN_REPLIES = 1000
_KEPT_CHARS = 4000


class InvalidReason(StrEnum):
    """Why a passage got no verdict. A closed set: it labels a metric."""

    REFUSED = "refused"
    """The model declined to answer, or a content filter did it for the model."""
    TRUNCATED = "truncated"
    """The reply was cut at the limit of tokens."""
    EMPTY = "empty"
    """A reply without a choice, or a choice without text."""
    MALFORMED = "malformed"
    """Text that is not JSON: prose, another language, half an object."""
    OFF_SCHEMA = "off_schema"
    """JSON that is not one object with one integer grade."""
    OUT_OF_RANGE = "out_of_range"
    """An integer that is no grade of this judge."""
    NOT_FINITE = "not_finite"
    """A score that is NaN or infinite, for judges that score."""
    REJECTED = "rejected"
    """The endpoint refused this request: too long, filtered, or an option it does not know."""
    DENIED = "denied"
    """The endpoint refused the key, or does not know the model."""
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
"""The reasons that say nothing of the passage, after every retry: the judge was not there."""


@dataclass(frozen=True, slots=True)
class JudgeAccounts:
    """What a judge has done so far, at one moment and consistent in itself.

    Every passage that it was asked about ends as a verdict or as invalid for one reason.

    Attributes:
        calls: Requests sent to the model, retries included.
        retries: Those among them that repeat a failed one.
        verdicts: Passages with a valid verdict.
        invalid: Passages without one, by reason.
        cut_passages: Passages that were longer than the judge reads, and were cut.
        input_tokens: As the endpoint counted them.
        output_tokens: As the endpoint counted them.
        unmetered: Replies that did not say their tokens; tokens and cost are then too low.
        cost: Of those tokens, in the currency of the prices; None where no prices were given.
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

    @property
    def asked(self) -> int:
        """Passages that were asked about, each counted when its asking ended."""
        return self.verdicts + sum(self.invalid.values())


@dataclass(frozen=True, slots=True)
class RejectedReply:
    """A reply that gave no verdict, as it came, for a person to look at.

    Attributes:
        reply: Its first 4,000 characters. It may quote the passage: kept in memory only.
    """

    passage_id: str
    reason: InvalidReason
    reply: str


class Ledger:
    """Counts, under one lock. A forked child starts at zero."""

    def __init__(self) -> None:
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget every count, and the replies kept."""
        self._lock = threading.Lock()
        self._calls = self._retries = self._verdicts = self._cut = 0
        self._input_tokens = self._output_tokens = self._unmetered = 0
        self._invalid = dict.fromkeys(InvalidReason, 0)
        self._rejected: deque[RejectedReply] = deque(maxlen=_KEPT_REPLIES)
        self._untaken: deque[RejectedReply] = deque(maxlen=_UNTAKEN_REPLIES)

    def called(self, *, again: bool = False) -> None:
        """A request was sent; ``again`` for a retry."""
        with self._lock:
            self._calls += 1
            self._retries += again

    def cut(self) -> None:
        """A passage was longer than the judge reads."""
        with self._lock:
            self._cut += 1

    def used(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """A reply came; None where it does not say its tokens."""
        with self._lock:
            self._input_tokens += input_tokens or 0
            self._output_tokens += output_tokens or 0
            self._unmetered += input_tokens is None or output_tokens is None

    def valid(self) -> None:
        """A passage got its verdict."""
        with self._lock:
            self._verdicts += 1

    def invalid(self, passage_id: str, reason: InvalidReason, reply: str) -> None:
        """A passage got none."""
        with self._lock:
            self._invalid[reason] += 1
            rejected = RejectedReply(passage_id, reason, reply[:_KEPT_CHARS])
            self._rejected.append(rejected)
            self._untaken.append(rejected)

    def rejected(self) -> tuple[RejectedReply, ...]:
        """The last hundred replies that gave no verdict, oldest first."""
        with self._lock:
            return tuple(self._rejected)

    def take_rejected(self) -> tuple[RejectedReply, ...]:
        """Those since this was last asked, oldest first; of very many, the last thousand."""
        with self._lock:
            taken = tuple(self._untaken)
            self._untaken.clear()
        return taken

    def snapshot(self, prices_per_million: tuple[float, float] | None = None) -> JudgeAccounts:
        """The counts now, and their cost at the prices of input and output tokens."""
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
