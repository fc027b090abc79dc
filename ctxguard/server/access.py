"""Who is answered: requests to a name of this machine, or with the service's token."""

import hmac
from functools import lru_cache

from ctxguard.server.limits import Head
from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import Problem, ProblemKind
from ctxguard.server.settings import Secrets, is_loopback


class Access:
    """Refuses requests without the token that their endpoint needs.

    Where no token is needed it refuses requests to foreign names: otherwise a page of another site
    could reach the service by a name of its own.

    Args:
        secrets: The tokens.
    """

    def __init__(self, secrets: Secrets) -> None:
        token = None if secrets.token is None else secrets.token.encode()
        metrics = token if secrets.metrics_token is None else secrets.metrics_token.encode()
        self._tokens: dict[Endpoint, bytes | None] = {
            **dict.fromkeys(Endpoint, token),
            Endpoint.METRICS: metrics,
            Endpoint.HEALTH: None,
            Endpoint.CONSOLE: None,  # it has a sign-in of its own
        }
        self._on_any_host = dict.fromkeys(Endpoint, token is not None)
        self._on_any_host[Endpoint.CONSOLE] = secrets.console_token is not None

    def check(self, endpoint: Endpoint, head: Head) -> None:
        """Let a request with these headers pass.

        Raises:
            Problem: it is refused.
        """
        if not self._on_any_host[endpoint] and not _is_own(head.get(b"host", b"")):
            raise Problem(
                ProblemKind.FOREIGN_HOST,
                "without a token only requests to localhost, 127.0.0.1 or [::1] are answered",
            )
        token = self._tokens[endpoint]
        if token is not None:
            _check_token(head.get(b"authorization", b""), token)


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


@lru_cache(maxsize=64)
def _is_own(host: bytes) -> bool:
    """Whether a Host header, with or without a port, names this machine.

    >>> _is_own(b"localhost:80"), _is_own(b"[::1]:80"), _is_own(b"a.example")
    (True, True, False)
    """
    name = host[1:].partition(b"]")[0] if host[:1] == b"[" else host.partition(b":")[0].lower()
    return is_loopback(name.decode("latin-1"))
