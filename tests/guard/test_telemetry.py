"""Answers wait to be counted: whoever reads the metrics sees every one, and memory is bounded."""

import gc
import math
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.request import telemetry as telemetry_module
from ctxguard.request.telemetry import Telemetry

N = 20
KEPT = 5


class Passages:
    def __getitem__(self, position: int) -> Passage:
        return Passage(f"p{position}", f"text {position}")


def ranking() -> Ranking:
    scores = tuple([1.0 - at / 100 for at in range(N)])
    return Ranking([f"p{at}" for at in range(N)], scores, ScoreKind.RATIO, Passages())


def guard_of(registry: CollectorRegistry) -> ContextGuard:
    return ContextGuard(policy=RatioPolicy(k=KEPT), telemetry=Telemetry(registry))


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


def test_accounts_are_exact_after_threads_and_scrapes_at_once() -> None:
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


def test_answers_that_nobody_reads_take_bounded_memory_and_keep_no_passage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry_module, "_MAX_WAITING", 10)
    registry = CollectorRegistry()
    telemetry = Telemetry(registry)
    guard = ContextGuard(policy=RatioPolicy(k=KEPT), telemetry=telemetry)
    asked = ranking()
    alive = weakref.ref(asked.passages)  # type: ignore[arg-type]
    guard.filter("q?", asked)
    del asked
    gc.collect()
    assert alive() is None
    for _ in range(25):
        guard.filter("q?", ranking())
        assert len(telemetry._answers.waiting) < 10
    assert counted(registry, "requests_total") == 26


def test_answers_that_were_counted_together_are_those_counted_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = ContextGuard(score_kind="ratio", telemetry=Telemetry(CollectorRegistry()))
    hits = [Hit("a", 2.0, "one"), Hit("b", 1.0, "two"), Hit("b", 0.5), Hit("c", math.nan)]
    contexts = [guard.filter("q?", hits[:n]) for n in (0, 1, 3, 4, 4)]
    found = []
    for most in (1, 256):
        monkeypatch.setattr(telemetry_module, "_MAX_WAITING", most)
        registry = CollectorRegistry()
        telemetry = Telemetry(registry)
        for seconds in (1e-6, 1e-5, 3e-5, 2.0):
            for context in contexts:
                telemetry.answered(context, None if context.empty else seconds, seconds)
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        found.append(
            {
                (sample.name, *sample.labels.values()): sample.value
                for sample in samples
                if not sample.name.endswith("_created")
            }
        )
    assert found[0] == pytest.approx(found[1])
    assert found[0]["ctxguard_guard_seconds_bucket", "1e-05"] == 2 * len(contexts)
    assert found[0]["ctxguard_retrieve_seconds_count",] == 4 * (len(contexts) - 1)


def test_an_answer_that_cannot_be_counted_is_the_telemetrys_failure() -> None:
    registry = CollectorRegistry()
    telemetry = Telemetry(registry)
    guard = ContextGuard(score_kind="ratio", telemetry=telemetry)
    context = guard.filter("q?", [Hit("a", 1.0)])
    object.__setattr__(context, "flags", ("no flag of ours",))
    telemetry.answered(context, None, 1e-5)
    guard.filter("q?", [Hit("a", 1.0)])
    assert counted(registry, "observer_failures_total") == 1
    assert counted(registry, "flags_total") == 2


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


def test_other_processes_see_an_answer_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = SHARED.format(folder=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
