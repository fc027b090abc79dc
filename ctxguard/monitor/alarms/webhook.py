"""The webhook: alarms sent to a URL as JSON, from a thread of its own.

Whatever the other side does, whoever sends an alarm waits for nothing and gets no error.
"""

import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ctxguard.errors import ConfigurationError
from ctxguard.forks import start_afresh_in_children

_log = logging.getLogger(__name__)

_AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class WebhookAccounts(NamedTuple):
    """Where every alarm is that was handed over; the four add up to all of them.

    Attributes:
        failed: Given up after the last attempt, or refused by the other side for good.
        dropped: Not taken, because too many waited or the webhook was closed.
    """

    delivered: int
    failed: int
    dropped: int
    pending: int


@dataclass(slots=True)
class _Counts:
    delivered: int = 0
    failed: int = 0
    dropped: int = 0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    # A redirected POST would arrive as a GET without its body, and look delivered.
    def redirect_request(self, *_: object) -> None:
        return None


class Webhook:
    """POSTs alarms to one URL, one after the other, oldest first.

    Tried again, with twice the pause each time, where the other side is unreachable, too slow,
    overloaded (408, 425, 429) or broken (5xx); any other answer but 2xx is final. The URL is
    never logged: it may hold a secret. A proxy is taken from the environment, as urllib does.

    Args:
        url: ``http`` or ``https``.
        timeout_seconds: For which the other side may be silent, > 0.
        attempts: At most this many for each alarm, ≥ 1.
        backoff_seconds: Pause after the first failed attempt, ≥ 0.
        capacity: The most alarms that may wait, ≥ 1; more are dropped and counted.

    Raises:
        ConfigurationError: a URL of another kind, or a number out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 5.0,
        attempts: int = 5,
        backoff_seconds: float = 1.0,
        capacity: int = 100,
    ) -> None:
        if not _is_http(url):
            raise ConfigurationError(
                "the webhook's URL must be http:// or https:// with a host, and no user name"
            )
        if not 0.0 < timeout_seconds < float("inf"):
            raise ConfigurationError(f"timeout_seconds {timeout_seconds!r} must be > 0 and finite")
        if not 0.0 <= backoff_seconds < float("inf"):
            raise ConfigurationError(f"backoff_seconds {backoff_seconds!r} must be ≥ 0 and finite")
        if attempts < 1 or capacity < 1:
            raise ConfigurationError(
                f"attempts {attempts!r} and capacity {capacity!r} must be at least 1"
            )
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._attempts = attempts
        self._backoff_seconds = backoff_seconds
        self._capacity = capacity
        self._opener = urllib.request.build_opener(_NoRedirects)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget what waits and was counted; the thread does not exist in a forked child."""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._waiting: deque[bytes] = deque()
        self._in_hand = 0
        self._counts = _Counts()
        self._thread: threading.Thread | None = None

    def send(self, payload: Mapping[str, Any]) -> bool:
        """Hand an alarm over, as JSON values; never waits.

        Returns:
            Whether it was taken.
        """
        body = json.dumps(payload, allow_nan=False).encode()
        with self._changed:
            if self._closing.is_set() or len(self._waiting) >= self._capacity:
                self._counts.dropped += 1
                return False
            self._waiting.append(body)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ctxguard-webhook", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return True

    def accounts(self) -> WebhookAccounts:
        """Where every alarm is that was handed over so far."""
        with self._changed:
            counts = self._counts
            pending = len(self._waiting) + self._in_hand
            return WebhookAccounts(counts.delivered, counts.failed, counts.dropped, pending)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Take nothing more, and send what waits, without pauses between attempts.

        Returns:
            Whether nothing is pending any more; what is stays behind on a daemon thread.
        """
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)
        return self.accounts().pending == 0

    def _run(self) -> None:
        changed, closing = self._changed, self._closing
        while True:
            with changed:
                while not self._waiting:
                    if closing.is_set():
                        return
                    changed.wait()
                body = self._waiting.popleft()
                self._in_hand = 1
            delivered = self._deliver(body)
            with changed:
                self._in_hand = 0
                self._counts.delivered += delivered
                self._counts.failed += not delivered
                changed.notify_all()

    def _deliver(self, body: bytes) -> bool:
        for attempt in range(self._attempts):
            if attempt:
                self._closing.wait(self._backoff_seconds * 2.0 ** (attempt - 1))
            problem, final = self._post(body)
            if problem is None:
                return True
            if final:
                break
        _log.warning(
            "webhook: an alarm was not delivered after %d attempts: %s", attempt + 1, problem
        )
        return False

    def _post(self, body: bytes) -> tuple[str | None, bool]:
        """One attempt: what went wrong, if anything, and whether trying again is useless."""
        request = urllib.request.Request(  # noqa: S310 - http and https only, see __init__
            self._url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self._timeout_seconds):
                return None, True
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP {error.code}", error.code < 500 and error.code not in _AGAIN
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, False
        except Exception as error:
            # A thread that died would lose every later alarm in silence.
            return type(error).__name__, True


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port refuses one that is no number.
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.username is None
            and parts.port != 0
            and url.isascii()
            and url.isprintable()
            and " " not in url
        )
    except ValueError:
        return False
