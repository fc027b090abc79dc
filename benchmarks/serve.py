"""What the HTTP service costs a request, beside a raw echo of the same bytes on the same stack.

    python -m benchmarks.serve --json serve.json --check
    python -m benchmarks.serve --hostile

The service and the echo (Starlette on uvicorn, with httptools and uvloop, one process each) run at
the same time and are asked in turns. A request has 50 candidates of together 11 KB; scores are at
hand, and a calibrated P(relevant) decides. With ``--hostile`` other clients open 2,000 connections,
send halves of requests and bodies of 1 GB, while one client goes on asking.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks._timing import Timing, environment, interleaved

SUMMARY = "What the HTTP service costs a request, beside a raw echo of the same bytes."
CANDIDATES = 50
BYTES = 11_000
MOST_RATIO = 2.0
MOST_P99_SECONDS = 0.01
CLIENTS = 16
PACKAGES = ("ctxguard", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "numpy")
PATHS = ("/rerank", "/v1/filter")

_IDLE, _SLOW, _HUGE = 2_000, 200, 8
_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One path, asked of the service and echoed.

    Attributes:
        service: Timing of the service, by one client.
        echo: Timing of the echo of the same body, by one client.
        service_per_second: Requests a second by 16 clients.
        echo_per_second: The same of the echo.
        service_cpu: Processor time of the service for one of those requests, in microseconds.
        echo_cpu: The same of the echo.
    """

    service: Timing
    echo: Timing
    service_per_second: float
    echo_per_second: float
    service_cpu: float
    echo_cpu: float

    @property
    def ratio(self) -> float:
        """The service's median over the echo's."""
        return self.service.p50 / self.echo.p50


def body_of(path: str) -> bytes:
    """A request of 50 candidates, about 11 KB long."""
    words = random.Random(0)
    texts = [
        "".join(words.choices("abcdefghijklmnopqrstuvwxyz ", k=BYTES // CANDIDATES - 10))
        for _ in range(CANDIDATES)
    ]
    if path == "/rerank":
        return json.dumps({"model": "m", "query": "what is it", "documents": texts}).encode()
    candidates = [
        {"id": f"passage-{at}", "score": 0.9 - at / 100, "text": text[:165]}
        for at, text in enumerate(texts)
    ]
    return json.dumps({"query": "what is it", "candidates": candidates}).encode()


def request_of(path: str) -> bytes:
    """A whole HTTP request."""
    body = body_of(path)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def serving(what: str) -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its port and its process id."""
    process = subprocess.Popen(  # noqa: S603 - this package's own
        [sys.executable, "-m", "benchmarks._serve_app", what], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = urlsplit(process.stdout.readline().strip()).port
        assert port is not None
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(30)


class Client:
    """One connection that asks and waits."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> None:
        """Send a request and read its answer, which must be 200."""
        self._socket.sendall(request)
        answer = self._socket.recv(2**18)
        while (size := _size(answer)) is None or len(answer) < size:
            piece = self._socket.recv(2**18)
            assert piece, "the connection was closed"
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]


def _size(answer: bytes) -> int | None:
    """Length of the whole answer; None while its head is not whole."""
    head, end, _ = answer.partition(b"\r\n\r\n")
    if not end:
        return None
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(head) + len(end) + int(length)


async def _answered(port: int, request: bytes, seconds: float) -> int:
    """How many requests of 16 clients are answered."""
    until, answered = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            size = _size(head)
            assert size is not None
            await reader.readexactly(size - len(head))
            answered += 1
        writer.close()

    await asyncio.gather(*[ask() for _ in range(CLIENTS)])
    return answered


def measured(rounds: int, calls: int) -> dict[str, Case]:
    """Every path, timed beside its echo."""
    requests = {path: request_of(path) for path in PATHS}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(name)) for name in ("service", "echo")}
        cases = {
            f"{name} {path}": partial(Client(port).ask, requests[path])
            for name, (port, _) in servers.items()
            for path in PATHS
        }
        timings = interleaved(cases, rounds=rounds, calls=calls, seconds=2.0)
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(max(rounds // 4, 3)):
            for name in cases:
                which, path = name.split(" ")
                port, pid = servers[which]
                before, began = _cpu_seconds(pid), time.perf_counter()
                answered = asyncio.run(_answered(port, requests[path], 1.0))
                cpu, wall = _cpu_seconds(pid) - before, time.perf_counter() - began
                rates[name].append((answered / wall, 1e6 * cpu / answered))
    return {
        path: Case(
            timings[f"service {path}"],
            timings[f"echo {path}"],
            *[statistics.median([rate for rate, _ in rates[f"{name} {path}"]]) for name in servers],
            *[statistics.median([cpu for _, cpu in rates[f"{name} {path}"]]) for name in servers],
        )
        for path in PATHS
    }


def hostile(calls: int) -> dict[str, float]:
    """What one client meets while others misuse the service, and the memory that it holds."""
    request, head = request_of("/v1/filter"), request_of("/v1/filter").partition(b"\r\n\r\n")[0]
    head = head.rpartition(b"\r\n")[0] + b"\r\n"
    with serving("service") as (port, pid):
        client = Client(port)
        alone = [_seconds(client, request) for _ in range(calls)]
        before = _resident(pid)
        stop = threading.Event()
        senders = [
            threading.Thread(target=_send_gib, args=(port, head, stop)) for _ in range(_HUGE)
        ]
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(_IDLE)]
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(_SLOW)]
        for at, each in enumerate(slow):
            each.sendall(head if at % 2 else head + b"Content-Length: 1000000\r\n\r\n" + b" " * 900)
        for sender in senders:
            sender.start()
        highest, beside = before, []
        for _ in range(calls):
            beside.append(_seconds(client, request))
            highest = max(highest, _resident(pid))
        stop.set()
        for sender in senders:
            sender.join()
        for each in (*idle, *slow):
            each.close()
    return {
        "alone_p50_ms": 1e3 * statistics.median(alone),
        "beside_p50_ms": 1e3 * statistics.median(beside),
        "beside_p99_ms": 1e3 * sorted(beside)[int(0.99 * (len(beside) - 1))],
        "resident_before_mib": before / 2**20,
        "resident_highest_mib": highest / 2**20,
    }


