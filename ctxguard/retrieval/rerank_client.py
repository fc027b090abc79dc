"""The client of the rerank protocol: scores of passages from a server that has a reranker."""

import asyncio
import math
import ssl
import threading
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import finalize

import numpy as np
from pydantic_core import PydanticSerializationError, from_json, to_json

from ctxguard._support.error_text import describe_error
from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard._support.json_values import MOST_VALUES, has_more_values
from ctxguard.core.types import FailureKind, FloatArray
from ctxguard.errors import ConfigurationError, OverloadedError, StageError, StageUnavailableError
from ctxguard.resilience import UnansweredError
from ctxguard.retrieval.answer_head import bounded_connector
from ctxguard.retrieval.hybrid.candidates import RERANK
from ctxguard.retrieval.index.passages import without_surrogates
from ctxguard.retrieval.rerank_forms import FORMS, Protocol, RerankForm

_OK = 200
_REDIRECTS = range(300, 400)
_TOO_MANY_REQUESTS = 429
_REDIRECT = "a redirect, which is not followed: give the URL that it leads to"
_CAUSES = {
    400: "it refuses the request: check the model's name and the protocol",
    401: "it does not accept the key",
    403: "it does not accept the key",
    404: "it has no reranker there: check the URL and the model's name",
    413: "the request is too large for it: send fewer or shorter documents, or raise its limit "
    "(TEI: --max-client-batch-size, --payload-limit)",
    422: "it refuses the request: check the model's name, the protocol, and how many documents it "
    "takes at once (TEI: --max-client-batch-size)",
}
_MAX_ANSWER_BYTES = 2**20
_BYTES_PER_RESULT = 256
_BYTES_PER_SENT_BYTE = 3
"""Servers may send the documents back; é takes two bytes in UTF-8 and six as ``\\u00e9``."""

_of_parents: list[object] = []


