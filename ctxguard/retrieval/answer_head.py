"""Bounds what an HTTP server may send before its answer.

Clients read interim answers (``100 Continue``, ``103 Early Hints``) in any number, without
yielding: some megabytes of them hold an event loop for seconds, beyond any deadline.
"""

import asyncio
import re
from typing import Any, cast

_INTERIM = re.compile(rb"[\r\n]*HTTP/1\.\d +1\d\d")
_BEGINNING = 64
"""Bytes that tell an interim answer from another."""
MOST_INTERIM_BYTES = 4096


class AnswerHead:
    """Counts what comes before one answer."""

    def __init__(self) -> None:
        self._begun = b""
        self._is_passed = False

    def admit(self, data: bytes) -> bool:
        """Note what has arrived; False where too much came before the answer.

        >>> head = AnswerHead()
        >>> head.admit(b"HTTP/1.1 103 Early Hints\\r\\n\\r\\nHTTP/1.1 200 OK\\r\\n")
        True
        >>> AnswerHead().admit(b"HTTP/1.1 100\\r\\n\\r\\n" * 300)
        False
        """
        if self._is_passed:
            return True
        begun = self._begun = self._begun + data[: MOST_INTERIM_BYTES + _BEGINNING]
        at = 0
        while _INTERIM.match(begun, at):
            end = begun.find(b"\r\n\r\n", at)
            if end < 0:
                return len(begun) <= MOST_INTERIM_BYTES
            at = end + 4
        self._is_passed = len(begun) - at >= _BEGINNING
        return at <= MOST_INTERIM_BYTES


class _BoundedProtocol(asyncio.Protocol):
    """Stands before a client's protocol, and breaks off the connection for too many heads."""

    def __init__(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport
        self.head = AnswerHead()

    def data_received(self, data: bytes) -> None:
        if self.head.admit(data):
            self._protocol.data_received(data)
        else:
            self._transport.abort()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def bounded_connector(library: Any, **settings: Any) -> Any:
    """Make a connector of aiohttp whose connections bound what comes before each answer.

    Args:
        library: The module ``aiohttp``.
        **settings: As ``TCPConnector``'s.
    """

    class BoundedConnector(library.TCPConnector):  # type: ignore[misc]
        async def connect(self, *arguments: Any, **options: Any) -> Any:
            """Connect, or take a connection that is open, for one request."""
            connection = await super().connect(*arguments, **options)
            transport = cast(asyncio.Transport, connection.transport)
            protocol = transport.get_protocol()
            if isinstance(protocol, _BoundedProtocol):
                protocol.head = AnswerHead()
            else:
                bounded = _BoundedProtocol(cast(asyncio.Protocol, protocol), transport)
                transport.set_protocol(bounded)
            return connection

    return BoundedConnector(**settings)
