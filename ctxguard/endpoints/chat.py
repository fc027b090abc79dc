"""Calls models behind endpoints: chat completions, and other forms under the same limits.

It learns from answers which fields an endpoint refuses, and leaves them out of later calls. Touches
the network, the monotonic clock and, for URL and key, the environment; waits between attempts
for random times.
"""

import asyncio
import json
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict, TypeVar

from ctxguard._support.checks import check_at_least, check_positive
from ctxguard._support.fork_safety import OfProcess
from ctxguard.endpoints.failures import (
    BAD_REQUEST,
    NOT_FOUND,
    SERVER_ERROR,
    UNPROCESSABLE,
    CallError,
    InvalidReason,
)
from ctxguard.endpoints.forms import CHAT_PATH, QUESTION_FORMS
from ctxguard.endpoints.http import BACKGROUND, HttpClient
from ctxguard.endpoints.replies import Reply, document_of, read_reply, spent_on_thoughts
from ctxguard.endpoints.usage import Ledger
from ctxguard.errors import ConfigurationError

T = TypeVar("T")

Conversation = list[dict[str, str]]

TEMPERATURE = 0.0

_OPENAI = "https://api.openai.com/v1"
_MAX_ANSWER_BYTES = 2**20
"""The longest answers, about a hundred passages, take a few thousand bytes."""
_BYTES_PER_EVENT = 1024
_SHORTEST_KEY = 8
"""Shorter keys are placeholders, such as ``none``, or ordinary words."""
_MOST_WAIT_SECONDS = 60.0
_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 0.5, 8.0
_MOST_LESSONS = 12
"""The most lessons learned in one call; each leaves something out, so few are needed."""
_MORE_TOKENS = 16
"""The factor by which the limit of tokens is raised for a model that spent all of them on
thoughts."""
_MOST_REPLY_TOKENS = 2**15
_MOST_QUOTED_CHARS = 200


