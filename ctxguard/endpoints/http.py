"""The bounded HTTP client behind all endpoints: one POST of JSON, one answer.

Neither aiohttp nor httpx limits what a server may send before its answer: endless interim answers
(``100 Continue``, ``103 Early Hints``) can block an event loop past any deadline. Here httptools
parses the data in slices, and a connection that sends too much is closed. Touches the network, the
clocks, and the environment's proxies; runs a thread; imports httptools and truststore (of an extra)
when a client is made.
"""

import asyncio
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.endpoints.failures import CallError, InvalidReason, connection_error
from ctxguard.errors import ConfigurationError

T = TypeVar("T")

_MAX_EMPTY_BYTES = 2**16
"""The most bytes before an answer's body, including interim answers, or after it."""
_SLICE_BYTES = 2**14
_IDLE_SECONDS = 15.0
_PORTS = {"http": 80, "https": 443}
_KEPT_HEADERS = {b"content-length", b"location", b"retry-after", b"transfer-encoding"}
_SAFE = "/%:@!$&'()*+,;=~-._?"

_of_parents: list[object] = []


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, with the headers that are used here, by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def wait_seconds(self) -> float | None:
        """The waiting time that ``Retry-After`` requests, in seconds or as a date."""
        text = self.headers.get("retry-after", "")
        try:
            return float(text)
        except ValueError:
            pass
        try:
            return parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError, TypeError):
            return None


