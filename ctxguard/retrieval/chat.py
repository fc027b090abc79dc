"""Client of any endpoint with the chat completions protocol, for structured output.

The client library's raw replies are read by ``read_reply``: untrusted, and strictly.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import ConfigurationError
from ctxguard.resilience.pool import DaemonPool
from ctxguard.retrieval.answer_head import AnswerHead
from ctxguard.retrieval.usage import InvalidReason, Ledger

T = TypeVar("T")
U = TypeVar("U")

Conversation = list[dict[str, str]]

TEMPERATURE = 0.0

_REDIRECTS = range(300, 400)
_DENIED = (*_REDIRECTS, 401, 403, 404)
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_MAX_ANSWER_BYTES = 2**20
"""The longest answers, those about a hundred passages, take some thousand bytes."""
_SHORTEST_KEY = 8
"""Shorter keys are placeholders, such as ``none``, and ordinary words."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """The prices of a million tokens, in any one currency.

    Attributes:
        input_per_million: Price of the prompt's tokens, ≥ 0.
        output_per_million: Price of the reply's tokens, ≥ 0.

    Raises:
        ConfigurationError: at construction, for a price that is negative or not finite.
    """

    input_per_million: float
    output_per_million: float

    def __post_init__(self) -> None:
        for price in astuple(self):
            if not 0.0 <= price < math.inf:
                raise ConfigurationError(f"token price {price!r} must be finite and at least 0")


class Pacer:
    """Spaces calls evenly, over all threads.

    Args:
        per_second: Maximum rate of calls, > 0; None disables it.
        clock: Monotonic seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval_seconds = 0.0 if per_second is None else 1.0 / per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def wait(self) -> None:
        """Wait until the next call may be sent."""
        if self._interval_seconds == 0.0:
            return
        with self._lock:
            now = self._clock()
            send_at = max(now, self._free_at)
            self._free_at = send_at + self._interval_seconds
        if send_at > now:
            self._sleep(send_at - now)


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """What a model answered.

    Attributes:
        verdict: What was asked for, such as a grade in 0..3, or why there is none.
        body: The body of the reply, or the failure in words; without the key.
        input_tokens: Tokens of the prompt; None if the reply does not report them.
        output_tokens: Tokens of the reply; None if it does not report them.
        seconds: How long the last attempt took; None if the reply was not measured.
    """

    verdict: T | InvalidReason
    body: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None


class ChatSettings(TypedDict, total=False):
    """How an endpoint is asked.

    Attributes:
        base_url: URL of the endpoint; None for the client library's (``OPENAI_BASE_URL``).
        api_key: Key; None for the environment's ``OPENAI_API_KEY``; a local server accepts any.
        max_reply_tokens: Maximum length of a reply, ≥ 1, 256 unless given: bounds the cost of a
            model that ignores the schema; a model that writes out its reasoning needs more.
        concurrency: Maximum number of concurrent calls within one ``complete_all``, ≥ 1, 4 unless
            given.
        max_calls_per_second: Over all threads of this process, retries included, > 0; None
            disables it.
        timeout_seconds: Limit of one call from its start to the end of the reply, > 0, 30 unless
            given; connecting may take as long again.
        retries: Number of times that a failed call is repeated, ≥ 0, 3 unless given.
    """

    base_url: str | None
    api_key: str | None
    max_reply_tokens: int
    concurrency: int
    max_calls_per_second: float | None
    timeout_seconds: float
    retries: int


_DEFAULTS: ChatSettings = {
    "base_url": None,
    "api_key": None,
    "max_reply_tokens": 256,
    "concurrency": 4,
    "max_calls_per_second": None,
    "timeout_seconds": 30.0,
    "retries": 3,
}