def _seconds(client: Client, request: bytes) -> float:
    began = time.perf_counter()
    client.ask(request)
    return time.perf_counter() - began


def _send_gib(port: int, head: bytes, stop: threading.Event) -> None:
    """Send bodies of 1 GB, with and without their length, until told to stop."""
    piece = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    while not stop.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(_GIB // 2**16):
                one.sendall(piece)
                if stop.is_set():
                    break
            one.recv(4096)


def _cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200, help="a turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--hostile", action="store_true", help="beside clients that misuse it")
    given = parser.parse_args(arguments)
    console = Console(width=120)
    if given.hostile:
        figures = hostile(given.calls)
        for name, figure in figures.items():
            console.print(f"{name} {figure:.1f}")
        return 0
    cases = measured(given.rounds, given.calls)
    table = Table(
        *("path", "p50 µs", "echo", "ratio", "p99 µs", "echo", "16 clients /s", "echo"),
        *("CPU µs", "echo"),
    )
    for path, case in cases.items():
        table.add_row(
            path,
            f"{case.service.p50:.0f}",
            f"{case.echo.p50:.0f}",
            f"{case.ratio:.2f}",
            f"{case.service.p99:.0f}",
            f"{case.echo.p99:.0f}",
            f"{case.service_per_second:,.0f}",
            f"{case.echo_per_second:,.0f}",
            f"{case.service_cpu:.0f}",
            f"{case.echo_cpu:.0f}",
        )
    console.print(table)
    if given.json is not None:
        document: dict[str, Any] = {
            "environment": environment(PACKAGES),
            "cases": {
                path.rpartition("/")[2]: {**asdict(case), "ratio": case.ratio}
                for path, case in cases.items()
            },
        }
        given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    missed = [
        path
        for path, case in cases.items()
        if case.ratio > MOST_RATIO or case.service.p99 > 1e6 * MOST_P99_SECONDS
    ]
    return 1 if given.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
