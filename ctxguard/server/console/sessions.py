"""Controls access to the console: a token earns a signed cookie; other sites' requests are refused.

Reads and writes ended sessions in the store, uses the clock and random bytes, and logs.
"""

import hashlib
import hmac
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.monitor.store import SampleStore

_log = logging.getLogger(__name__)

LASTS_SECONDS = 12 * 3600
MOST_ATTEMPTS = 10
"""How often one address may try to sign in per minute, in each process."""
_ATTEMPTS_SECONDS = 60.0
_MOST_ADDRESSES = 1_000
_MOST_ADDRESS_CHARS = 64
_COOKIE = "ctxguard_console"
_ENDED_KEY = "console sessions that were ended"


class Sessions:
    """Signs the cookies of those who know the token, and checks them.

    Every process with the token and the store accepts the cookie until its holder signs out.
    Changing the token ends all sessions. Without a token everybody is admitted, for a server that
    only this machine can reach. The store remembers ended sessions.
    """

    def __init__(self, token: str | None, store: SampleStore, clock: Callable[[], float]) -> None:
        self._token = token
        self._store = store
        self._clock = clock
        self._lock = Lock()
        self._attempts: OrderedDict[str, list[float]] = OrderedDict()

    @property
    def needs_token(self) -> bool:
        """Whether people sign in."""
        return self._token is not None

    def allows(self, request: Request) -> bool:
        """Return whether the request has a valid cookie or requires none."""
        if self._token is None:
            return True
        session = self._signed(request)
        return session is not None and session not in self._ended()

    def begin(self, given: str, request: Request, response: Response) -> bool:
        """Set the cookie on a response if the token is right; return whether it is."""
        address = _address_of(request)
        if self._token is None or not _same(given, self._token):
            _log.warning("the console: a wrong token from %r", address)
            return False
        _log.info("the console: signed in from %r", address)
        session = f"{int(self._clock()) + LASTS_SECONDS}.{os.urandom(8).hex()}"
        response.set_cookie(
            _COOKIE,
            f"{session}.{self._signature(session)}",
            max_age=LASTS_SECONDS,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return True

    def may_try(self, request: Request) -> bool:
        """Count an attempt to sign in from an address; return whether it is allowed."""
        address, now = _address_of(request), self._clock()
        with self._lock:
            tried = self._attempts.pop(address, [])
            tried = [at for at in tried if now - _ATTEMPTS_SECONDS < at <= now]
            may = len(tried) < MOST_ATTEMPTS
            if may:
                tried.append(now)
            self._attempts[address] = tried
            while len(self._attempts) > _MOST_ADDRESSES:
                self._attempts.popitem(last=False)
        return may

    def end(self, request: Request, response: Response) -> None:
        """End the session everywhere, and have the browser forget the cookie."""
        session = self._signed(request)
        if session is not None:
            with self._lock:
                ended = [*self._ended(), session]
                lasting = [each for each in ended if self._clock() < int(each.partition(".")[0])]
                self._store.set_state(_ENDED_KEY, " ".join(lasting))
        response.delete_cookie(_COOKIE, path=request.scope.get("root_path") or "/")

    def _signed(self, request: Request) -> str | None:
        """Return the session in a request's cookie if the cookie is neither forged nor expired."""
        session, _, signature = request.cookies.get(_COOKIE, "").rpartition(".")
        expires = session.partition(".")[0]
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 20):
            return None
        is_signed = _same(signature, self._signature(session))
        return session if is_signed and self._clock() < int(expires) else None

    def _ended(self) -> list[str]:
        return (self._store.get_state(_ENDED_KEY) or "").split()

    def _signature(self, session: str) -> str:
        key = f"ctxguard console {self._token}".encode()
        return hmac.new(key, session.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _address_of(request: Request) -> str:
    return "" if request.client is None else request.client.host[:_MOST_ADDRESS_CHARS]


def is_same_site(request: Request) -> bool:
    """Return whether a page of this server sent the request, judging by the browser's headers.

    A request without an origin is refused too.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    if origin is None:
        return False
    return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()


def _same(given: str, expected: str) -> bool:
    # Bytes: text may hold characters that compare_digest does not take.
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
