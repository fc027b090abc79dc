"""Describes failed calls to endpoints: a closed set of reasons, with causes and fixes in words.

The words hold neither the key nor the endpoint's messages, which may quote passages. Pure.
"""

import errno
import socket
import ssl
from dataclasses import dataclass
from enum import StrEnum

from ctxguard.core.types import FailureKind
from ctxguard.errors import OverloadedError, StageError, StageRefusedError, StageUnavailableError
from ctxguard.resilience.stage import UnansweredError

BAD_REQUEST, NOT_FOUND, TOO_LARGE, UNPROCESSABLE, TOO_MANY_REQUESTS = 400, 404, 413, 422, 429
SERVER_ERROR = 500
_REPEATED = (408, 409, 424, 425, TOO_MANY_REQUESTS)
"""Statuses, besides server errors, after which another attempt may succeed."""


class InvalidReason(StrEnum):
    """The reason why a model gave no valid answer. A closed set: it labels a metric."""

    REFUSED = "refused"
    """The model or a content filter declined to answer."""
    TRUNCATED = "truncated"
    """The reply was cut off at the token limit."""
    TOO_LONG = "too_long"
    """The endpoint's answer has more bytes than any valid one, and was not read."""
    EMPTY = "empty"
    """The reply has no choice, or a choice without text."""
    MALFORMED = "malformed"
    """The text is not JSON but, for instance, prose, another language or half an object."""
    OFF_SCHEMA = "off_schema"
    """The JSON is not the requested object."""
    OUT_OF_RANGE = "out_of_range"
    """A number is outside the requested range."""
    NOT_FINITE = "not_finite"
    """The score of a judge that scores is NaN or infinite."""
    REJECTED = "rejected"
    """The endpoint refused this request: it is too long, filtered, or has an unknown option."""
    DENIED = "denied"
    """The endpoint refused the key, does not know the model, or has moved (a redirect)."""
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
"""Reasons that do not depend on the request: the model was unreachable, or refused everything."""


@dataclass(eq=False)
class CallError(Exception):
    """A call of an endpoint failed; only this folder catches it.

    Attributes:
        words: The cause and how to fix it.
        status: The status of the answer, or the one that its error names; None without either.
        said: The endpoint's own message, cut; it may quote the request.
        named: The fields of the request that it blames, in its own spelling, and its code.
        is_final: Whether not to retry at once, regardless of the status, because the endpoint
            answered and may charge for the call.
        wait_seconds: The time that the endpoint asks to wait; None if it does not say.
    """

    reason: InvalidReason
    words: str
    status: int | None = None
    said: str = ""
    named: str = ""
    is_final: bool = False
    wait_seconds: float | None = None

    def __str__(self) -> str:
        return self.words

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed."""
        if self.is_final:
            return False
        if self.status is not None:
            return self.status in _REPEATED or self.status >= SERVER_ERROR
        return self.reason in (InvalidReason.TIMED_OUT, InvalidReason.UNREACHABLE)


def stage_error(stage: str, reason: InvalidReason, words: str) -> StageError:
    """Build the stage error for the request path, without the endpoint's own message."""
    if reason is InvalidReason.TIMED_OUT:
        return UnansweredError(stage, FailureKind.TIMEOUT, words)
    if reason is InvalidReason.RATE_LIMITED:
        return OverloadedError(stage, words)
    if reason is InvalidReason.REJECTED:
        return StageRefusedError(stage, words)
    return (StageUnavailableError if reason in UNAVAILABLE else StageError)(stage, words)


_DENIED = (401, 402, 403, NOT_FOUND, 405, 407)
_CAUSES = {
    400: "it refuses the request: check the model's name and the protocol",
    401: "it does not accept the key",
    402: "it requires payment: check the account's balance",
    403: "it does not accept the key, at least for this model",
    404: "it does not know that path: check the model's name and the URL, which ends in /v1 on "
    "most servers",
    405: "it accepts no such requests at that path: check the URL's path",
    407: "the proxy wants a user name and password: write them into its URL",
    413: "the request is too large for it: send fewer or shorter texts, or raise the server's "
    "limit (TEI: --max-client-batch-size, --payload-limit)",
    422: "it refuses the request: check the model's name, the protocol, and how many documents it "
    "takes at once (TEI: --max-client-batch-size)",
    429: "its rate limit is reached, or the quota: call less often, or check the account",
}


def status_error(
    at: str, status: int, said: str = "", named: str = "", model: str | None = None
) -> CallError:
    """Describe an error answered by the host ``at``; for the other arguments see `CallError`."""
    reason = InvalidReason.REJECTED
    cause = _CAUSES.get(status, "it failed; its own log should say why")
    if status < 300:
        reason, cause = InvalidReason.SERVER_ERROR, "an answer without content"
    elif status < BAD_REQUEST:
        reason = InvalidReason.DENIED
        cause = "a redirect, which is not followed: give the URL that it leads to"
    elif status == TOO_MANY_REQUESTS:
        reason = InvalidReason.RATE_LIMITED
    elif status >= SERVER_ERROR or status in _REPEATED:
        reason = InvalidReason.SERVER_ERROR
    elif status in _DENIED:
        reason = InvalidReason.DENIED
    if status == NOT_FOUND and model is not None and "model" in f"{said} {named}".lower():
        cause = f"it does not know the model {model!r}: check its name"
    return CallError(reason, f"{at} answered {status}: {cause}", status, said, named)


def connection_error(error: BaseException, at: str) -> CallError:
    """Describe why a connection to a host or proxy failed or broke."""
    return CallError(InvalidReason.UNREACHABLE, f"{at} {_cause(error)}")


def _cause(error: BaseException) -> str:
    for number, words in _OF_NUMBER.items():
        # Where several addresses were tried, only the message names the numbers.
        if getattr(error, "errno", None) == number or f"[Errno {number}]" in str(error):
            return words
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"has a certificate that is not trusted ({error.verify_message}): add its authority "
            "to the system's certificates, or name its file in SSL_CERT_FILE"
        )
    return next((words for kind, words in _OF_TYPE if isinstance(error, kind)), str(error))


_NO_ROUTE = "cannot be reached, since no route leads there: check the network"
_OF_NUMBER = {
    errno.ECONNREFUSED: "refuses connections: check that the server runs, and the URL's port",
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EHOSTUNREACH: _NO_ROUTE,
}
_OF_TYPE: tuple[tuple[type[Exception], str], ...] = (
    (
        socket.gaierror,
        "cannot be found, since no address is known for it (DNS): check the URL, and the network",
    ),
    (ssl.SSLError, "does not speak TLS there: try http:// instead of https://, or another port"),
    (ConnectionError, "closed the connection before its answer was complete"),
    (OSError, "cannot be reached: check the URL, and the network"),
)
