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

from prometheus_client import CollectorRegistry, generate_latest

import ctxguard
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry

N = 20
KEPT = 5


class Passages:
    def __getitem__(self, position: int) -> Passage:
        return Passage(f"p{position}", f"text {position}")


def ranking() -> Ranking:
    scores = tuple([1.0 - at / 100 for at in range(N)])
    return Ranking([f"p{at}" for at in range(N)], scores, ScoreKind.RATIO, Passages())


def guard_of(registry: CollectorRegistry) -> ContextGuard:
    return ContextGuard(policy=RatioPolicy(k=KEPT), telemetry=Telemetry(registry, all_metrics=True))


def counted(registry: CollectorRegistry, name: str) -> float:
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"ctxguard_{name}"
    )


def test_every_scrape_sees_every_answer() -> None:
    registry = CollectorRegistry()
    guard = guard_of(registry)
    for answered in range(1, 4):
        guard.filter("q?", ranking())
        assert counted(registry, "requests_total") == answered
        assert counted(registry, "kept_candidates_total") == answered * KEPT
        assert counted(registry, "dropped_candidates_total") == answered * (N - KEPT)
        assert counted(registry, "guard_seconds_count") == answered
    # A scrape that asks for one metric, too.
    guard.filter("q?", ranking())
    chosen = registry.restricted_registry(["ctxguard_kept_candidates_total"])
    assert f"ctxguard_kept_candidates_total {4.0 * KEPT}" in generate_latest(chosen).decode()


def test_accounts_stay_exact_under_threads() -> None:
    registry, each = CollectorRegistry(), 700
    guard = guard_of(registry)
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            assert counted(registry, "kept_candidates_total") % KEPT == 0

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
    answered = counted(registry, "requests_total")
    assert answered == counted(registry, "received_requests_total") == 3 * each
    kept = counted(registry, "kept_candidates_total")
    dropped = counted(registry, "dropped_candidates_total")
    assert (kept, kept + dropped) == (answered * KEPT, answered * N)


def test_counting_an_answer_keeps_no_passage() -> None:
    guard, asked = guard_of(CollectorRegistry()), ranking()
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
    registry = CollectorRegistry()

    class OfAnotherKind(Telemetry):
        def answered(self, context: Context, *seconds: Any) -> None:
            object.__setattr__(context, "flags", ("no flag of ours",))
            super().answered(context, *seconds)

    guard = ContextGuard(score_kind="ratio", telemetry=OfAnotherKind(registry, all_metrics=True))
    assert guard.filter("q?", [Hit("a", 1.0)]).kept_ids == ("a",)
    assert counted(registry, "observer_failures_total") == 1
    assert counted(registry, "requests_total") == counted(registry, "kept_candidates_total") == 0


SHARED = """
import sys
sys.path.insert(0, {folder!r})
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from test_telemetry import counted, guard_of, ranking
guard_of(CollectorRegistry()).filter("q?", ranking())
others = CollectorRegistry()
MultiProcessCollector(others)
assert counted(others, "requests_total") == 1
"""


def test_other_processes_see_answers_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = SHARED.format(folder=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
