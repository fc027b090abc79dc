"""What the HTTP service costs a request, beside a raw echo of the same bytes on the same stack.

    python -m benchmarks.serve --json serve.json --check
    python -m benchmarks.serve --hostile

The service and the echo (Starlette on uvicorn, with httptools and uvloop, one process each) run at
the same time and are asked in turns. A request has 50 candidates of together 11 KB; scores are at
hand, and a calibrated P(relevant) decides. With ``--hostile`` other clients attack a service that
needs a token, each form of attack by itself and all together, while an authorised client goes on
asking.
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks._serve_attacks import FORMS, TOKEN
from benchmarks._timing import Timing, environment, interleaved

SUMMARY = "What the HTTP service costs a request, beside a raw echo of the same bytes."
CANDIDATES = 50
BYTES = 11_000
MOST_RATIO = 2.0
MOST_P99_SECONDS = 0.01
CLIENTS = 16
PACKAGES = ("ctxguard-rag", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "numpy")
PATHS = ("/rerank", "/v1/filter")

MOST_ATTACKED_P99_MS = 250.0
MOST_ATTACKED_MIB = 512.0
_PAUSE_SECONDS = 0.005
"""Between two requests of the client that is measured."""


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


@dataclass(frozen=True)
class Attacked:
    """What an authorised client met while others misused the service.

    Attributes:
        p50_ms: Median time of its requests.
        p99_ms: Their 99th percentile.
        longest_ms: The longest.
        failed: How many were not answered with 200 within 60 s.
        resident_mib: The most memory that the service held.
    """

    p50_ms: float
    p99_ms: float
    longest_ms: float
    failed: int
    resident_mib: float


def hostile(calls: int) -> dict[str, Attacked]:
    """An authorised client without attack, beside each form of attack, and beside all of them.

    The service has one core. The client shares the other with the attackers, which give way to it.
    Each row has a service of its own, so that its memory is that row's.
    """
    attackers_core, service_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {attackers_core})
    rows = {"none": [], **{form: [form] for form in FORMS}, "all": list(FORMS)}
    return {
        name: _attacked(forms, attackers_core, service_core, calls) for name, forms in rows.items()
    }


def _attacked(forms: list[str], attackers_core: int, service_core: int, calls: int) -> Attacked:
    with serving("attacked") as (port, pid), ExitStack() as stack:
        os.sched_setaffinity(pid, {service_core})
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {service_core})
        request = authorised(request_of("/v1/filter"))
        client = Client(port)
        for _ in range(20):
            client.ask(request)
        if forms:
            command = [sys.executable, "-m", "benchmarks._serve_attacks"]
            attackers = subprocess.Popen(  # noqa: S603 - this package's own
                [*command, str(port), str(attackers_core), ",".join(forms)]
            )
            stack.callback(attackers.wait)
            stack.callback(attackers.kill)
            time.sleep(3.0)
        seconds, failed, resident = [], 0, 0
        for _ in range(calls):
            began = time.perf_counter()
            try:
                client.ask(request)
            except (OSError, AssertionError):
                failed += 1
                client = Client(port)
            seconds.append(time.perf_counter() - began)
            resident = max(resident, _resident(pid))
            time.sleep(_PAUSE_SECONDS)
    seconds.sort()
    return Attacked(
        1e3 * statistics.median(seconds),
        1e3 * seconds[int(0.99 * (len(seconds) - 1))],
        1e3 * seconds[-1],
        failed,
        resident / 2**20,
    )


def authorised(request: bytes) -> bytes:
    """A request with the token of the service that is attacked."""
    first, _, rest = request.partition(b"\r\n")
    return first + f"\r\nAuthorization: Bearer {TOKEN}\r\n".encode() + rest


def _cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def _hostile(calls: int, file: Path | None, console: Console, *, check: bool) -> int:
    rows = hostile(calls)
    table = Table("attack", "p50 ms", "p99 ms", "longest ms", "failed", "memory MiB")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.p50_ms:.1f}",
            f"{row.p99_ms:.0f}",
            f"{row.longest_ms:.0f}",
            f"{row.failed}",
            f"{row.resident_mib:.0f}",
        )
    console.print(table)
    if file is not None:
        found = {name: asdict(row) for name, row in rows.items()}
        document = {"environment": environment(PACKAGES), "requests": calls, "attacks": found}
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    missed = [
        name
        for name, row in rows.items()
        if row.failed or row.p99_ms > MOST_ATTACKED_P99_MS or row.resident_mib > MOST_ATTACKED_MIB
    ]
    return 1 if check and missed else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200, help="a turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--hostile", action="store_true", help="under attack")
    given = parser.parse_args(arguments)
    console = Console(width=120)
    if given.hostile:
        return _hostile(given.calls, given.json, console, check=given.check)
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