class _Connection(asyncio.Protocol):
    """A connection over which one answer at a time is read."""

    def __init__(self, parser: Callable[[object], Any], idle: "list[_Connection]") -> None:
        self._new_parser = parser
        self._idle = idle
        self._answer: asyncio.Future[Answer] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self.transport: Any = None
        self.has_received = False
        self._stays_open = False

    async def ask(self, request: bytes, most_bytes: int, *, tunnels: bool = False) -> Answer:
        """Send a request and read its answer, which has no body if the request ``tunnels``."""
        self._parser = self._new_parser(self)
        self._most_bytes, self._tunnels = most_bytes, tunnels
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._n_empty_bytes = 0
        self._has_head = self._is_whole = self.has_received = self._stays_open = False
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        finally:
            self._answer = None

    def keep(self) -> None:
        """Keep this connection for another call, or close it."""
        if not self._stays_open or self.transport.is_closing():
            self.transport.abort()
            return
        self._idle.append(self)
        self._sweeper = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self.close)

    def take(self) -> bool:
        """Cancel the idle timeout, and return whether the connection is still open."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        return not self.transport.is_closing()

    def close(self) -> None:
        if self in self._idle:
            self._idle.remove(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        self.has_received = True
        try:
            for start in range(0, len(data), _SLICE_BYTES):
                piece, n_before = data[start : start + _SLICE_BYTES], len(self._body)
                self._parser.feed_data(piece)
                grew = len(self._body) > n_before
                self._n_empty_bytes = 0 if grew else self._n_empty_bytes + len(piece)
                self._check_length()
                if self._answer.done() or self._is_whole:
                    break
        except Exception:  # the parser's, of several types
            if not self._is_whole:
                self._fail(
                    InvalidReason.UNREACHABLE, "the answer is not HTTP: check the URL's port"
                )
        if self._is_whole:
            self._succeed()

    def _check_length(self) -> None:
        """Abort if an answer is too long, or if too many bytes arrive outside of answers."""
        if len(self._body) > self._most_bytes:
            words = f"an answer of more than {self._most_bytes:,} bytes"
            self._fail(InvalidReason.TOO_LONG, words)
        elif self._n_empty_bytes > _MAX_EMPTY_BYTES:
            words = f"more than {_MAX_EMPTY_BYTES:,} bytes outside any answer"
            self._fail(InvalidReason.UNREACHABLE, words)

    def on_message_begin(self) -> None:
        if self._is_whole:
            self._stays_open = False  # a second answer, to nothing that was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT_HEADERS and not self._is_whole:
            self._headers[name.decode()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._is_whole:
            return
        self._status = self._parser.get_status_code()
        if self._status < 200:
            self._headers.clear()
        else:
            self._has_head, self._is_whole = True, self._tunnels

    def on_body(self, body: bytes) -> None:
        if not self._is_whole:
            self._body += body

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_whole:
            self._is_whole = True
            self._stays_open = self._parser.should_keep_alive()

    def eof_received(self) -> None:
        if self._answer is None or not self._has_head:
            return
        if {"content-length", "transfer-encoding"}.isdisjoint(self._headers):
            self._succeed()  # only the end of the connection ends its body

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError())

    def _succeed(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(self._status, self._headers, bytes(self._body)))

    def _fail(self, reason: InvalidReason, words: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallError(reason, words))
        self.transport.abort()


class HttpClient:
    """POSTs JSON to one server.

    It does not follow redirects, which could send texts and key to a host that nobody chose, and
    does not decompress answers. Proxies are taken from the environment. Threads and event loops may
    share a client; a forked child opens connections of its own.

    Args:
        url: The server's base, such as ``https://api.openai.com/v1``, or the URL of one of
            ``paths``.
        paths: Paths that may follow the base, such as ``/rerank``.
        what: Names the endpoint in errors about its URL and key, such as ``rerank``.
        key: Sent as ``Authorization: Bearer``, and nowhere else.
        extra: The extra that installs the libraries.

    Attributes:
        host: The host of the URL, and its port unless it is the scheme's own.

    Raises:
        ConfigurationError: the URL, key or proxy is invalid.
        MissingExtraError: the extra is not installed.
    """

    _lock = OfProcess(threading.Lock)
    # By loop. A child keeps its parent's as they are: to close them would stop the parent's.
    _idle = OfProcess[MutableMapping[asyncio.AbstractEventLoop, list[_Connection]]](
        dict, _of_parents.append
    )

    def __init__(
        self,
        url: str,
        paths: tuple[str, ...],
        *,
        what: str,
        key: str | None,
        extra: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._parser = require("httptools", extra).HttpResponseParser
        self._truststore = require("truststore", extra)
        parsed = _parsed_url(url, what)
        base = parsed.path.rstrip("/")
        for path in paths:
            base = base.removesuffix(path)
        self._base, self._query = base, parsed.query
        self._host, self._port = str(parsed.hostname), parsed.port or _PORTS[parsed.scheme]
        self._has_tls = parsed.scheme == "https"
        self.host = self._host if parsed.port is None else f"{self._host}:{parsed.port}"
        self._proxy = _proxy_of(parsed)
        shown = f"[{self._host}]" if ":" in self._host else self._host.encode("idna").decode()
        self._authority = f"{shown}:{self._port}"
        fixed = {
            "Host": shown if parsed.port is None else self._authority,
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": "ctxguard",
            **(headers or {}),
        }
        for name, value in (headers or {}).items():
            _check_key(value, f"{what} {name}")
        if key is not None:
            _check_key(key, what)
            fixed["Authorization"] = f"Bearer {key}"
        self._origin = ""
        if self._proxy is not None and not self._has_tls:
            self._origin = f"http://{fixed['Host']}"
            fixed |= self._proxy[-1]
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._tls: ssl.SSLContext | None = None

    async def post(self, path: str, body: bytes, most_bytes: int) -> Answer:
        """Send JSON to a path and return the answer, whatever its status; the caller limits time.

        Raises:
            CallError: the answer is incomplete, or longer than ``most_bytes``.
        """
        target = quote(self._base + path, safe=_SAFE)
        if self._query:
            target += f"?{quote(self._query, safe=_SAFE)}"
        head = f"POST {self._origin}{target} HTTP/1.1\r\n{self._head}"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            connection, is_used = await self._connected()
            try:
                answer = await connection.ask(request, most_bytes)
                break
            except CallError as error:
                raise CallError(error.reason, f"{self.host}: {error.words}") from None
            except OSError as error:
                # Servers close idle connections at any time, also just before a request comes.
                if not is_used or connection.has_received:
                    raise connection_error(error, self.host) from error
        connection.keep()
        return answer

    async def aclose(self) -> None:
        """Close the idle connections of the running event loop; asking again opens new ones."""
        with self._lock:
            idle = self._idle.pop(asyncio.get_running_loop(), [])
        for each in [*idle]:
            each.close()

    def close(self) -> None:
        """Close the connections of the thread for plain calls."""
        if BACKGROUND.is_running:
            BACKGROUND.run(self.aclose())

    async def _connected(self) -> tuple[_Connection, bool]:
        """Return a connection for the running loop, and whether it has been used before."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(loop)
        if idle is None:
            with self._lock:
                for ended in [each for each in self._idle if each.is_closed()]:
                    del self._idle[ended]
                idle = self._idle.setdefault(loop, [])
        while idle:
            connection = idle.pop()
            if connection.take():
                return connection, True
        at, proxy = self.host, self._proxy
        connection = _Connection(self._parser, idle)
        try:
            if proxy is None:
                await self._connect(connection, self._host, self._port, self._has_tls)
                return connection, False
            host, port, has_tls, headers = proxy
            at = f"the proxy {host}:{port} of {self.host}"
            await self._connect(connection, host, port, has_tls)
            if self._has_tls:
                await self._tunnel(connection, at, headers)
                at = self.host
                connection.transport = await loop.start_tls(
                    connection.transport, connection, self._context(), server_hostname=self._host
                )
        except BaseException as error:
            if connection.transport is not None:
                connection.transport.abort()
            if isinstance(error, OSError):
                raise connection_error(error, at) from error
            raise
        return connection, False

    async def _connect(self, connection: _Connection, host: str, port: int, tls: bool) -> None:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"ssl": self._context()} if tls else {}
        if isinstance(loop, asyncio.BaseEventLoop):  # uvloop knows no such option
            options["happy_eyeballs_delay"] = 0.25
        await loop.create_connection(lambda: connection, host, port, **options)

    async def _tunnel(self, connection: _Connection, at: str, headers: dict[str, str]) -> None:
        lines = {"Host": self._authority, **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request = f"CONNECT {self._authority} HTTP/1.1\r\n{head}\r\n".encode()
        answer = await connection.ask(request, 0, tunnels=True)
        if answer.status // 100 != 2:
            mend = "check its user name and password" if answer.status == 407 else "it refuses"
            words = f"{at} answered {answer.status}: {mend}"
            raise CallError(InvalidReason.UNREACHABLE, words, answer.status)

    def _context(self) -> ssl.SSLContext:
        """A TLS context with the system's certificates, even if OpenSSL cannot find them."""
        if self._tls is None:
            self._tls = self._truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return self._tls


class _Background:
    """An event loop on its own thread: the only way to limit the whole time of a plain call."""

    _lock = OfProcess(threading.Lock)
    _loop = OfProcess["asyncio.AbstractEventLoop | None"](lambda: None, _of_parents.append)

    @property
    def is_running(self) -> bool:
        """Whether anything has run yet."""
        return self._loop is not None

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupted caller cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="ctxguard-endpoints", daemon=True
                ).start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(call, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


BACKGROUND = _Background()

_Proxy = tuple[str, int, bool, dict[str, str]]
"""Host, port, whether it speaks TLS, and the headers with its password."""


def _proxy_of(url: SplitResult) -> _Proxy | None:
    """Return the proxy that the environment names for a URL."""
    proxies = getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named or proxy_bypass(url.hostname or ""):
        return None
    parsed = urlsplit(named if "://" in named else f"http://{named}")
    try:
        port = parsed.port or _PORTS.get(parsed.scheme, 0)
    except ValueError:
        port = 0
    if parsed.scheme not in _PORTS or not parsed.hostname or not port:
        raise ConfigurationError(
            f"the environment sets a proxy of an unsupported kind, {parsed.scheme!r}, for "
            f"{url.hostname}: set {url.scheme}_proxy to http://HOST:PORT, or add the host to "
            "no_proxy"
        )
    headers = {}
    if parsed.username is not None:
        pair = f"{unquote(parsed.username)}:{unquote(parsed.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    return parsed.hostname, port, parsed.scheme == "https", headers


def _parsed_url(url: str, what: str) -> SplitResult:
    """Split an endpoint's URL; refuse one that is invalid, or holds a user name or password."""
    try:
        parsed = urlsplit(url)
        parsed.hostname.encode("idna")  # type: ignore[union-attr]
        is_whole = parsed.scheme in _PORTS and parsed.hostname and parsed.port != 0
    except (AttributeError, TypeError, ValueError):
        is_whole = False
    if not is_whole or any(character <= " " for character in url):
        # A URL that could hide a password is not shown.
        shown = "" if "@" in str(url) or "?" in str(url) else f" but {url!r}"
        raise ConfigurationError(
            f"the {what} URL is not http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]{shown}"
        )
    if "@" in parsed.netloc:
        raise ConfigurationError(
            f"the {what} URL holds a user name or password; pass a key instead"
        )
    return parsed


def _check_key(key: str, what: str) -> None:
    """Check that a header can carry a key; an error names only the invalid character.

    >>> _check_key("sk-1\\n", "rerank")
    Traceback (most recent call last):
    ctxguard.errors.ConfigurationError: the rerank key must be printable ASCII characters, but it \
contains a line break; copy it again
    """
    odd = next((each for each in key if not (each.isascii() and each.isprintable())), None)
    if odd is None and key.strip():
        return
    holds = "nothing"
    if odd is not None:
        holds = "a line break" if odd in "\r\n" else f"the character U+{ord(odd):04X}"
        if odd in "“”‘’„":
            holds = f"a curly quote ({odd})"
    raise ConfigurationError(
        f"the {what} key must be printable ASCII characters, but it contains {holds}; copy it again"
    )