class ChatClient:
    """Sends conversations to a model and reads what it answers, at temperature 0.

    The client library repeats calls that failed temporarily (408, 409, 429, 5xx, timeouts, broken
    connections), after the time in ``Retry-After`` up to the library's own bound, or else with
    exponential backoff and jitter.

    The endpoint is not trusted: redirects are not followed, since they would send passages to a
    host that nobody chose; compressed answers are not unpacked; and an answer of more than 1 MiB,
    or one that takes too long in total, is aborted.

    Threads may share a client. A forked child starts with its own connections and counts.

    Args:
        model: Name of the model at the endpoint.
        ledger: Counts calls and tokens.
        **settings: The others.

    Raises:
        ConfigurationError: a setting is out of its range, or there is no API key.
        MissingExtraError: the extra ``judge`` is not installed.
    """

    def __init__(self, model: str, ledger: Ledger, **settings: Unpack[ChatSettings]) -> None:
        chosen: ChatSettings = {**_DEFAULTS, **settings}
        for name, value, least in (
            ("max_reply_tokens", chosen["max_reply_tokens"], 1),
            ("concurrency", chosen["concurrency"], 1),
            ("retries", chosen["retries"], 0),
        ):
            if value < least:
                raise ConfigurationError(f"{name} {value!r} must be at least {least}")
        for name, seconds in (
            ("timeout_seconds", chosen["timeout_seconds"]),
            ("max_calls_per_second", chosen["max_calls_per_second"]),
        ):
            if seconds is not None and not 0.0 < seconds < math.inf:
                raise ConfigurationError(f"{name} {seconds!r} must be finite and > 0")
        self.model = model
        self.ledger = ledger
        self.max_reply_tokens = chosen["max_reply_tokens"]
        self._settings = chosen
        self._library = require("openai", "judge")
        self._reset_after_fork()
        self._connected()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Drop the connections without closing them: they belong to the parent."""
        self._client: Any = None
        self._connecting = threading.Lock()
        self._pacer = Pacer(self._settings["max_calls_per_second"])
        self._this_thread = threading.local()

    @property
    def host(self) -> str:
        """The host of the endpoint."""
        return str(self._connected().base_url.host)

    def complete_all(
        self,
        items: Sequence[U],
        conversation: Callable[[U], Conversation],
        form: dict[str, object] | None,
        read: Callable[[str], T | InvalidReason],
    ) -> list[Reply[T]]:
        """Send one conversation for each item, concurrently; see ``complete``."""
        self._connected()

        def ask(item: U) -> Reply[T]:
            return self.complete(conversation(item), form, read)

        pool = DaemonPool("chat", workers=self._settings["concurrency"], waiting=len(items))
        replies = [pool.submit(partial(ask, item)) for item in items]
        try:
            return [each.result() for each in replies]
        finally:
            for each in replies:
                each.cancel()

    def close(self) -> None:
        """Close the connections; asking again opens new ones."""
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                try:
                    self._client = self._library.OpenAI(
                        base_url=self._settings["base_url"],
                        api_key=self._settings["api_key"],
                        timeout=self._settings["timeout_seconds"],
                        max_retries=self._settings["retries"],
                        http_client=self._library.DefaultHttpxClient(
                            follow_redirects=False,
                            headers={"Accept-Encoding": "identity"},
                            event_hooks={
                                "request": [self._before_each_call],
                                "response": [_leave_packed],
                            },
                        ),
                    )
                except self._library.OpenAIError as error:
                    raise ConfigurationError(
                        f"the client of chat completions cannot be made: {error} (a "
                        "local server takes any api_key)"
                    ) from error
                if self._client.base_url.scheme not in ("http", "https"):
                    address, self._client = str(self._client.base_url), None
                    raise ConfigurationError(
                        f"base_url {address!r} is no URL: write http:// or https://, the host and "
                        "the path"
                    )
            return self._client

    def _before_each_call(self, request: Any) -> None:
        """Pace, count and bound every call, the client library's retries included."""
        self._pacer.wait()
        self.ledger.add(calls=1, retries=self._this_thread.called)
        self._this_thread.called = True
        self._this_thread.sent = time.monotonic()
        self._this_thread.deadline = self._this_thread.sent + self._settings["timeout_seconds"]
        self._this_thread.bytes_left = _MAX_ANSWER_BYTES
        self._this_thread.head = AnswerHead()
        request.extensions["trace"] = self._bound_connection

    def _bound_connection(self, event: str, info: dict[str, Any]) -> None:
        """Apply the limits of the thread's current call to all reads from a new connection.

        The client library's own timeout applies to each read: one byte at a time never reaches it.
        """
        if not event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            return
        stream, this_thread = info["return_value"], self._this_thread
        read_once = stream.read

        def read(max_bytes: int, timeout: float | None = None) -> bytes:
            seconds_left = this_thread.deadline - time.monotonic()
            if seconds_left <= 0.0:
                raise TimeoutError("the answer took too long as a whole")
            data: bytes = read_once(
                max_bytes, seconds_left if timeout is None else min(timeout, seconds_left)
            )
            this_thread.bytes_left -= len(data)
            if this_thread.bytes_left < 0:
                raise _TooLongError(f"an answer of more than {_MAX_ANSWER_BYTES:,} bytes")
            if not this_thread.head.admit(data):
                raise _TooLongError("too many interim answers before it")
            return data

        stream.read = read

    def complete(
        self,
        conversation: Conversation,
        form: dict[str, object] | None,
        read: Callable[[str], T | InvalidReason],
    ) -> Reply[T]:
        """Send one conversation.

        Args:
            conversation: Its messages.
            form: The form of structured output; None for free text.
            read: Reads the content of the reply.
        """
        return self._asked(
            # The raw reply, because the library coerces any reply into its own types.
            lambda client: client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=conversation,
                temperature=TEMPERATURE,
                max_tokens=self.max_reply_tokens,
                response_format=self._library.NOT_GIVEN if form is None else form,
            ),
            lambda body: read_reply(body, read),
        )

    def post(
        self, path: str, request: Mapping[str, object], read: Callable[[str], Reply[T]]
    ) -> Reply[T]:
        """Send a request of another form to the endpoint, within the same bounds and counts.

        Args:
            path: Behind the endpoint's URL, such as ``/decisions``.
            request: The body, without the model.
            read: Reads the body of the answer.
        """
        return self._asked(
            lambda client: client.post(
                path,
                body={"model": self.model, **request},
                cast_to=object,
                options={"headers": {"X-Stainless-Raw-Response": "true"}},
            ),
            read,
        )

    def _asked(self, send: Callable[[Any], Any], read_body: Callable[[str], Reply[T]]) -> Reply[T]:
        self._this_thread.called = False
        self._this_thread.sent = time.monotonic()
        client = self._connected()
        reply = self._answered(lambda: send(client), read_body)
        body = reply.body
        if isinstance(reply.verdict, InvalidReason) and len(client.api_key) >= _SHORTEST_KEY:
            body = body.replace(client.api_key, "[key]")
        return replace(reply, body=body, seconds=time.monotonic() - self._this_thread.sent)

    def _answered(self, send: Callable[[], Any], read_body: Callable[[str], Reply[T]]) -> Reply[T]:
        library = self._library
        try:
            response = send()
        except library.APIStatusError as error:
            return Reply(_of_status(error.status_code), _described(error.response))
        except library.APITimeoutError as error:
            return Reply(InvalidReason.TIMED_OUT, repr(error.__cause__))
        except library.APIConnectionError as error:
            return Reply(_of_failure(error.__cause__), repr(error.__cause__))
        except (TimeoutError, _TooLongError) as error:
            return Reply(_of_failure(error), repr(error))
        reply = read_body(response.http_response.text)
        self.ledger.add(
            input_tokens=reply.input_tokens or 0,
            output_tokens=reply.output_tokens or 0,
            unmetered=None in (reply.input_tokens, reply.output_tokens),
        )
        return reply


