"""Who is answered: requests to a name of this machine, or with the service's token."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import Problem, ProblemKind
from ctxguard.server.settings import Secrets, is_loopback

_WITHOUT_TOKEN = frozenset({Endpoint.HEALTH, Endpoint.CONSOLE})
"""The console has a sign-in of its own."""
_OWN_NAMES = frozenset({b"localhost", b"127.0.0.1", b"::1"})


class OwnHost:
    """Middleware that refuses requests to foreign names where no token is needed.

    Otherwise a page of another site could reach the service by a name of its own.

    Args:
        app: Answers.
        secrets: The tokens.
    """

    def __init__(self, app: ASGIApp, secrets: Secrets) -> None:
        self._app = app
        self._needs_token = secrets.token is not None
        self._console_needs_token = secrets.console_token is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on, or refuse it."""
        if scope["type"] == "http":
            state = scope["state"]
            is_console = state["endpoint"] is Endpoint.CONSOLE
            if not (self._console_needs_token if is_console else self._needs_token):
                _check_host(state["head"].host)
        await self._app(scope, receive, send)


class BearerToken:
    """Middleware that refuses requests without the token that their endpoint needs.

    Args:
        app: Answers.
        secrets: The tokens.
    """

    def __init__(self, app: ASGIApp, secrets: Secrets) -> None:
        self._app = app
        token = None if secrets.token is None else secrets.token.encode()
        metrics = token if secrets.metrics_token is None else secrets.metrics_token.encode()
        self._tokens: dict[Endpoint, bytes | None] = {
            **dict.fromkeys(Endpoint, token),
            Endpoint.METRICS: metrics,
            **dict.fromkeys(_WITHOUT_TOKEN),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on, or refuse it."""
        if scope["type"] == "http":
            state = scope["state"]
            token = self._tokens[state["endpoint"]]
            if token is not None:
                _check_token(state["head"].authorization, token)
        await self._app(scope, receive, send)


def _check_host(host: bytes) -> None:
    name = _host_name(host)
    if name not in _OWN_NAMES and not is_loopback(name.decode("latin-1")):
        raise Problem(
            ProblemKind.FOREIGN_HOST,
            "without a token only requests to localhost, 127.0.0.1 or [::1] are answered",
        )


def _check_token(authorization: bytes, token: bytes) -> None:
    scheme, _, given = authorization.partition(b" ")
    # Compared in any case, so that the time tells nothing of the token.
    is_equal = hmac.compare_digest(given.strip(), token)
    if not is_equal or scheme.lower() != b"bearer":
        raise Problem(
            ProblemKind.UNAUTHORIZED,
            "send the service's token as Authorization: Bearer …",
            headers={"www-authenticate": "Bearer"},
        )


def _host_name(host: bytes) -> bytes:
    """The host of a Host header, without port and brackets.

    >>> _host_name(b"localhost:80"), _host_name(b"[::1]:80"), _host_name(b"a.example")
    (b'localhost', b'::1', b'a.example')
    """
    if host.startswith(b"["):
        return host[1:].partition(b"]")[0]
    return host.partition(b":")[0].lower()