class Pacer:
    """Spaces calls evenly, over all threads and event loops; None sets no rate."""

    _lock = OfProcess(threading.Lock)

    def __init__(
        self, per_second: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_seconds = 0.0 if per_second is None else 1.0 / per_second
        self._clock = clock
        self._free_at = -math.inf

    def seconds(self) -> float:
        """Reserve the next call, and return its waiting time in seconds."""
        if self._interval_seconds == 0.0:
            return 0.0
        with self._lock:
            now = self._clock()
            send_at = max(now, self._free_at)
            self._free_at = send_at + self._interval_seconds
        return send_at - now


class ChatSettings(TypedDict, total=False):
    """The settings of `ChatClient`, for code that passes them on.

    Attributes:
        base_url: URL of the endpoint; None for ``OPENAI_BASE_URL`` of the environment, or OpenAI's.
        api_key: Key; None for the environment's ``OPENAI_API_KEY``. Without either, an endpoint
            other than OpenAI's is sent the key ``none``: a local server accepts any.
        max_reply_tokens: Maximum length of a reply, by default 256; bounds the cost of a model that
            ignores the schema. A model that spends it all on thinking is asked once more with 16
            times as much.
        temperature: By default 0; left out if the endpoint refuses it.
        concurrency: Maximum number of concurrent calls, by default 4.
        max_calls_per_second: Maximum rate over all threads of this process, including retries.
        timeout_seconds: Limit of one call from connecting to the end of the reply, by default 30.
        retries: Number of times to repeat a failed call, by default 3.
    """

    base_url: str | None
    api_key: str | None
    max_reply_tokens: int
    temperature: float
    concurrency: int
    max_calls_per_second: float | None
    timeout_seconds: float
    retries: int


_WORDS_OF = {
    "response_format": re.compile(
        r"response_format|json.?schema|json.?object|json.?mode|structured.output|guided|grammar"
        r"|(?:invalid|unsupported|unknown) (?:response )?format"
    ),
    "messages": re.compile(
        r"system.{0,3} (?:role|message|prompt|instruction)|role.{0,30}\bsystem\b"
        r"|messages.{0,40}role|developer.{0,3} (?:role|message|instruction)|roles? must alternate"
    ),
    "stream": re.compile(r"\bstream(?:ing|ed)?\b"),
}
"""Other names by which an endpoint may refuse a field of a request."""
_REFUSES = re.compile(
    r"support|must|only|requires?|unknown|invalid|unexpected|unrecogni[sz]ed|(?:not|n't) (?:be )?"
    r"(?:allowed|permitted)|set |extra"
)
_MOST_OF_MODEL = re.compile(
    r"(?:at most|maximum(?: value)?(?: of| is)?|less than or equal to|<=|\[1,) ?[`'\"]?(\d{1,7})\b"
)
_CONTEXT = re.compile(
    r"context.{0,3}(?:length|window|size)(?:\D{0,20}(\d{2,7}))?|prompt is too long"
)


class _Lessons:
    """The known restrictions of one endpoint for one model."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.most_tokens = max(max_tokens, min(_MORE_TOKENS * max_tokens, _MOST_REPLY_TOKENS))
        self.limit: str | None = "max_tokens"
        self.schemas = 2
        """2: as requested; 1: any JSON object; 0: described only in the instructions."""
        self.has_system = True
        self.streams = False
        self.without: frozenset[str] = frozenset()

    def applied(self, request: Mapping[str, object]) -> dict[str, object]:
        """Return a chat request in the form that this endpoint accepts."""
        body = dict(request)
        if self.limit is not None:
            body[self.limit] = self.max_tokens
        if self.schemas == 1 and "response_format" in body:
            body["response_format"] = {"type": "json_object"}
        elif self.schemas == 0:
            body.pop("response_format", None)
        if not self.has_system:
            body["messages"] = _without_system(body["messages"])  # type: ignore[arg-type]
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {name: value for name, value in body.items() if name not in self.without}

    def learn(self, failure: CallError, sent: Mapping[str, object]) -> None:
        """Note which part of its request an answer refuses, if that is clear.

        >>> lessons = _Lessons(256)
        >>> said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        >>> failure = CallError(InvalidReason.REJECTED, "", 400, said, "max_tokens")
        >>> lessons.learn(failure, {"max_tokens": 256})
        >>> lessons.applied({"model": "m"})
        {'model': 'm', 'max_completion_tokens': 256}
        """
        named, said = failure.named.lower(), f"{failure.named} {failure.said}".lower()
        refuses = _REFUSES.search(said) is not None
        if failure.status not in _TEACHING or (failure.status >= SERVER_ERROR and not refuses):
            return
        fields = [name for name in sent if name != "model"]
        blamed = [name for name in fields if _names(named, name)]
        blamed = blamed or [name for name in fields if _names(said, name)]
        context, most = _CONTEXT.search(said), _MOST_OF_MODEL.search(said)
        is_limit = bool(blamed) and blamed[0] == self.limit
        if is_limit and most is not None and 0 < int(most[1]) < self.max_tokens:
            self._limit_to(int(most[1]))
        elif context is not None:
            # Only the part of the reply can be made smaller for all passages alike.
            if context[1] is not None and int(context[1]) < 2 * self.max_tokens:
                self._limit_to(int(context[1]) // 4)
        elif is_limit:
            self.limit = "max_completion_tokens" if self.limit == "max_tokens" else None
        elif blamed and blamed[0] == "response_format":
            self.schemas -= self.schemas > 0
        elif blamed and blamed[0] == "messages":
            self.has_system = False
        elif blamed:
            self.without |= {blamed[0]}
        elif refuses and _names(said, "stream"):
            self.streams = True

    def thinks_longer(self, sent: Mapping[str, object]) -> bool:
        """Allow more tokens after a request that spent all of its own; return whether that is
        possible."""
        spent = sent.get(self.limit or "")
        if spent == self.max_tokens:
            self.max_tokens = self.most_tokens
        return isinstance(spent, int) and self.max_tokens > spent

    def _limit_to(self, n_tokens: int) -> None:
        self.max_tokens = self.most_tokens = max(n_tokens, 1)


_TEACHING = (BAD_REQUEST, NOT_FOUND, 415, UNPROCESSABLE, SERVER_ERROR, 501)


def _names(said: str, field: str) -> bool:
    pattern = _WORDS_OF.get(field)
    return bool(pattern.search(said) if pattern else re.search(rf"\b{field}\b", said))


def _without_system(conversation: Conversation) -> Conversation:
    """Move the system message into the user's message."""
    system = [each["content"] for each in conversation if each["role"] == "system"]
    others = [each for each in conversation if each["role"] != "system"]
    first = {**others[0], "content": "\n\n".join([*system, others[0]["content"]])}
    return [first, *others[1:]]


class ChatClient:
    """Sends conversations to a model and reads its replies.

    Calls that failed temporarily (408, 409, 429, 5xx, timeouts, broken connections) are repeated,
    after the time in ``Retry-After`` up to a minute, or else with exponential backoff and jitter.

    Parts of a request that the endpoint refuses are changed in later ones: ``max_tokens`` becomes
    ``max_completion_tokens``, a schema becomes any JSON object and then none, the system's message
    moves into the user's, and the answer is streamed; any other refused field is left out.

    The endpoint is not trusted; see ``HttpClient``. An answer of more than 1 MiB is aborted.

    Args:
        model: Name of the model at the endpoint.
        ledger: Counts calls and tokens.
        base_url, api_key, …: See `ChatSettings`.

    Raises:
        ConfigurationError: a setting is out of range, or there is no API key.
        MissingExtraError: the extra ``judge`` is not installed.
    """

    def __init__(
        self,
        model: str,
        ledger: Ledger,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_reply_tokens: int = 256,
        temperature: float = TEMPERATURE,
        concurrency: int = 4,
        max_calls_per_second: float | None = None,
        timeout_seconds: float = 30.0,
        retries: int = 3,
    ) -> None:
        check_at_least(1, max_reply_tokens=max_reply_tokens, concurrency=concurrency)
        check_at_least(0, retries=retries)
        check_positive(timeout_seconds=timeout_seconds, max_calls_per_second=max_calls_per_second)
        if not 0.0 <= temperature < math.inf:
            raise ConfigurationError(f"temperature {temperature!r} must be finite and at least 0")
        environment = os.environ.get
        url = base_url or environment("OPENAI_BASE_URL")
        key = api_key or environment("OPENAI_API_KEY") or ("none" if url else "")
        if not key:
            raise ConfigurationError(
                "the model's endpoint needs a key: set OPENAI_API_KEY in the environment, or give "
                "api_key in Python"
            )
        accounts = {
            "OpenAI-Organization": environment("OPENAI_ORG_ID"),
            "OpenAI-Project": environment("OPENAI_PROJECT_ID"),
        }
        self.model = model
        self.ledger = ledger
        self.max_reply_tokens = max_reply_tokens
        self.temperature = temperature
        self._concurrency, self._retries = concurrency, retries
        self._timeout_seconds = timeout_seconds
        self._key = key
        self._http = HttpClient(
            url or _OPENAI,
            (CHAT_PATH, *(form.path for form in QUESTION_FORMS.values())),
            what="endpoint's",
            key=key,
            extra="judge",
            headers={name: value for name, value in accounts.items() if value},
        )
        self.host = self._http.host
        self._pacer = Pacer(max_calls_per_second)
        self._lessons = _Lessons(self.max_reply_tokens)

    def complete(
        self,
        conversations: Iterable[Conversation],
        form: dict[str, object] | None,
        read: Callable[[str], T | InvalidReason],
    ) -> list[Reply[T]]:
        """Send conversations concurrently, and return their replies in order.

        ``form`` is that of structured output, None for free text; ``read`` reads a reply's content.
        """
        fixed: dict[str, object] = {"model": self.model, "temperature": self.temperature}
        if form is not None:
            fixed["response_format"] = form

        async def all_of_them() -> list[Reply[T]]:
            free = asyncio.Semaphore(self._concurrency)

            async def ask(conversation: Conversation) -> Reply[T]:
                async with free:
                    return await self._asked(
                        CHAT_PATH,
                        {**fixed, "messages": conversation},
                        lambda document: read_reply(document, read),
                        self._lessons,
                    )

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(each)) for each in conversations]
            return [task.result() for task in tasks]

        return BACKGROUND.run(all_of_them())

    def post(
        self, path: str, request: Mapping[str, object], read: Callable[[object], Reply[T]]
    ) -> Reply[T]:
        """Send a request in another form, without its model, under the same limits and counts."""
        return BACKGROUND.run(self._asked(path, {"model": self.model, **request}, read))

    def close(self) -> None:
        """Close the connections; asking again opens new ones."""
        self._http.close()

    async def _asked(
        self,
        path: str,
        request: Mapping[str, object],
        read: Callable[[object], Reply[T]],
        lessons: _Lessons | None = None,
    ) -> Reply[T]:
        """Ask until a reply arrives or no attempt is left, learning from refusals."""
        n_failed = n_lessons = 0
        has_thought = False
        while True:
            sent = request if lessons is None else lessons.applied(request)
            await asyncio.sleep(self._pacer.seconds())
            self.ledger.add(calls=1, retries=int(n_failed + n_lessons + has_thought > 0))
            began = time.monotonic()
            try:
                body, document = await self._once(path, sent)
            except CallError as failure:
                seconds = time.monotonic() - began
                if lessons is not None and n_lessons < _MOST_LESSONS:
                    lessons.learn(failure, sent)
                    if lessons.applied(request) != sent:  # or another call has learned it
                        n_lessons += 1
                        continue
                if not failure.may_pass or n_failed >= self._retries:
                    said = self._masked(failure.said) or failure.words
                    return Reply(failure.reason, said, seconds=seconds, why=failure.words)
                n_failed += 1
                await asyncio.sleep(_pause_seconds(n_failed, failure.wait_seconds))
                continue
            reply = read(document)
            self.ledger.add(
                input_tokens=reply.input_tokens or 0, output_tokens=reply.output_tokens or 0
            )
            why = ""
            if lessons is not None and spent_on_thoughts(document):
                if not has_thought and lessons.thinks_longer(sent):
                    has_thought = True
                    continue
                why = (
                    f"{self.model} spent all of its {lessons.max_tokens:,} tokens on thoughts: "
                    "allow longer replies (max-reply-tokens), or let it think less"
                )
            seconds = time.monotonic() - began
            return replace(reply, body=self._masked(body), seconds=seconds, why=why)

    async def _once(self, path: str, sent: Mapping[str, object]) -> tuple[str, object]:
        """Send one request; return the body of its answer, and its document."""
        limit, most = self._timeout_seconds, _MAX_ANSWER_BYTES
        if "stream" in sent:
            most += _BYTES_PER_EVENT * self._lessons.max_tokens
        # A lone surrogate is sent as a question mark.
        data = json.dumps(sent, ensure_ascii=False).encode("utf-8", "replace")
        try:
            async with asyncio.timeout(limit):
                answer = await self._http.post(path, data, most)
        except TimeoutError:
            words = f"no complete answer from {self.host} within {limit:g} s: allow it more time"
            raise CallError(InvalidReason.TIMED_OUT, words) from None
        return answer.body.decode("utf-8", "replace"), document_of(answer, self.host, self.model)

    def _masked(self, text: str) -> str:
        return text.replace(self._key, "[key]") if len(self._key) >= _SHORTEST_KEY else text


def _pause_seconds(n_failed: int, asked: float | None) -> float:
    if asked is not None and 0.0 < asked <= _MOST_WAIT_SECONDS:
        return asked
    pause = min(_BACKOFF_SECONDS * 2.0 ** (n_failed - 1), _MOST_BACKOFF_SECONDS)
    return pause * random.uniform(0.75, 1.0)  # noqa: S311 - spreads clients


def why_failed(replies: Iterable[Reply[Any]], ledger: Ledger) -> str:
    """Name up to three reasons why replies hold no answer, the most frequent first.

    ``ledger`` redacts the endpoint's messages.
    """
    causes: Counter[str] = Counter()
    for reply in replies:
        if isinstance(reply.answer, InvalidReason):
            cause = reply.why or f"the reply was {reply.answer.value.replace('_', ' ')}"
            said = ledger.redacted(reply.body[:_MOST_QUOTED_CHARS])
            if reply.why and said and said not in cause:
                cause += f' ("{" ".join(said.split())}")'
            causes[cause] += 1
    return "; ".join(
        cause if len(causes) == 1 else f"{n:,} × {cause}" for cause, n in causes.most_common(3)
    )
