"""Gets scores of passages from a reranker on a server, by the rerank protocol.

Touches the network and the clock, through ``chat`` and ``http``.
"""

import asyncio
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic_core import PydanticSerializationError, to_json

from ctxguard._support.checks import check_at_least, check_positive
from ctxguard.core.passages import estimate_tokens
from ctxguard.core.types import FloatArray
from ctxguard.endpoints.chat import Pacer
from ctxguard.endpoints.failures import (
    BAD_REQUEST,
    SERVER_ERROR,
    TOO_LARGE,
    UNPROCESSABLE,
    CallError,
    InvalidReason,
    stage_error,
)
from ctxguard.endpoints.forms import FORMS, RerankProtocol
from ctxguard.endpoints.http import BACKGROUND, HttpClient
from ctxguard.endpoints.replies import document_of
from ctxguard.errors import ConfigurationError, StageError, StageRefusedError
from ctxguard.retrieval.hybrid.search import RERANK
from ctxguard.retrieval.index.passages import without_surrogates

_MAX_ANSWER_BYTES = 2**20
_BYTES_PER_RESULT = 256
_BYTES_PER_SENT_BYTE = 3
"""Servers may send the documents back; é takes two bytes in UTF-8 and six as ``\\u00e9``."""

MOST_CALLS = 128
"""The most calls for one request, for servers that take few documents at a time."""
_MOST_REFUSALS = 64
"""After this many refusals of one request, refused parts are not tried in another way."""
_REFUSALS_TO_PROBE = 3
_AT_ONCE = 4
_SHARE_OF_TOKENS = 0.75
"""The share of a server's limit that is used, since tokens are estimated."""
_LEAST_TOKENS, _LEAST_CHARS, _MANY_CHARS = 16, 64, 2_000
_MOST_MODELS = 64
_PROBE = "a"

_COUNTED = r"(?:documents|texts|items|passages|inputs|pairs|chunks|elements)"
_BOUND = (
    r"(?:at most|no more than|more than|less than|longer than|up to"
    r"|max(?:imum)?(?: number)?(?: of| is)?|limit(?: is| of)?)"
)
_IS_DOCUMENTS = re.compile(
    rf"(?:too many|number of|{_BOUND}).{{0,30}}{_COUNTED}|{_COUNTED}.{{0,30}}(?:{_BOUND}|exceed)"
    r"|batch.?size|batch is too"
)
_MOST_DOCUMENTS = re.compile(
    rf"batch.?size:? *\d+ *> *\D{{0,40}}(\d{{1,6}})"
    rf"|{_BOUND}\D{{0,40}}?(\d{{1,6}}) ?(?:{_COUNTED}|$|[.,;)])"
)
_IS_LENGTH = re.compile(
    r"tokens|context.{0,3}(?:size|window)|too (?:long|large to process)|length|characters"
)
_MOST_TOKENS = re.compile(
    rf"(?:{_BOUND}|context (?:length|size|window))\D{{0,30}}?(\d{{2,7}}) ?tokens"
)
_MOST_CHARS = re.compile(rf"{_BOUND}\D{{0,30}}?(\d{{2,7}}) ?characters")
_IS_OF_ALL = re.compile(r"total|per.{0,15} batch|in the (?:batch|request)")
"""Matches a limit on all documents together."""


@dataclass(slots=True)
class _Limits:
    """The limits of one call to a server, learned from its refusals."""

    documents: int | None
    tokens: int | None = None
    """The most tokens of a document with the query."""
    chars: int | None = None
    """The most characters of a document."""


_Part = tuple[list[int], int | None]
"""The positions of the documents sent in one call, and the number of characters to which they are
cut."""


