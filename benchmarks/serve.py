"""What the HTTP service costs a request, beside an echo and raw proxies on the same stack.

    python -m benchmarks.serve --json serve.json --check
    python -m benchmarks.serve --hostile

The service and its floors (Starlette on uvicorn, with httptools and uvloop, one process each) run
at the same time and are asked in turns by `wrk`, a client in C. A request has 50 candidates of
together 11 KB, and a calibrated P(relevant) decides. Where the scores are at hand the floor is an
echo of the same bytes. Where a reranker at another server has them, it is a proxy that hands body
and answer on, by the service's own client, or by httpx. With
``--hostile`` other clients attack a service that needs a token, each form of attack by itself and
all together, while an authorised client goes on asking.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, astuple, dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._serve_attacks import FORMS, TOKEN
from benchmarks._timing import environment

CANDIDATES = 50
BYTES = 11_000
CLIENTS = 16
PACKAGES = (
    "ctxguard-rag",
    "starlette",
    "uvicorn",
    "httptools",
    "uvloop",
    "pydantic",
    "httpx2",
    "numpy",
)
CASES = {
    "rerank": ("/rerank", "service", "echo", 1 / 0.45),
    "filter": ("/v1/filter", "service", "echo", 1 / 0.35),
    "upstream": ("/rerank", "relay", "proxy", 1.3),
    "upstream_httpx": ("/rerank", "relay", "httpx_proxy", 1.3),
}
"""For each case the path, the service and its floor, and how many times longer it may take."""

ATTACKS = {"none": [], **{form: [form] for form in FORMS}, "all": list(FORMS)}
MOST_ATTACKED_P99_MS = 250.0
MOST_ATTACKED_MIB = 512.0
_PAUSE_SECONDS = 0.005
"""Between two requests of the client that is measured."""


@dataclass(frozen=True)
class Load:
    """What clients in C saw of one server, asking again as soon as they have their answer.

    Attributes:
        rate: Requests a second of 16 clients together.
        p50: Microseconds from asking to the whole answer beside 15 others, the median of a turn.
        p99: The 99th percentile.
        alone: Microseconds of a client that asks alone, the median.
        cpu: Processor time of the server for a request, in microseconds.
    """

    rate: float
    p50: float
    p99: float
    alone: float
    cpu: float


@dataclass(frozen=True)
class Case:
    """The service beside its floor, in turns.

    Attributes:
        service: The service.
        floor: The echo, or the raw proxy.
    """

    service: Load
    floor: Load

    @property
    def share(self) -> float:
        """The service's rate over the floor's."""
        return self.service.rate / self.floor.rate

    @property
    def slowdown(self) -> float:
        """The larger of how many times longer the service takes, by its median and its rate."""
        return max(self.service.p50 / self.floor.p50, 1.0 / self.share)


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


@contextmanager
def serving(*what: str) -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its port and its process id."""
    server = [sys.executable, "-m", "benchmarks._serve_app", *what]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            port = urlsplit(process.stdout.readline().strip()).port
            assert port is not None
            yield port, process.pid
        finally:
            process.terminate()


def measured(rounds: int, seconds: float) -> dict[str, Case]:
    """Every case, the service and its floor in turns; the best turn of each counts."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream, _ = stack.enter_context(serving("upstream"))
        servers = {
            name: stack.enter_context(serving(name, str(upstream)))
            for name in sorted({which for case in CASES.values() for which in case[1:3]})
        }
        turns = [(name, which) for name, case in CASES.items() for which in case[1:3]]
        asked = {
            name: _script(folder / f"{at}.lua", case[0])
            for at, (name, case) in enumerate(CASES.items())
        }
        loads: dict[tuple[str, str], list[Load]] = {turn: [] for turn in turns}
        for _ in range(rounds):
            for turn in turns:
                loads[turn].append(
                    _loaded(*servers[turn[1]], CASES[turn[0]][0], asked[turn[0]], seconds)
                )
    return {
        name: Case(*[_best(loads[name, which]) for which in case[1:3]])
        for name, case in CASES.items()
    }


def _script(file: Path, path: str) -> Path:
    """The program of wrk that asks one path, and writes what it saw as a line of JSON."""
    body = file.with_suffix(".json")
    body.write_bytes(body_of(path))
    file.write_text(
        f"""wrk.method, wrk.headers["Content-Type"] = "POST", "application/json"
wrk.body = io.open("{body}", "rb"):read("*a")
done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\\n{{"requests":%d,"seconds":%f,"failed":%d,"p50":%f,"p99":%f}}\\n', summary.requests,
    summary.duration / 1e6, errors.connect + errors.read + errors.write + errors.status +
    errors.timeout, latency:percentile(50), latency:percentile(99)))