class _TooLongError(Exception):
    pass


def _leave_packed(response: Any) -> None:
    """Leave an answer that is compressed all the same as it is, which is no verdict."""
    response.headers.pop("Content-Encoding", None)


def _described(response: Any) -> str:
    if response.status_code in _REDIRECTS:
        location = response.headers.get("Location")
        return f"{response.status_code}: a redirect to {location}, which is not followed"
    text: str = response.text
    return text


def _of_failure(cause: BaseException | None) -> InvalidReason:
    # Releases of the client library differ in which errors they wrap in their own.
    if isinstance(cause, TimeoutError):
        return InvalidReason.TIMED_OUT
    return InvalidReason.TOO_LONG if isinstance(cause, _TooLongError) else InvalidReason.UNREACHABLE


def _of_status(status_code: int) -> InvalidReason:
    if status_code == _TOO_MANY_REQUESTS:
        return InvalidReason.RATE_LIMITED
    if status_code >= _SERVER_ERROR:
        return InvalidReason.SERVER_ERROR
    return InvalidReason.DENIED if status_code in _DENIED else InvalidReason.REJECTED


def read_reply(body: str, read: Callable[[str], T | InvalidReason]) -> Reply[T]:
    """Read the body of a chat completion, whose content ``read`` reads.

    >>> body = '{"choices": [{"message": {"content": " yes "}}]}'
    >>> read_reply(body, str.strip).verdict
    'yes'
    >>> read_reply("<html>", str.strip).verdict.value
    'malformed'
    """
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        return Reply(InvalidReason.MALFORMED, body)
    usage = field_of(completion, "usage")
    return Reply(
        _verdict(field_of(completion, "choices"), read),
        body,
        tokens_of(usage, "prompt_tokens"),
        tokens_of(usage, "completion_tokens"),
    )


def _verdict(choices: object, read: Callable[[str], T | InvalidReason]) -> T | InvalidReason:
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = field_of(choice, "message")
    if field_of(choice, "finish_reason") == "content_filter" or field_of(message, "refusal"):
        return InvalidReason.REFUSED
    if field_of(choice, "finish_reason") == "length":
        return InvalidReason.TRUNCATED
    content = field_of(message, "content")
    if not isinstance(content, str) or not content.strip():
        return InvalidReason.EMPTY
    return read(content)


def field_of(document: object, name: str) -> object:
    """Return a value of a JSON object; None for another document."""
    return document.get(name) if isinstance(document, dict) else None


def tokens_of(usage: object, name: str) -> int | None:
    """Return a count of a reply's usage; None if it is not told, or is no count."""
    count = field_of(usage, name)
    return count if type(count) is int and count >= 0 else None