class _Request:
    """One request, whose documents are sent in as many calls as the server's limits require.

    Attributes:
        scores: Of each document; NaN where there is none.
        refusal: The last answer that refused some documents.
        is_sent: Whether there was anything to send.
        limit: Of the time for all calls, moved by what they wait for their turn.
    """

    def __init__(
        self, query: str, documents: Sequence[str], limits: _Limits, seconds: float
    ) -> None:
        self.limit = asyncio.timeout(seconds)
        self.query, self._documents, self._limits = query, documents, limits
        self.scores = np.full(len(documents), np.nan)
        self.refusal: CallError | None = None
        self.parts: deque[_Part] = deque()
        self._n_calls = self._n_refusals = 0
        self.is_probed = False
        self._add([at for at, each in enumerate(documents) if each and not each.isspace()])
        self.is_sent = bool(self.parts)

    def _add(self, places: list[int], most_chars: int | None = None) -> None:
        most = self._limits.documents or len(places) or 1
        starts = range(0, len(places), most)
        self.parts.extend((places[start : start + most], most_chars) for start in starts)

    def next(self) -> _Part | None:
        """Take the next part to send; None when all are sent, or no call is left."""
        if not self.parts or self._n_calls >= MOST_CALLS:
            return None
        self._n_calls += 1
        part = self.parts.popleft()
        most = self._limits.documents
        if most is not None and len(part[0]) > most:  # learned since
            self._add(*part)
            part = self.parts.pop()
        return part

    def texts(self, part: _Part) -> list[str]:
        """Return the documents of a part, cut to the length that the server reads."""
        limits, (places, most_chars) = self._limits, part
        texts = [self._documents[at] for at in places]
        if limits.tokens is not None:
            most = max(limits.tokens - estimate_tokens(self.query), limits.tokens // 4)
            texts = [_cut(text, most) for text in texts]
        if limits.chars is not None:
            most_chars = min(limits.chars, most_chars or limits.chars)
        return texts if most_chars is None else [text[:most_chars] for text in texts]

    def refused(self, part: _Part, sent: list[str], failure: CallError) -> bool:
        """Decide what to try in place of a refused part.

        Returns:
            Whether it is time to find out if the documents are to blame at all.
        """
        self.refusal = failure
        self._n_refusals += 1
        if self._n_refusals > _MOST_REFUSALS:
            return False
        said, limits, (places, most_chars) = failure.said.lower(), self._limits, part
        half, longest = len(places) // 2, max(map(len, sent))
        is_length = _IS_LENGTH.search(said) is not None
        number = _number_in(_MOST_DOCUMENTS, said)
        if half and _IS_DOCUMENTS.search(said) and (number is not None or not is_length):
            most = half if number is None or number >= len(places) else number
            limits.documents = max(1, min(most, limits.documents or most))
            self._add(places, most_chars)
            return False
        if is_length and not (half and _IS_OF_ALL.search(said)) and longest > _LEAST_CHARS:
            tokens, chars = _number_in(_MOST_TOKENS, said), _number_in(_MOST_CHARS, said)
            if tokens is not None and tokens >= _LEAST_TOKENS:
                limits.tokens = min(tokens, limits.tokens or tokens)
            if chars is not None and chars >= _LEAST_CHARS:
                limits.chars = min(chars, limits.chars or chars)
            is_cut_now = self.texts(part) != sent
            self._add(places, most_chars if is_cut_now else longest // 2)
        elif half:
            self._add(places[:half], most_chars)
            self._add(places[half:], most_chars)
        elif longest > (_LEAST_CHARS if failure.status == TOO_LARGE else _MANY_CHARS):
            self._add(places, longest // 2)
        return not is_length or self._n_refusals == _REFUSALS_TO_PROBE


class RerankClient:
    """Scores documents with a reranker that another server runs.

    The server is not trusted; see ``HttpClient``. Answers are read up to a size that follows from
    the request, and must be exact: a result for a document that was not sent, or two for one
    document, is garbage, since scores could belong to other documents. What the server says beside
    scores is neither logged nor quoted in errors, because it may quote documents.

    Documents are sent in several calls where the server takes few at a time, and cut where it says
    that they are too long: both limits are learned from its answers. Blank ones are not sent. One
    that the server still refuses has no score, nor has any that is left after 128 calls or at the
    time limit; the others keep theirs.

    Args:
        url: The server's base, such as ``http://localhost:8080`` or ``https://api.jina.ai/v1``, or
            the whole URL of its endpoint, which ends in ``/rerank`` or ``/score``.
        protocol: The form of requests and answers; see ``ctxguard.endpoints.forms``. TEI is asked
            for logits.
        key: Sent as ``Authorization: Bearer``, and nowhere else.
        model: Name of the model at the server; None for the server's own choice.
        timeout_seconds: For all calls of a request, from connecting to the last byte.
        most_documents: The most that the server takes in one call; None to learn it.
        max_calls_per_second: Over all threads of this process.

    Attributes:
        fingerprint: Names the protocol and the model, without the URL.

    Raises:
        ConfigurationError: a setting that cannot work.
        MissingExtraError: the extra ``rerank`` is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        protocol: RerankProtocol = "cohere",
        key: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 10.0,
        most_documents: int | None = None,
        max_calls_per_second: float | None = None,
    ) -> None:
        if protocol not in FORMS:
            names = ", ".join(FORMS)
            raise ConfigurationError(f"rerank protocol {protocol!r} is unknown; use one of {names}")
        check_positive(timeout_seconds=timeout_seconds, max_calls_per_second=max_calls_per_second)
        check_at_least(1, most_documents=most_documents)
        self._form = FORMS[protocol]
        self._path = self._form.paths[0]
        self._http = HttpClient(url, (self._path,), what="rerank", key=key, extra="rerank")
        self._protocol = protocol
        self._model = model
        self._timeout_seconds = timeout_seconds
        self._most_documents = most_documents
        self._limits: dict[str | None, _Limits] = {}
        self._pacer = Pacer(max_calls_per_second)
        self.fingerprint = f"{protocol} {model or '(default model)'}"

    async def ascore(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        max_tokens_per_doc: int | None = None,
    ) -> FloatArray:
        """Score each document, shape (n,), higher is better; NaN if it is blank or refused.

        Lone surrogates, which UTF-8 cannot hold, are sent as U+FFFD.

        Args:
            query: The query.
            documents: The documents; none, or blank ones alone, make no call.
            model: Name of the model for this call; None for the client's.
            max_tokens_per_doc: Passed on if the protocol has it.

        Raises:
            UnansweredError: no whole answer in time.
            OverloadedError: the server refused for its rate limit.
            StageRefusedError: the server refused this request, and may answer another.
            StageUnavailableError: the server cannot be reached, or refused.
            StageError: the answer is not an answer to this request, is too long, or has no score.
        """
        model = model or self._model
        request = _Request(query, documents, self._limits_of(model), self._timeout_seconds)
        options: dict[str, object] = {"model": model, "max_tokens_per_doc": max_tokens_per_doc}

        async def send_all() -> None:
            while (part := request.next()) is not None:
                await self._send(request, part, options)

        try:
            async with request.limit:
                if len(request.parts) == 1:
                    await send_all()
                if request.parts:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(_AT_ONCE, len(request.parts))):
                            group.create_task(send_all())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        except TimeoutError:
            if np.isnan(request.scores).all() and request.refusal is None:
                words = (
                    f"no complete answer from {self._http.host} within {self._timeout_seconds:g} s"
                )
                raise stage_error(RERANK, InvalidReason.TIMED_OUT, words) from None
        if request.is_sent and np.isnan(request.scores).all():
            if request.refusal is not None:
                raise StageRefusedError(RERANK, request.refusal.words)
            raise _garbage(f"has no finite {self._form.score}")
        return request.scores

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Score for callers without an event loop, as a `ctxguard.Reranker` is called."""
        return BACKGROUND.run(self.ascore(query, texts)) if len(texts) else np.zeros(0)

    async def aclose(self) -> None:
        """Close the connections of the running event loop; scoring again opens new ones."""
        await self._http.aclose()

    def close(self) -> None:
        """Close the connections of ``score``; scoring again opens new ones."""
        self._http.close()

    def _limits_of(self, model: str | None) -> _Limits:
        """Return the known limits of a model; clients may name any number of models."""
        if model not in self._limits and len(self._limits) >= _MOST_MODELS:
            self._limits.clear()
        return self._limits.setdefault(model, _Limits(self._most_documents))

    async def _send(self, request: _Request, part: _Part, options: dict[str, object]) -> None:
        """Send one call; if its content is refused, other calls can still be made."""
        texts = request.texts(part)
        try:
            request.scores[part[0]] = await self._scores(request, texts, options)
        except CallError as error:
            _check_is_about_content(error)
            is_time = request.refused(part, texts, error)
            if is_time and not request.is_probed:
                request.is_probed = True
                try:
                    await self._scores(request, [_PROBE], options)
                except CallError as refused:
                    _check_is_about_content(refused)
                    request.parts.clear()  # it is about the query, or the settings

    async def _scores(
        self, request: _Request, texts: Sequence[str], options: dict[str, object]
    ) -> FloatArray:
        body = self._body(request.query, texts, options)
        most = _MAX_ANSWER_BYTES + _BYTES_PER_RESULT * len(texts) + _BYTES_PER_SENT_BYTE * len(body)
        if seconds := self._pacer.seconds():
            limit = request.limit
            limit.reschedule((limit.when() or 0.0) + seconds)
            await asyncio.sleep(seconds)
        answer = await self._http.post(self._path, body, most)
        model = options["model"]
        document = document_of(answer, self._http.host, None if model is None else str(model))
        return read_scores(document, len(texts), self._protocol)

    def _body(self, query: str, texts: Sequence[str], options: dict[str, object]) -> bytes:
        form = self._form
        request = {form.query: query, form.documents: texts, **form.always}
        if form.most is not None:
            request[form.most] = len(texts)
        request |= {name: options[name] for name in form.options if options[name] is not None}
        try:
            return to_json(request)
        except PydanticSerializationError:
            repaired = [without_surrogates(text) for text in texts]
            return to_json(
                {**request, form.query: without_surrogates(query), form.documents: repaired}
            )


def _check_is_about_content(error: CallError) -> None:
    """Raise unless a server refuses the content of one request, and would answer others."""
    is_refusal = error.status in (BAD_REQUEST, TOO_LARGE, UNPROCESSABLE)
    if error.status == SERVER_ERROR:  # llama.cpp
        is_refusal = _IS_LENGTH.search(error.said.lower()) is not None
    if not is_refusal:
        raise stage_error(RERANK, error.reason, error.words) from error


def _number_in(pattern: re.Pattern[str], said: str) -> int | None:
    found = pattern.search(said)
    return None if found is None else int(next(each for each in found.groups() if each))


def _cut(text: str, most_tokens: int) -> str:
    """Cut a text that has too many tokens, leaving clearly fewer than the limit."""
    n_tokens = estimate_tokens(text)
    if n_tokens <= most_tokens:
        return text
    return text[: int(len(text) * _SHARE_OF_TOKENS * most_tokens / n_tokens)]


def read_scores(content: object, n_documents: int, protocol: RerankProtocol) -> FloatArray:
    """Read the score of each document, shape (n_documents,); NaN without a finite one.

    Raises:
        StageError: the answer has another form, a result for a document that was not sent, or two
            results for one document.

    >>> read_scores([{"index": 1, "score": 2.5}], 2, "tei")
    array([nan, 2.5])
    """
    form = FORMS[protocol]
    results = content
    if form.results is not None:
        results = content.get(form.results) if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise _garbage(f"does not have the {protocol} form: check the protocol")
    name = form.score
    scores = np.full(n_documents, np.nan)
    seen = set()
    for result in results:
        index = result.get("index") if isinstance(result, dict) else None
        if type(index) is not int or not 0 <= index < n_documents:  # a bool is an int to Python
            raise _garbage(f"has a result for a document that was not sent ({n_documents:,} were)")
        if index in seen:
            raise _garbage("has two results for one document")
        seen.add(index)
        scores[index] = _finite_or_nan(result.get(name))
    return scores


def _finite_or_nan(score: object) -> float:
    if score is None:
        return math.nan
    if type(score) not in (int, float):
        raise _garbage("has a score that is not a number")
    try:
        number = float(score)  # type: ignore[arg-type]
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _garbage(what: str) -> StageError:
    return StageError(RERANK, f"the server's answer {what}")
