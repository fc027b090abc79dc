"""Clients that misuse the service, until they are killed; each form is one of a known attack.

python -m benchmarks._serve_attacks PORT CORE FORM[,FORM…]
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import uvloop

TOKEN = "a token of the benchmark"  # noqa: S105
_AUTHORISED = f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
_COLLIDING = 2**61 - 1
"""All of its multiples have one hash."""


def head_of(path: str, headers: str, method: str = "POST") -> bytes:
    """The head of a request, but for its end."""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}".encode()


def request_of(path: str, body: object) -> bytes:
    """An authorised request with a body in JSON, which bytes are already."""
    text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return head_of(path, _AUTHORISED) + b"Content-Length: %d\r\n\r\n" % len(text) + text


async def _ask_on(port: int, request: bytes) -> None:
    """Send one request after another, and read the answers."""
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while True:
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


async def _send_on(port: int, head: bytes, piece: bytes, n: int, seconds: float = 0.0) -> None:
    """Send a head and n pieces, read nothing for so long, and begin again on a new connection."""
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head)
            for _ in range(n):
                writer.write(piece)
                await writer.drain()
            await asyncio.sleep(seconds)
            writer.transport.abort()
        await asyncio.sleep(0.0)


def _colliding(port: int) -> list[Coroutine[Any, Any, None]]:
    """Filters of integers that Python hashes alike, 379 KB each."""
    values = [n * _COLLIDING for n in range(16_000)]
    request = request_of("/v1/context", {"query": "q", "where": {"n": values}})
    return [_ask_on(port, request) for _ in range(2)]


def _names(port: int) -> list[Coroutine[Any, Any, None]]:
    """Candidates with 20,000 names of signals, and of legs."""
    bodies = []
    for field in ("signals", "legs"):
        candidates = [
            {"id": str(n), "score": 0.5, field: {f"{n} {m}": 1.0 for m in range(200)}}
            for n in range(100)
        ]
        bodies.append({"query": "q", "candidates": candidates})
    return [_ask_on(port, request_of("/v1/filter", each)) for each in bodies]


def _values(port: int) -> list[Coroutine[Any, Any, None]]:
    """Bodies of up to 16 MiB: 1.2 million keys, 5 million empty lists, halves of pairs, marks."""
    marks = "\u0301\u0323\u0327\u0345" * 90
    texts = json.dumps([f"{n} {marks}" for n in range(10_000)], ensure_ascii=False).encode()
    keys = b",".join([b'"%d":1' % n for n in range(1_200_000)])
    some_keys = b",".join([b'"%0140d":1' % n for n in range(95_000)])
    lists = b",".join([b"[]"] * 5_500_000)
    halves = b'"' + b"\\ud800" * 2_600_000 + b'"'
    calls = []
    for value in (b"{%s}" % keys, b"[%s]" % lists, b"{%s}" % some_keys, b"[%s]" % halves):
        for half in (b"", b"\\ud800"):
            body = b'{"query":"%s","candidates":[{"id":"a","metadata":{"a":%s}}]}' % (half, value)
            calls.append(_ask_on(port, request_of("/v1/filter", body)))
    rerank = b'{"query":"q","documents":%s}' % texts
    return [*calls, *[_ask_on(port, request_of("/rerank", rerank)) for _ in range(2)]]


def _interim(port: int) -> list[Coroutine[Any, Any, None]]:
    """Documents for a reranker that sends 10 MB of interim answers first."""
    # A name of its own is asked for though the reranker failed before.
    request = request_of("/rerank", {"query": "q", "documents": ["a"], "model": "m"})
    return [_ask_on(port, request) for _ in range(4)]


async def hostile_reranker(announce: Callable[[str], object]) -> None:
    """Send megabytes of interim answers before any answer, until killed."""
    interim = b"HTTP/1.1 100\r\n\r\n" * 650_000

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.read(2**16):
                writer.write(interim)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    announce(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await server.serve_forever()


def _bodies(port: int) -> list[Coroutine[Any, Any, None]]:
    """Bodies of 16 MB where no token is needed, of which the end never comes."""
    length, piece = b"Content-Length: 16000000\r\n\r\n", b" " * 2**16
    chunked, chunk = b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + piece + b"\r\n"
    calls: list[Coroutine[Any, Any, None]] = []
    for path in ("/healthz", "/readyz", "/console/sign-in", "/console/"):
        head = head_of(path, "Content-Type: application/json\r\n")
        calls += [_send_on(port, head + length, piece, 243, 10.0) for _ in range(8)]
        calls += [_send_on(port, head + chunked, chunk, 243, 10.0) for _ in range(8)]
    return calls


def _pipelined(port: int) -> list[Coroutine[Any, Any, None]]:
    """Requests without a token, thousands on a connection, of which no answer is read."""
    one = head_of("/v1/filter", "\r\n", "GET")
    endless = [_send_on(port, b"", one * 1_000, 1_000) for _ in range(300)]
    return endless + [_send_on(port, b"", one * 400, 1, 2.0) for _ in range(1_050)]


def _slow(port: int) -> list[Coroutine[Any, Any, None]]:
    """2,000 idle connections, 200 that send half a request, 8 that send bodies of 1 GB."""
    head = head_of("/v1/filter", _AUTHORISED)
    half = head + b"Content-Length: 1000000\r\n\r\n" + b" " * 900
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    calls = [_send_on(port, b"", b"", 0, 10.0) for _ in range(2_000)]
    calls += [_send_on(port, half if n % 2 else head, b"", 0, 10.0) for n in range(200)]
    huge = head + b"Transfer-Encoding: chunked\r\n\r\n"
    return calls + [_send_on(port, huge, chunk, 2**14) for _ in range(8)]


FORMS: dict[str, Callable[[int], list[Coroutine[Any, Any, None]]]] = {
    "filters": _colliding,
    "names": _names,
    "values": _values,
    "interim": _interim,
    "bodies": _bodies,
    "pipelines": _pipelined,
    "slow": _slow,
}


async def _attack(port: int, forms: list[str]) -> None:
    calls = [call for form in forms for call in FORMS[form](port)]
    # Long bodies take seconds to make, before which nothing is attacked.
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*calls)


def main() -> None:
    """Attack on one core until killed."""
    port, core, forms = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    # The client that is measured runs on the same core, and must not wait for this.
    os.nice(10)
    uvloop.run(_attack(int(port), forms.split(",")))


if __name__ == "__main__":
    main()