end
""",
        encoding="utf-8",
    )
    return file


def _loaded(port: int, pid: int, path: str, script: Path, seconds: float) -> Load:
    alone = _wrk(port, path, script, 1, seconds)
    before = _cpu_seconds(pid)
    together = _wrk(port, path, script, CLIENTS, seconds)
    cpu = 1e6 * (_cpu_seconds(pid) - before) / together["requests"]
    rate = together["requests"] / together["seconds"]
    return Load(rate, together["p50"], together["p99"], alone["p50"], cpu)


def _wrk(port: int, path: str, script: Path, clients: int, seconds: float) -> dict[str, float]:
    """What so many clients saw, all of whose requests must be answered with 200."""
    asking = ["wrk", "-t1", f"-c{clients}", f"-d{max(round(seconds), 1)}s", "-s", str(script)]
    answered = subprocess.run(  # noqa: S603
        [*asking, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, check=True
    )
    seen: dict[str, float] = json.loads(answered.stdout.splitlines()[-1])
    if seen["failed"]:
        raise RuntimeError(f"{path}: {seen['failed']:.0f} requests failed")
    return seen


def _best(loads: list[Load]) -> Load:
    """The highest rate and the lowest times: other processes can only make them worse."""
    rates, *times = zip(*map(astuple, loads), strict=True)
    return Load(max(rates), *map(min, times))


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


def hostile(calls: int, attacks: Iterable[str]) -> dict[str, Attacked]:
    """An authorised client without attack, beside each form of attack, and beside all of them.

    The service has one core. The client shares the other with the attackers, which give way to it.
    Each row has a service of its own, so that its memory is that row's.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    try:
        return {name: _attacked(ATTACKS[name], cores[0], cores[-1], calls) for name in attacks}
    finally:
        os.sched_setaffinity(0, cores)


def _attacked(forms: list[str], attackers_core: int, service_core: int, calls: int) -> Attacked:
    with ExitStack() as stack:
        reranker, reranker_pid = stack.enter_context(serving("hostile"))
        os.sched_setaffinity(reranker_pid, {attackers_core})
        os.setpriority(os.PRIO_PROCESS, reranker_pid, 10)
        port, pid = stack.enter_context(serving("attacked", str(reranker)))
        os.sched_setaffinity(pid, {service_core})
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {service_core})
        client = stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=60)))
        body, head = body_of("/v1/filter"), {"Content-Type": "application/json"}
        head["Authorization"] = f"Bearer {TOKEN}"

        def is_answered() -> bool:
            try:
                client.request("POST", "/v1/filter", body, head)
                answer = client.getresponse()
                answer.read()
            except (OSError, HTTPException):
                client.close()  # the next request connects again
                return False
            return answer.status == HTTPStatus.OK

        assert all(is_answered() for _ in range(20))
        if forms:
            attack = [sys.executable, "-m", "benchmarks._serve_attacks", str(port)]
            attack += [str(attackers_core), ",".join(forms)]
            attackers = stack.enter_context(
                subprocess.Popen(attack, stdout=subprocess.PIPE)  # noqa: S603
            )
            stack.callback(attackers.kill)
            assert attackers.stdout is not None
            attackers.stdout.readline()
            time.sleep(3.0)
        seconds, failed, resident = [], 0, 0
        for _ in range(calls):
            began = time.perf_counter()
            failed += not is_answered()
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


def _cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def _hostile(given: Namespace) -> int:
    rows = hostile(given.calls, given.hostile or ATTACKS)
    columns = ("p50 ms", "p99 ms", "longest ms", "failed", "memory MiB")
    table = figures("an authorised client beside attacks", ("attack",), columns)
    for name, row in rows.items():
        table.add_row(name, f"{row.p50_ms:.1f}", *[f"{each:.0f}" for each in astuple(row)[1:]])
    CONSOLE.print(table)
    report = {
        "environment": environment(PACKAGES),
        "requests": given.calls,
        "attacks": {name: asdict(row) for name, row in rows.items()},
    }
    missed = [
        name
        for name, row in rows.items()
        if row.failed or row.p99_ms > MOST_ATTACKED_P99_MS or row.resident_mib > MOST_ATTACKED_MIB
    ]
    return ended(given, report, missed)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` 1 if a bar is missed."""
    parser = command("Time the HTTP service beside an echo and raw proxies.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="a turn")
    parser.add_argument("--calls", type=int, default=200, help="beside each attack")
    parser.add_argument(
        "--hostile", nargs="*", choices=ATTACKS, metavar="ATTACK", help="under all attacks, or some"
    )
    given = parser.parse_args(arguments)
    if given.hostile is not None:
        return _hostile(given)
    if shutil.which("wrk") is None:
        CONSOLE.print(
            "wrk is not installed, and clients in Python measure themselves: "
            "apt-get install --no-install-recommends wrk"
        )
        return 2
    cases = measured(given.rounds, given.seconds)
    columns = ("16 clients /s", "p50 µs", "p99 µs", "alone µs", "CPU µs", "share")
    table = figures("requests", ("case", "by"), columns)
    for name, case in cases.items():
        for by, load in zip(CASES[name][1:3], (case.service, case.floor), strict=True):
            own = [f"{each:,.0f}" for each in astuple(load)]
            table.add_row(name, by, *own, f"{case.share:.2f}" if load is case.service else "")
    CONSOLE.print(table)
    report = {
        "environment": environment(PACKAGES),
        "cases": {
            name: {**asdict(case), "share": case.share, "slowdown": case.slowdown}
            for name, case in cases.items()
        },
    }
    missed = [name for name, case in cases.items() if case.slowdown > CASES[name][3]]
    return ended(given, report, missed)


if __name__ == "__main__":
    sys.exit(main())
