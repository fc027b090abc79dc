"""The callables that pages of docs/integrations/ show for engines without an adapter."""

import inspect
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from snippets import SMALL_MODEL, ran

from ctxguard import ContextGuard, Flag, ScoreKind, StageUnavailableError, Where
from ctxguard.core.context import Context

QUERY = "How long does a kettle take?"


def asked(guard: ContextGuard, query: str = QUERY, **fields: Any) -> Context:
    return guard.retrieve(query, where=Where(fields) if fields else None)


@pytest.fixture(scope="module")
def lance(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("lance"))
        return ran("lancedb", SMALL_MODEL)


def test_lancedb_legs_have_own_scores(lance: dict[str, Any]) -> None:
    context = asked(lance["guard"])
    legs = context.decision.ranking.legs
    assert context.kept_ids[0] == "k1"
    assert {name: leg.kind for name, leg in legs.items()} == {
        "dense": ScoreKind.DISTANCE,
        "lexical": ScoreKind.RATIO,
    }
    best = {name: leg.scores.argmax() for name, leg in legs.items()}
    assert set(best.values()) == {context.decision.ranking.passage_ids.index("k1")}
    assert Flag.DEGRADED not in context.flags


def test_lancedb_filters(lance: dict[str, Any]) -> None:
    assert asked(lance["guard"], tenant="b").kept_ids == ("k2",)
    assert set(asked(lance["guard"], tenant=["a", "b"]).kept_ids) == {"k1", "k2"}
    assert asked(lance["guard"], tenant=[]).empty
    assert asked(lance["guard"], tenant="it's' OR true --").empty


@pytest.mark.parametrize("query", ["", "\"kettle's AND ( +", "kettle " * 500])
def test_lancedb_searches_for_any_text(lance: dict[str, Any], query: str) -> None:
    assert not lance["lexical"](query, depth=3)[2:]


def test_lancedb_without_text_index_serves_vectors(
    lance: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = lance["table"].search

    def failing(*given: Any, **options: Any) -> Any:
        if options:
            raise ValueError("Cannot perform full text search")
        return search(*given)

    monkeypatch.setitem(lance, "table", SimpleNamespace(search=failing))
    context = asked(lance["guard"])
    assert context.kept_ids[0] == "k1"
    assert Flag.DEGRADED in context.flags


@pytest.fixture(scope="module")
def chroma() -> dict[str, Any]:
    return ran("chroma", SMALL_MODEL)


def test_chroma_distances_are_negated(chroma: dict[str, Any]) -> None:
    context = asked(chroma["guard"])
    assert context.kept_ids == ("k1", "k2")
    assert context.decision.ranking.kind is ScoreKind.DISTANCE
    assert all(score <= 0 for score in context.decision.ranking.scores)


def test_chroma_filters_by_conditions(chroma: dict[str, Any]) -> None:
    assert asked(chroma["guard"], tenant="b").kept_ids == ("k2",)
    assert asked(chroma["guard"], tenant="c").empty
    assert asked(chroma["guard"], tenant=["a", "b"], language="en").empty


@pytest.mark.parametrize("values", [[], ["a", 1]])
def test_chroma_refused_filter_serves_nothing(chroma: dict[str, Any], values: list[Any]) -> None:
    guard = ContextGuard(chroma["search"], score_kind="distance")
    with pytest.raises(StageUnavailableError):
        asked(guard, tenant=values)


UUID = uuid4()
PROPERTIES = {"text": "The kettle boils.", "tenant": "a", "level": 3}


class WeaviateQueries:
    """Answers calls that the client's own signatures and filters accept."""

    def __init__(self) -> None:
        self.filters: list[Any] = []

    def near_vector(self, *given: Any, **options: Any) -> Any:
        from weaviate.collections.queries.near_vector.query import executor

        return self._answer(executor._NearVectorQueryExecutor.near_vector, given, options)

    def bm25(self, *given: Any, **options: Any) -> Any:
        from weaviate.collections.queries.bm25.query import executor

        return self._answer(executor._BM25QueryExecutor.bm25, given, options)

    def _answer(self, method: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        from weaviate.collections.classes.internal import MetadataReturn
        from weaviate.collections.filters import _FilterToGRPC

        inspect.signature(method).bind(self, *given, **options)
        self.filters.append(_FilterToGRPC.convert(options["filters"]))
        wanted = options["return_metadata"]
        metadata = MetadataReturn(
            distance=0.25 if wanted.distance else None, score=7.5 if wanted.score else None
        )
        row = SimpleNamespace(uuid=UUID, properties=PROPERTIES, metadata=metadata)
        return SimpleNamespace(objects=[row])


@pytest.fixture
def weaviate() -> dict[str, Any]:
    collection = SimpleNamespace(query=WeaviateQueries())
    return ran("weaviate", collection=collection, embed=lambda text: [0.0, 1.0])


def test_weaviate_is_asked_correctly(weaviate: dict[str, Any]) -> None:
    context = asked(weaviate["guard"], tenant=["a", "b"], level=3)
    assert context.kept_ids == (str(UUID),)
    legs = context.decision.ranking.legs
    assert {name: (leg.kind, *leg.scores) for name, leg in legs.items()} == {
        "dense": (ScoreKind.DISTANCE, -0.25),
        "lexical": (ScoreKind.RATIO, 7.5),
    }
    sent = weaviate["collection"].query.filters[-1].filters
    assert [each.target.property for each in sent] == ["level", "tenant"]
    assert list(sent[0].value_int_array.values) == [3]
    assert sorted(sent[1].value_text_array.values) == ["a", "b"]


def test_weaviate_filters_only_when_asked(weaviate: dict[str, Any]) -> None:
    assert asked(weaviate["guard"]).kept_ids == (str(UUID),)
    assert weaviate["collection"].query.filters[-1] is None


def test_weaviate_refused_filter_serves_nothing(weaviate: dict[str, Any]) -> None:
    with pytest.raises(StageUnavailableError):
        asked(weaviate["guard"], tenant=[])


def test_dspy_module_reads_what_guard_kept() -> None:
    dspy = pytest.importorskip("dspy")
    from dspy.utils import DummyLM

    module = ran("dspy", SMALL_MODEL)["Answer"]()
    model = DummyLM([{"reasoning": "It says so.", "answer": "three minutes"}])
    with dspy.context(lm=model):
        found = module.deepcopy()(QUERY)
    assert (found.answer, found.passage_ids) == ("three minutes", ("0", "1"))
    assert '<passage rank="1" id="0">' in model.history[-1]["messages"][-1]["content"]