class RerankClient:
    """Scores documents by a reranker that another server runs.

    A redirect is not followed, so that documents and key go to no host that nobody chose; a proxy
    is one that the environment names. Answers are read up to a size that follows from the request,
    after at most 4 KiB of interim ones, are not unpacked, and must be exact: a result for a
    document that was not sent, or two for one document, is garbage, since scores could belong to
    other documents. What the server says beside scores is neither logged nor quoted in errors,
    because it may quote documents.

    Threads and event loops may share a client. A forked child opens connections of its own.

    Args:
        url: The server's base, such as ``http://localhost:8080`` or ``https://api.jina.ai/v1``, or
            the whole URL of its endpoint, which ends in ``/rerank`` or ``/score``.
        protocol: The form of requests and answers; see ``ctxguard.retrieval.rerank_forms``. TEI is
            asked for logits.
        key: Sent as ``Authorization: Bearer`` in the header, and nowhere else; None without one.
        model: Name of the model at the server; None for the server's own choice.
        timeout_seconds: For a whole call, from connecting to the last byte, > 0.

    Attributes:
        fingerprint: Names the protocol and the model, without the URL.

    Raises:
        ConfigurationError: a setting that cannot work.
        MissingExtraError: the extra ``rerank`` is not installed.
    """

    _lock = OfProcess(threading.Lock)
    # By loop. A child keeps its parent's as they are: to close them would stop the parent's.
    _clients = OfProcess[dict[asyncio.AbstractEventLoop, Any]](dict, _of_parents.append)
    _background = OfProcess["_Background | None"](
        lambda: None, lambda parents: parents and parents.stop.detach()
    )

    def __init__(
        self,
        url: str,
        *,
        protocol: Protocol = "cohere",
        key: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> None:
        if protocol not in FORMS:
            names = ", ".join(FORMS)
            raise ConfigurationError(f"rerank protocol {protocol!r} is unknown; use one of {names}")
        if not 0.0 < timeout_seconds < math.inf:
            raise ConfigurationError(
                f"rerank timeout_seconds {timeout_seconds!r} must be finite and > 0"
            )
        self._library = require("aiohttp", "rerank")
        self._form = FORMS[protocol]
        parsed = _endpoint(url, self._form)
        self._url = require("yarl", "rerank").URL(parsed.geturl())
        self._by_proxy = parsed.scheme in getproxies() and not proxy_bypass(parsed.hostname or "")
        self._headers = _headers(key)
        self._protocol = protocol
        self._model = model
        self._timeout_seconds = timeout_seconds
        self.fingerprint = f"{protocol} {model or '(default model)'}"

    async def ascore(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        max_tokens_per_doc: int | None = None,
    ) -> FloatArray:
        """Score each document, shape (n,), higher is better.

        NaN if the server gave a document no finite score. Lone surrogates, which UTF-8 cannot
        hold, are sent as U+FFFD.

        Args:
            query: The query.
            documents: The documents; none gives shape (0,) without a call.
            model: Name of the model for this call; None for the client's.
            max_tokens_per_doc: Passed on if the protocol has it; None leaves it to the server.

        Raises:
            UnansweredError: no whole answer in time.
            OverloadedError: the server refused for its rate limit.
            StageUnavailableError: the server cannot be reached, or refused.
            StageError: the answer is no answer to this request, is too long, or has no score.
        """
        if not documents:
            return np.zeros(0)
        body = self._body(query, documents, model or self._model, max_tokens_per_doc)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._post(
                    body,
                    _MAX_ANSWER_BYTES
                    + _BYTES_PER_RESULT * len(documents)
                    + _BYTES_PER_SENT_BYTE * len(body),
                )
        except TimeoutError:
            raise UnansweredError(
                RERANK,
                FailureKind.TIMEOUT,
                f"no whole answer from {self._url.host} within {self._timeout_seconds:g} s",
            ) from None
        except (self._library.ClientError, OSError) as error:
            raise StageUnavailableError(
                RERANK, f"{self._url.host} cannot be reached ({describe_error(error)})"
            ) from error
        return read_scores(answer, len(documents), self._protocol)

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Score for callers without an event loop, as a `ctxguard.Reranker` is called."""
        if not texts:
            return np.zeros(0)
        with self._lock:
            if self._background is None:
                self._background = _start_background(self, self._clients)
            loop = self._background.loop
        return asyncio.run_coroutine_threadsafe(self.ascore(query, texts), loop).result()

    async def aclose(self) -> None:
        """Close the connections of the running event loop; scoring again opens new ones."""
        with self._lock:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def close(self) -> None:
        """Close the connections of ``score``; scoring again opens new ones."""
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.stop()
            background.thread.join()

    def _connected(self) -> Any:
        """Return the client of the running loop: connections belong to one."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                for ended in [each for each in self._clients if each.is_closed()]:
                    self._clients.pop(ended).detach()
                client = self._clients[loop] = self._session()
            return client

    def _session(self) -> Any:
        library = self._library
        context: Any = True
        if self._url.scheme == "https":
            # The certificates that the system trusts, also where OpenSSL does not find them.
            context = require("truststore", "rerank").SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return library.ClientSession(
            auto_decompress=False,
            connector=bounded_connector(library, limit=0, ssl=context),
            cookie_jar=library.DummyCookieJar(),
            headers=self._headers,
            timeout=library.ClientTimeout(),
            trust_env=self._by_proxy,
        )

    async def _post(self, body: bytes, most_bytes: int) -> bytes:
        session = self._connected()
        # Written in pieces if it is large.
        data = body if len(body) <= _MAX_ANSWER_BYTES else BytesIO(body)
        async with session.post(self._url, data=data, allow_redirects=False) as response:
            self._check_status(response.status)
            answer = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > most_bytes:
                    raise StageError(
                        RERANK, f"{self._url.host} sent an answer of more than {most_bytes:,} bytes"
                    )
            return bytes(answer)

    def _check_status(self, status: int) -> None:
        if status == _OK:
            return
        answered = f"{self._url.host} answered {status}"
        if status == _TOO_MANY_REQUESTS:
            raise OverloadedError(RERANK, f"{answered}: its rate limit is reached; call less often")
        cause = _REDIRECT if status in _REDIRECTS else _CAUSES.get(status, "it failed")
        raise StageUnavailableError(RERANK, f"{answered}: {cause}")

    def _body(
        self, query: str, documents: Sequence[str], model: str | None, max_tokens: int | None
    ) -> bytes:
        try:
            return to_json(self._request(query, documents, model, max_tokens))
        except PydanticSerializationError:
            repaired = [without_surrogates(document) for document in documents]
            return to_json(self._request(without_surrogates(query), repaired, model, max_tokens))

    def _request(
        self, query: str, documents: Sequence[str], model: str | None, max_tokens: int | None
    ) -> dict[str, object]:
        form = self._form
        request = {form.query: query, form.documents: list(documents), **form.always}
        if form.most is not None:
            request[form.most] = len(documents)
        options = {"model": model, "max_tokens_per_doc": max_tokens}
        for name in form.options:
            if options[name] is not None:
                request[name] = options[name]
        return request


class _Background(NamedTuple):
    """An event loop on a thread of its own: only there can a plain call be bounded as a whole."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    stop: "finalize[[], RerankClient]"
    """Closes the loop's connections and ends it; called when the client is no longer used."""


def _start_background(
    owner: RerankClient, clients: MutableMapping[asyncio.AbstractEventLoop, Any]
) -> _Background:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def until_stopped() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        started.set_result((loop, stop))
        await stop.wait()
        client = clients.pop(loop, None)
        if client is not None:
            await client.close()

    thread = threading.Thread(
        target=lambda: asyncio.run(until_stopped()), name="ctxguard-rerank", daemon=True
    )
    thread.start()
    loop, stop = started.result()
    return _Background(loop, thread, finalize(owner, partial(loop.call_soon_threadsafe, stop.set)))


def read_scores(answer: bytes, n_documents: int, protocol: Protocol) -> FloatArray:
    """Read the score of each document, shape (n_documents,); NaN without a finite one.

    Args:
        answer: The body of a server's answer.
        n_documents: How many documents were sent, ≥ 1.
        protocol: The form of the answer.

    Raises:
        StageError: the answer has another form, too many values, a result for a document that was
            not sent, two results for one document, or no score at all.

    >>> read_scores(b'[{"index": 1, "score": 2.5}]', 2, "tei")
    array([nan, 2.5])
    """
    if has_more_values(answer):
        raise _garbage(f"has more than {MOST_VALUES:,} values")
    try:
        content = from_json(answer)
    except ValueError:
        raise _garbage("is not JSON") from None
    form = FORMS[protocol]
    results = content
    if form.results is not None:
        results = content.get(form.results) if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise _garbage(f"is not of the {protocol} form: check the protocol")
    name = form.score
    scores = np.full(n_documents, np.nan)
    seen = set()
    for result in results:
        index = result.get("index") if isinstance(result, dict) else None
        if type(index) is not int or not 0 <= index < n_documents:  # a bool is an int to Python
            raise _garbage(f"has a result for none of the {n_documents:,} documents")
        if index in seen:
            raise _garbage("has two results for one document")
        seen.add(index)
        scores[index] = _finite_or_nan(result.get(name))
    if np.isnan(scores).all():
        raise _garbage(f"has no finite {name}")
    return scores


def _finite_or_nan(score: object) -> float:
    if score is None:
        return math.nan
    if type(score) not in (int, float):
        raise _garbage("has a score that is no number")
    try:
        number = float(score)  # type: ignore[arg-type]
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _garbage(what: str) -> StageError:
    return StageError(RERANK, f"the server's answer {what}")


def _endpoint(url: str, form: RerankForm) -> SplitResult:
    """Return the URL of the endpoint, from it or from the server's base.

    Raises:
        ConfigurationError: it is no such URL, or holds a user name or password.
    """
    try:
        parsed = urlsplit(url)
        is_whole = parsed.scheme in ("http", "https") and parsed.hostname and parsed.port != 0
    except (AttributeError, TypeError, ValueError):
        is_whole = False
    if not is_whole or any(character <= " " for character in url):
        raise ConfigurationError(
            "the rerank URL is not http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]"
        )
    if "@" in parsed.netloc:
        raise ConfigurationError("the rerank URL holds a user name or password; pass a key instead")
    path = parsed.path.rstrip("/")
    if not path.endswith(form.paths[0]):
        path += form.paths[0]
    return parsed._replace(path=path, fragment="")


def _headers(key: str | None) -> dict[str, str]:
    """Build the headers of every request.

    Raises:
        ConfigurationError: no header can carry the key.
    """
    headers = {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
    }
    if key is None:
        return headers
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise ConfigurationError("the rerank key must be printable ASCII characters, not empty")
    return headers | {"Authorization": f"Bearer {key}"}
