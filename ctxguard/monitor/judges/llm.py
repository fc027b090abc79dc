"""A language model as judge, behind any endpoint with the chat completions protocol.

Each call has one passage. In a list, a grade depends on the other passages, so recall, which
compares served passages with dropped ones, would be biased; one passage could influence another's
grade; and one bad reply would lose every verdict of the list. The prompt is sent once per passage,
and endpoints cache it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, StageUnavailableError
from ctxguard.monitor.judges.prompt import (
    MAX_GRADE,
    QUESTION_SCHEMA,
    TEMPERATURE,
    messages,
    prompt_digest,
    question_messages,
    response_format,
)
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.monitor.judges.reply import read_grade, read_question, read_reply
from ctxguard.monitor.judges.usage import UNAVAILABLE, InvalidReason, Ledger
from ctxguard.retrieval.index.passages import searchable_text

T = TypeVar("T")

_REDIRECTS = range(300, 400)
_DENIED = (*_REDIRECTS, 401, 403, 404)
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_MAX_ANSWER_BYTES = 2**20
"""A grade takes less than a thousand bytes."""
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


class LLMJudge:
    """Grades 0 to 3 by a language model's structured output, at temperature 0.

    Passages are sent to the endpoint: redact them first if they must not leave this machine. They
    are sent as data, with hidden characters removed and delimiters escaped, and the model is told
    to follow no instruction in them. A passage therefore cannot change the protocol. It may still
    persuade the model, which only a comparison with human labels shows.

    A reply that is malformed, refused, truncated, off the schema or out of range is no verdict: it
    is counted by reason, kept redacted for inspection, and never imputed. The client library
    repeats calls that failed temporarily (408, 409, 429, 5xx, timeouts, broken connections), after
    the time in ``Retry-After`` up to the library's own bound, or else with exponential backoff and
    jitter.

    The endpoint is not trusted: redirects are not followed, since they would send passages to a
    host that nobody chose; compressed answers are not unpacked; and an answer of more than 1 MiB,
    or one that takes too long in total, is aborted.

    Threads may share a judge. A forked child starts with its own client and counts (``ledger``).

    Args:
        model: Name of the model at the endpoint. Use a dated version: an alias may change its
            model without notice.
        base_url: URL of the endpoint; None for the client library's (``OPENAI_BASE_URL``).
        api_key: Key; None for the environment's ``OPENAI_API_KEY``; a local server accepts any.
        max_passage_chars: Longer titles and texts are truncated and counted, ≥ 1.
        max_reply_tokens: Maximum length of a reply, ≥ 1: bounds the cost of a model that ignores
            the schema; a model that writes out its reasoning needs more.
        concurrency: Maximum number of concurrent calls within one ``judge``, ≥ 1.
        max_calls_per_second: Over all threads of this process, retries included, > 0; None
            disables it.
        timeout_seconds: Limit of one call from its start to the end of the reply, > 0; connecting
            may take as long again.
        retries: Number of times that a failed call is repeated, ≥ 0.
        prices: Prices of tokens; None counts no cost.

    Raises:
        ConfigurationError: a setting is out of its range, or there is no API key.
        MissingExtraError: the extra ``judge`` is not installed.
    """

    name = "llm"
    max_grade = MAX_GRADE

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_passage_chars: int = 8000,
        max_reply_tokens: int = 256,
        concurrency: int = 4,
        max_calls_per_second: float | None = None,
        timeout_seconds: float = 30.0,
        retries: int = 3,
        prices: TokenPrices | None = None,
    ) -> None:
        for setting, value, least in (
            ("max_passage_chars", max_passage_chars, 1),
            ("max_reply_tokens", max_reply_tokens, 1),
            ("concurrency", concurrency, 1),
            ("retries", retries, 0),
        ):
            if value < least:
                raise ConfigurationError(f"judge {setting} {value!r} must be at least {least}")
        for setting, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("max_calls_per_second", max_calls_per_second),
        ):
            if seconds is not None and not 0.0 < seconds < math.inf:
                raise ConfigurationError(f"judge {setting} {seconds!r} must be finite and > 0")
        self.model = model
        self.version = f"{model} {prompt_digest(max_passage_chars, max_reply_tokens)}"
        self._base_url = base_url
        self._api_key = api_key
        self._max_passage_chars = max_passage_chars
        self._max_reply_tokens = max_reply_tokens
        self._concurrency = concurrency
        self._max_calls_per_second = max_calls_per_second
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self.ledger = Ledger(None if prices is None else astuple(prices))
        self._library = require("openai", "judge")
        self._reset_after_fork()
        self._connected()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Drop the connections without closing them: they belong to the parent."""
        self._client: Any = None
        self._connecting = threading.Lock()
        self._pacer = Pacer(self._max_calls_per_second)
        self._this_thread = threading.local()

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """Return one verdict per passage, in their order; None if there is no valid verdict.

        Raises:
            StageUnavailableError: the endpoint answered for none of them after all retries: an
                outage, which must not be counted as invalid replies.
        """
        return [
            None if isinstance(verdict, InvalidReason) else Judgment(passage.passage_id, verdict)
            for passage, verdict in zip(
                passages,
                self._ask_about(
                    passages, lambda text: messages(query, text), response_format(), read_grade
                ),
                strict=True,
            )
        ]

    def questions(self, passages: Sequence[Passage]) -> list[str | None]:
        """Write a question that each passage answers; None where no valid one came.

        Raises:
            StageUnavailableError: as ``judge``.
        """
        written = self._ask_about(
            passages, question_messages, response_format(QUESTION_SCHEMA), read_question
        )
        return [None if isinstance(each, InvalidReason) else each for each in written]

    def _ask_about(
        self,
        passages: Sequence[Passage],
        conversation: Callable[[str], list[dict[str, str]]],
        form: dict[str, object],
        read: Callable[[str], T | InvalidReason],
    ) -> list[T | InvalidReason]:
        """Send one call for each passage; raise StageUnavailableError if none is answered."""
        if not passages:
            return []
        client = self._connected()

        def ask(passage: Passage) -> T | InvalidReason:
            text = searchable_text(passage)
            if len(text) > self._max_passage_chars:
                text = text[: self._max_passage_chars]
                self.ledger.add(cut_passages=1)
            self._this_thread.called = False
            verdict, body = self._complete(client, conversation(text), form, read)
            if isinstance(verdict, InvalidReason):
                if len(client.api_key) >= _SHORTEST_KEY:
                    body = body.replace(client.api_key, "[key]")
                self.ledger.add_invalid(passage.passage_id, verdict, body)
            else:
                self.ledger.add(verdicts=1)
            return verdict

        verdicts = _in_threads(ask, passages, self._concurrency)
        if all(verdict in UNAVAILABLE for verdict in verdicts):
            reasons = ", ".join(sorted({str(verdict) for verdict in verdicts}))
            raise StageUnavailableError(
                "judge",
                f"{self.model} at {client.base_url.host} answered for none of {len(passages)} "
                f"passages ({reasons}); see ledger.rejected() for its replies",
            )
        return verdicts

    def close(self) -> None:
        """Close the connections; judging again opens new ones."""
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                try:
                    self._client = self._library.OpenAI(
                        base_url=self._base_url,
                        api_key=self._api_key,
                        timeout=self._timeout_seconds,
                        max_retries=self._retries,
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
                        f"the judge's client cannot be made: {error} (a local server takes any "
                        "api_key)"
                    ) from error
            return self._client

    def _before_each_call(self, request: Any) -> None:
        """Pace, count and bound every call, the client library's retries included."""
        self._pacer.wait()
        self.ledger.add(calls=1, retries=self._this_thread.called)
        self._this_thread.called = True
        self._this_thread.deadline = time.monotonic() + self._timeout_seconds
        self._this_thread.bytes_left = _MAX_ANSWER_BYTES
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
            return data

        stream.read = read

    def _complete(
        self,
        client: Any,
        conversation: list[dict[str, str]],
        form: dict[str, object],
        read: Callable[[str], T | InvalidReason],
    ) -> tuple[T | InvalidReason, str]:
        """Return a verdict or why there is none, and the reply or the failure."""
        library = self._library
        try:
            # The raw reply, because the library coerces any reply into its own types.
            response = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=conversation,
                temperature=TEMPERATURE,
                max_tokens=self._max_reply_tokens,
                response_format=form,
            )
        except library.APIStatusError as error:
            return _of_status(error.status_code), _described(error.response)
        except library.APITimeoutError as error:
            return InvalidReason.TIMED_OUT, repr(error.__cause__)
        except library.APIConnectionError as error:
            return _of_failure(error.__cause__), repr(error.__cause__)
        except (TimeoutError, _TooLongError) as error:
            return _of_failure(error), repr(error)
        body: str = response.http_response.text
        reply = read_reply(body, read)
        self.ledger.add(
            input_tokens=reply.input_tokens or 0,
            output_tokens=reply.output_tokens or 0,
            unmetered=None in (reply.input_tokens, reply.output_tokens),
        )
        return reply.verdict, body


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


def _in_threads(
    ask: Callable[[Passage], T], passages: Sequence[Passage], n_threads: int
) -> list[T]:
    """Return the results of ``ask`` for the passages, in their order.

    Runs on daemon threads rather than in a pool: the interpreter joins a pool's threads at exit,
    so a hanging endpoint would keep the process alive.
    """
    answers: dict[int, T] = {}
    errors: list[Exception] = []
    waiting = deque(enumerate(passages))

    def work() -> None:
        while not errors:
            try:
                position, passage = waiting.popleft()
            except IndexError:
                return
            try:
                answers[position] = ask(passage)
            except Exception as error:
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="ctxguard-judge", daemon=True)
        for _ in range(min(n_threads, len(passages)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[position] for position in range(len(passages))]
