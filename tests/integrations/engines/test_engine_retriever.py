"""The retriever over an engine: routes, fusion, failures and signals, on an engine in memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_contract import PASSAGES, EngineContract, build
from memory_engine import MemoryEngine
from prometheus_client import CollectorRegistry

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from ctxguard import ContextGuard, Flag, Fusion, Passage, Route, ScoreKind, Where
from ctxguard.core.fusion import fuse
from ctxguard.errors import ConfigurationError, StageError, StageUnavailableError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.integrations.engines import retriever as retriever_module
from ctxguard.integrations.engines.address import EngineAddress
from ctxguard.integrations.engines.retriever import EngineRetriever
from tests.doubles import FaultyEmbedder, WordHashEmbedder


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retriever_module, "engine_class", lambda address: MemoryEngine)
    yield
    MemoryEngine.kept.clear()


def _built(passages: Sequence[Passage] = PASSAGES, **options: Any) -> EngineRetriever:
    url = f"qdrant:///x#index_{len(MemoryEngine.kept)}"
    return build(url, passages, **{"signals": "none", **options})


def _engine() -> MemoryEngine:
    """Return the engine of the only index."""
    (engine,) = MemoryEngine.kept.values()
    return engine


class TestEngine(EngineContract):
    scores_as_a_folder = True

    def url(self, name: str) -> str:
        return f"qdrant:///x#{name}"

    def retriever(self, passages: Sequence[Passage]) -> EngineRetriever:
        return _built(passages, signals="full")


@pytest.mark.parametrize("fusion", [Fusion(), Fusion("convex", weight=0.3)])
def test_candidates_are_fused_as_in_core(fusion: Fusion) -> None:
    ranking = _built().with_fusion(fusion).retrieve("kettles and ladders", depth=50)
    assert ranking.kind is fusion.kind
    assert ranking.route is Route.HYBRID
    assert list(ranking.scores) == pytest.approx(fuse(ranking.legs, fusion).tolist(), abs=2e-3)
    if fusion.method == "convex":
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)


@pytest.mark.parametrize(
    ("route", "kind"), [(Route.LEXICAL, ScoreKind.RATIO), (Route.DENSE, ScoreKind.COSINE)]
)
def test_one_leg_route_has_its_kind(route: Route, kind: ScoreKind) -> None:
    ranking = _built().on_route(route).retrieve("kettles", depth=3)
    assert (ranking.route, ranking.kind, len(ranking)) == (route, kind, 3)
    assert list(ranking.legs) == [route.value]
    nothing = _built().on_route(route).retrieve("kettles", depth=3, where=Where(groups=[]))
    assert (nothing.kind, len(nothing)) == (kind, 0)


def _fails(*_: object) -> None:
    raise StageError("memory", "out of order")


def test_without_embedder_words_answer_flagged() -> None:
    embedder = FaultyEmbedder()
    built = _built(embedder=embedder)
    with embedder.fault.injected(_fails):
        context = ContextGuard(built).retrieve("kettles")
        with pytest.raises(StageUnavailableError):
            built.on_route(Route.DENSE).retrieve("kettles", depth=3)
    assert context.route is Route.LEXICAL
    assert Flag.DEGRADED in context.flags
    assert all("kettles" in each.text.lower() for each in context.passages)


@pytest.mark.parametrize(
    ("failing", "answering"), [("dense", Route.LEXICAL), ("lexical", Route.DENSE)]
)
def test_failing_leg_is_left_out(failing: str, answering: Route) -> None:
    """A leg that fails in the engine is left out and its route answers."""
    built = _built(signals="full")
    expected = built.on_route(answering).retrieve("kettles and ladders")
    _engine().failing = {failing}
    registry = CollectorRegistry()
    guard = ContextGuard(built, telemetry=Telemetry(registry, all_metrics=True))
    context = guard.retrieve("kettles and ladders")
    assert context.route is answering
    assert context.decision.ranking.passage_ids == expected.passage_ids
    assert Flag.DEGRADED in context.flags
    assert [each.stage for each in context.failures] == [failing]
    labels = {"stage": failing, "cause": "garbage"}
    assert registry.get_sample_value("ctxguard_stage_failures_total", labels) == 1.0


def test_both_legs_failing_is_an_outage() -> None:
    built = _built()
    _engine().failing = {"lexical", "dense"}
    with pytest.raises(StageError, match="out of order"):
        built.retrieve("kettles")


def test_failed_signals_leave_legs_order() -> None:
    _built(signals="full")
    _engine().before_evidence = _fails
    built = EngineRetriever(_engine(), embedder=WordHashEmbedder())
    ranking = built.retrieve("kettles", depth=3)
    expected = built.with_fusion(Fusion()).retrieve("kettles", depth=3)
    assert [each.stage for each in ranking.failures] == ["signals"]
    assert (ranking.passage_ids, ranking.signals) == (expected.passage_ids, {})


def test_passage_deleted_meanwhile_is_no_candidate() -> None:
    built = _built(signals="full")
    best = built.retrieve("kettles and ladders", depth=50).passage_ids[0]
    _engine().before_evidence = lambda: _engine().delete([best])
    ranking = built.retrieve("kettles and ladders", depth=50)
    assert len(ranking) == len(PASSAGES) - 1
    assert best not in ranking.passage_ids


def test_without_signals_the_ranker_is_refused() -> None:
    built = _built(signals="none")
    assert not built.has_signals
    assert built.fusion == Fusion()
    with pytest.raises(ConfigurationError, match="signals"):
        built.with_fusion(Fusion("ranker"))


def test_reranker_orders_an_engines_candidates() -> None:
    class Reversing:
        fingerprint = "reversing"

        def score(self, query: str, texts: Sequence[str]) -> Any:
            return np.arange(float(len(texts)))

    built, query = _built(), "kettles and ladders"
    before = built.retrieve(query, depth=5)
    ranking = built.with_reranker(Reversing(), rerank_depth=5).retrieve(query, depth=5)
    assert ranking.route is Route.HYBRID_RERANK
    assert ranking.passage_ids == before.passage_ids[::-1]
    assert [each.stage for each in ranking.timings] == ["search", "rerank"]


def test_calibrated_engine_guards_every_route() -> None:
    built = _built(signals="full")
    queries = [Query(f"q{n}", each.text) for n, each in enumerate(PASSAGES)]
    qrels = {f"q{n}": {each.passage_id: 1} for n, each in enumerate(PASSAGES)}
    calibration = calibrate(built, Dataset("passages", tuple(queries), qrels))
    assert set(calibration.profile.routes) == {Route.HYBRID, Route.LEXICAL, Route.DENSE}
    assert calibration.profile.fusion.method == "ranker"
    guard = ContextGuard(built, profile=calibration.profile)
    assert guard.differences == ()
    context = guard.retrieve(PASSAGES[4].text)
    assert context.kept_ids[0] == PASSAGES[4].passage_id
    assert Flag.UNCALIBRATED not in context.flags
    built.delete([each.passage_id for each in PASSAGES[:6]])
    assert ContextGuard(built, profile=calibration.profile).comparison.reservations


def test_empty_update_finishes_an_interrupted_one() -> None:
    built = _built()
    engine = _engine()
    before = engine.finished
    assert (built.upsert(PASSAGES).unchanged, engine.finished) == (len(PASSAGES), before + 1)


def test_vectors_have_length_one() -> None:
    class Long(WordHashEmbedder):
        def encode_passages(self, texts: Sequence[str], progress: Any = None) -> Any:
            return 3.0 * super().encode_passages(texts)

        def encode_query(self, text: str) -> Any:
            return np.float32(5.0) * super().encode_query(text)

    ranking = _built(embedder=Long()).on_route(Route.DENSE).retrieve(PASSAGES[3].text, depth=1)
    assert ranking.scores[0] == pytest.approx(1.0, abs=0.2)
    assert ranking.scores[0] <= 1.0


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("mysql://h/d", "mysql"),
        ("h/d", "without a scheme"),
        ("qdrant://h:port", "cannot be read"),
        ("qdrant://h#Upper", "Upper"),
        ("qdrant://h#a-b", "a-b"),
        ("qdrant://[::1", "cannot be read"),
        *[(f"qdrant://h?timeout={each}", "timeout") for each in ("0", "-1", "soon", "inf")],
    ],
)
def test_url_without_index_is_refused(url: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        EngineAddress.parse(url)


@pytest.mark.parametrize("password", ["se#cret", "se/cret", "se?cret", "se[cret", "12/secret"])
def test_unencoded_password_is_not_repeated(password: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        EngineAddress.parse(f"postgresql://u:{password}@h:5432/db")
    assert "cret" not in str(caught.value)


def test_address_hides_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXGUARD_ENGINE_KEY", "secret")
    url = "postgresql://u:secret@h:5432/db?password=secret#docs"
    address = EngineAddress.parse(url)
    assert address.shown == "postgresql://h:5432/db#docs"
    assert "secret" not in repr(address)
    assert (address.key, EngineAddress.parse("milvus:///srv/a.db").path) == ("secret", "/srv/a.db")
    assert EngineAddress.parse("qdrant+https://h:6333#a").http_url == "https://h:6333"
