"""Every answer is counted at once, and a count that fails costs no answer."""

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

import ctxguard
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Ranking, ScoreKind
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from tests.counted import Counted

N = 20
KEPT = 5


class Passages:
    def __getitem__(self, position: int) -> Passage:
        return Passage(f"p{position}", f"text {position}")


def ranking() -> Ranking:
    scores = tuple([1.0 - at / 100 for at in range(N)])
    return Ranking([f"p{at}" for at in range(N)], scores, ScoreKind.RATIO, Passages())


def guard_of(counted: Counted) -> ContextGuard:
    return ContextGuard(policy=RatioPolicy(k=KEPT), telemetry=counted.telemetry)


def test_accounts_stay_exact_under_threads(counted: Counted) -> None:
    guard, each = guard_of(counted), 700
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            assert counted["kept_candidates"] % KEPT == 0

    def ask() -> None:
        for _ in range(each):
            guard.filter("q?", ranking())

    scrapers = [threading.Thread(target=scrape) for _ in range(2)]
    clients = [threading.Thread(target=ask) for _ in range(3)]
    for thread in (*scrapers, *clients):
        thread.start()
    for thread in clients:
        thread.join()
    over.set()
    for thread in scrapers:
        thread.join()
    answered, kept = counted["requests"], counted["kept_candidates"]
    assert answered == counted["received_requests"] == 3 * each
    assert (kept, kept + counted["dropped_candidates"]) == (answered * KEPT, answered * N)
    # A scrape that asks for one metric sees it, too.
    chosen = counted.registry.restricted_registry(["ctxguard_kept_candidates_total"])
    assert f"ctxguard_kept_candidates_total {float(kept)}" in generate_latest(chosen).decode()


def test_counting_an_answer_keeps_no_passage(counted: Counted) -> None:
    guard, asked = guard_of(counted), ranking()
    alive = weakref.ref(asked.passages)  # type: ignore[arg-type]
    guard.filter("q?", asked)
    del asked
    gc.collect()
    assert alive() is None


def test_only_public_prometheus_names_are_used() -> None:
    """A private one that is renamed would stop every scrape."""
    root = Path(str(ctxguard.__file__)).parent
    private = re.compile(
        r"\._(?:upper_bounds|buckets|sum|value|child_samples|multiprocess)\b|[.]collect *="
    )
    users = [
        file
        for file in root.rglob("*.py")
        if "prometheus_client" in (source := file.read_text(encoding="utf-8"))
        and private.search(source)
    ]
    assert users == []


def test_uncountable_answer_is_telemetrys_failure() -> None:
    class OfAnotherKind(Telemetry):
        def answered(self, context: Context, *seconds: Any) -> None:
            object.__setattr__(context, "flags", ("no flag of ours",))
            super().answered(context, *seconds)

    counted = Counted(OfAnotherKind)
    assert guard_of(counted).filter("q?", ranking()).kept_ids[0] == "p0"
    assert counted["observer_failures"] == 1
    assert counted["requests"] == counted["kept_candidates"] == 0


SHARED = """
import sys
sys.path.insert(0, {folder!r})
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from test_telemetry import guard_of, ranking
from tests.counted import Counted
guard_of(Counted()).filter("q?", ranking())
others = Counted()
others.registry = CollectorRegistry()
MultiProcessCollector(others.registry)
assert others["requests"] == 1
"""


def test_other_processes_see_answers_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = SHARED.format(folder=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
