"""Who may see the console: a token gives a signed cookie; requests of other sites are refused."""

import hashlib
import hmac
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

LASTS_SECONDS = 12 * 3600
_COOKIE = "ctxguard_console"


class Sessions:
    """Signs the cookies of those who know the token, and checks them.

    Every process that has the token accepts the cookie; another token ends all sessions.

    Args:
        token: None lets everybody in, for a server that only this machine reaches.
        clock: Seconds since the epoch.
    """

    def __init__(self, token: str | None, clock: Callable[[], float] = time.time) -> None:
        self._token = token
        self._clock = clock

    @property
    def needs_token(self) -> bool:
        """Whether people sign in."""
        return self._token is not None

    def allows(self, request: Request) -> bool:
        """Whether the request has a valid cookie, or needs none."""
        if self._token is None:
            return True
        expires, _, signature = request.cookies.get(_COOKIE, "").partition(".")
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 20):
            return False
        is_signed = _same(signature, self._signature(expires))
        return is_signed and self._clock() < int(expires)

    def begin(self, given: str, request: Request, response: Response) -> bool:
        """Set the cookie on a response if the token is right; whether it is."""
        if self._token is None or not _same(given, self._token):
            return False
        expires = str(int(self._clock()) + LASTS_SECONDS)
        response.set_cookie(
            _COOKIE,
            f"{expires}.{self._signature(expires)}",
            max_age=LASTS_SECONDS,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return True

    def end(self, request: Request, response: Response) -> None:
        """Have the browser forget the cookie."""
        response.delete_cookie(_COOKIE, path=request.scope.get("root_path") or "/")

    def _signature(self, expires: str) -> str:
        key = f"ctxguard console {self._token}".encode()
        return hmac.new(key, expires.encode(), hashlib.sha256).hexdigest()


def is_same_site(request: Request) -> bool:
    """Whether a page of this server sent the request, as every browser tells.

    A request that does not say where it comes from is refused too.
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
