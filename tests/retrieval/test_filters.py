"""A filter on metadata: applied inside the search in both legs, checked again, failing closed."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ctxguard._support import fork_safety
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.metadata_filter import Where, tokens, verified
from ctxguard.core.types import (
    DropReason,
    Hit,
    Leg,
    Mode,
    Passage,
    Ranking,
    Route,
    ScoreKind,
)
from ctxguard.errors import ConfigurationError, FilterViolationError
from ctxguard.guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.filters import MetadataRows
from ctxguard.retrieval.index.lexical import Bm25sIndex
from ctxguard.retrieval.index.passages import PassageTable, read_passages
from tests.doubles import FaultyRetriever, WordHashEmbedder
from tests.timing import PATIENCE_SECONDS

WORDS = ("red", "fox", "dog", "rose", "snow", "hill", "rain", "cloud")
ROUTES = (Route.HYBRID, Route.LEXICAL, Route.DENSE)


def build(corpus: Sequence[Passage], **settings: Any) -> HybridRetriever:
    return HybridRetriever.build(corpus, embedder=WordHashEmbedder(), **settings)


def passages(*tenants: object, text: str = "red fox") -> list[Passage]:
    """One passage for each tenant, p0 for the first."""
    return [Passage(f"p{n}", text, metadata={"t": t}) for n, t in enumerate(tenants)]


class Tenant(StrEnum):
    A = "a"


class TestWhere:
    @pytest.mark.parametrize(
        ("where", "allowed", "refused"),
        [
            # Every condition must hold.
            (
                Where(tenant="a", language="en"),
                [{"tenant": "a", "language": "en", "other": None}],
                [{"tenant": "a", "language": "de"}],
            ),
            # Any of several values will do, and any member of a passage's list.
            *[
                (Where(tenant=values), [{"tenant": "b"}], [{"tenant": "c"}])
                for values in (["a", "b"], ("a", "b"), {"a", "b"}, frozenset("ab"))
            ],
            (
                Where(groups=["staff", "board"]),
                [{"groups": ["guests", "board"]}],
                [{"groups": ["guests"]}, {"groups": []}],
            ),
            # A reader in no group sees nothing, nor is a passage without the field seen.
            (Where(groups=[]), [], [{"groups": ["staff"]}]),
            (
                Where(tenant="a"),
                [{"tenant": Tenant.A}],
                [None, {}, {"Tenant": "a"}, {"tenant": None}, {"tenant": {"a": 1}}, "tenant", 3],
            ),
            # Values match their own type and case only.
            (Where(n=1), [], [{"n": "1"}, {"n": True}, {"n": 1.0}]),
            (Where(flag=False), [], [{"flag": 0}]),
            (Where(tenant=Tenant.A), [{"tenant": "a"}], [{"tenant": "A"}]),
        ],
    )
    def test_filter_allows_matching_values(
        self, where: Where, allowed: list[object], refused: list[object]
    ) -> None:
        assert all(map(where.allows, allowed))
        assert not any(map(where.allows, refused))

    def test_python_equal_integers_stay_apart(self) -> None:
        """Multiples of 2**61 - 1 all hash to 0: a set of them takes quadratic time."""
        integers = [n * (2**61 - 1) for n in range(1_000)]
        assert len(set(map(hash, integers))) == 1
        assert len(set(map(hash, tokens(integers)))) > 990
        assert Where(level=integers).allowed["level"] == integers
        assert Where(n=integers).allows({"n": integers[-1]})
        assert not Where(n=integers).allows({"n": -integers[-1]})

    def test_equal_filters_share_one_digest(self) -> None:
        where = Where(tenant="a", groups=["b", 1])
        assert where.digest == Where(groups=[1, "b"], tenant=["a"]).digest
        others = [
            Where(tenant="a", groups=["b", "1"]),
            Where(tenant="a", groups=["b", True]),
            Where(tenant="a"),
            Where({"tenant": "a", "groups": ["b', '1"]}),
        ]
        assert len({where.digest, *[other.digest for other in others]}) == 5

    def test_metadata_that_raises_is_not_allowed(self) -> None:
        class Broken(Mapping[str, object]):
            def __getitem__(self, key: str) -> object:
                raise RuntimeError("gone")

            def __iter__(self) -> Iterator[str]:
                return iter(("tenant",))

            def __len__(self) -> int:
                return 1

        assert not Where(tenant="a").allows(Broken())

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            *[(make, "let everything through") for make in (Where, dict, lambda: Where(None))],
            *[
                (lambda value=value: Where(tenant=value), "filter on 'tenant'")
                for value in (None, 1.5, b"a", {"a": 1}, [None], ["a", 1.5], [["a"]], object())
            ],
            (lambda: Where(tenant=iter("ab")), "filter on 'tenant'"),
            (lambda: Where({"tenant": "a"}, tenant="b"), "twice"),
            (lambda: Where({1: "a"}), "must be a string"),  # type: ignore[dict-item]
            (lambda: Where("tenant"), "a mapping"),  # type: ignore[arg-type]
        ],
    )
    def test_what_is_no_condition_is_refused(self, make: Callable[[], Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            Where(make())

    def test_any_field_name_works(self) -> None:
        where = Where({"tenant.id": "a"}, language="en")
        assert where.fields == ("language", "tenant.id")

    def test_filters_are_equal_and_immutable(self) -> None:
        assert Where(a="x", b=["y", "z"]) == Where({"b": ("z", "y")}, a=["x"])
        assert hash(Where(a=1)) == hash(Where(a=[1, 1]))
        assert Where(a=1) != Where(a=True)
        with pytest.raises(AttributeError):
            Where(a=1).conditions = ()  # type: ignore[misc]

    def test_description_names_fields_without_values(self) -> None:
        assert repr(Where(tenant="secret", groups=["x"])) == "Where(groups=…, tenant=…)"


tags = st.sampled_from(["a", "b", "c", 1, True, None])
metadata = st.one_of(
    st.none(),
    st.fixed_dictionaries({}, optional={"tenant": tags, "groups": st.lists(tags, max_size=3)}),
)


@st.composite
def corpora(draw: st.DrawFn) -> list[Passage]:
    n = draw(st.integers(1, 24))
    texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
    return [Passage(f"p{i:02}", draw(texts), metadata=draw(metadata)) for i in range(n)]


WHERES = st.sampled_from(
    [
        Where(tenant="a"),
        Where(tenant=["a", "b"]),
        Where(groups="a"),
        Where(groups=["b", 1]),
        Where(tenant="a", groups="c"),
        Where(tenant=True),
        Where(tenant="absent"),
        Where(nowhere="a"),
        Where(groups=[]),
    ]
)
QUERIES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)


def restricted(
    retriever: HybridRetriever, query: str, where: Where, route: Route, depth: int
) -> list[tuple[str, float]]:
    """What the route gives where either leg is searched whole and forbidden passages are cut out
    before its best are taken.
    """
    best, scores = {}, {}
    for leg, of in (("lexical", Route.LEXICAL), ("dense", Route.DENSE)):
        whole = retriever.on_route(of).retrieve(query, depth=len(retriever))
        scores[leg] = dict(zip(whole.passage_ids, whole.scores, strict=True))
        allowed = [x for x in whole.passage_ids if where.allows(retriever.passage(x).metadata)]
        best[leg] = allowed[:depth]
    if route is not Route.HYBRID:
        return [(each, scores[route.value][each]) for each in best[route.value]]  # type: ignore[misc]
    together = sorted({*best["lexical"], *best["dense"]})
    kinds = {"lexical": ScoreKind.RATIO, "dense": ScoreKind.COSINE}
    legs = {
        leg: Leg(np.array([scores[leg].get(each, 0.0) for each in together], np.float64), kind)
        for leg, kind in kinds.items()
    }
    fused = fuse(legs, retriever.fusion) if together else np.zeros(0)
    order = np.lexsort((np.arange(len(together)), -fused))[:depth]
    return [(together[at], float(fused[at])) for at in order]


class TestSearching:
    @pytest.mark.parametrize("engine", ["bm25s", "rank-bm25"])
    @given(
        corpus=corpora(),
        query=QUERIES,
        where=WHERES,
        route=st.sampled_from(ROUTES),
        depth=st.integers(1, 30),
    )
    @settings(max_examples=40, deadline=None)
    def test_filtered_ranking_cuts_forbidden_first(
        self,
        engine: Any,
        corpus: list[Passage],
        query: str,
        where: Where,
        *,
        route: Route,
        depth: int,
    ) -> None:
        """BM25 scores stay those of the whole index: word rarity is counted over all of it."""
        whole = build(corpus, lexical=engine)
        retriever = whole.with_fusion(Fusion("convex", weight=0.6))
        ranking = retriever.on_route(route).retrieve(query, depth=depth, where=where)
        expected = restricted(retriever, query, where, route, depth)
        assert (ranking.route, ranking.failures) == (route, ())
        assert ranking.scores == pytest.approx([score for _, score in expected], abs=1e-6)
        assert {*ranking.passage_ids} <= {p.passage_id for p in corpus if where.allows(p.metadata)}
        if all(a - b > 1e-5 for (_, a), (_, b) in pairwise(expected)):
            # Scores that differ in the last bit may change places.
            assert list(ranking.passage_ids[:-1]) == [each for each, _ in expected[:-1]]

    def test_ties_are_broken_by_passage_id(self) -> None:
        retriever = build(passages(*[n % 2 for n in range(9)])).with_fusion(Fusion())
        for route in ROUTES:
            ranking = retriever.on_route(route).retrieve("red", depth=3, where=Where(t=1))
            assert ranking.passage_ids == ("p1", "p3", "p5")

    def test_what_is_no_filter_is_refused(self) -> None:
        retriever = build([Passage("p", "red")])
        with pytest.raises(ConfigurationError, match=r"must be a ctxguard\.Where or None, not a d"):
            retriever.retrieve("red", where={"tenant": "a"})  # type: ignore[arg-type]

    @pytest.mark.parametrize("dead", ["lexical", "dense", "rerank"])
    def test_dead_stage_passes_nothing_forbidden(self, dead: str) -> None:
        faulty = FaultyRetriever(passages(*[n % 2 for n in range(10)]))

        def fail(_: object) -> None:
            raise OSError("gone")

        with faulty.faults[dead].injected(fail):
            ranking = faulty.retriever.with_reranker(faulty.reranker).retrieve(
                "red", where=Where(t=1)
            )
        assert [failure.stage for failure in ranking.failures] == [dead]
        assert set(ranking.passage_ids) == {f"p{n}" for n in range(1, 10, 2)}


class Readings:
    """Metadata that counts how often it was read from the start."""

    def __init__(self, every: Sequence[object]) -> None:
        self.every = every
        self.count = 0

    def __call__(self) -> Iterator[object]:
        self.count += 1
        yield from self.every


class HeldUp(Readings):
    """Metadata whose reading waits, once asked to, until it is let go."""

    def __init__(self, every: Sequence[object]) -> None:
        super().__init__(every)
        self.let_go = threading.Event()
        self.let_go.set()
        self.begun = threading.Event()

    def __call__(self) -> Iterator[object]:
        self.begun.set()
        assert self.let_go.wait(PATIENCE_SECONDS)
        yield from super().__call__()


class TestReadingFields:
    every = tuple({"t": n % 5, "u": n % 3, f"f{n % 20}": 1} for n in range(60))

    @pytest.mark.parametrize(
        ("prepared", "where", "rows"),
        [
            ([["t", "u", "f0"]], Where(t=1, u=1), [1, 16, 31, 46]),
            ([["t", "u", "f0"]], Where(f0=1), [0, 20, 40]),
            ([], Where(t=1, u=1, f1=1), [1]),
            ([["t", "u"], ["u", "t", "t"], []], Where(u=2, t=0), [5, 20, 35, 50]),
            ([["absent", "t"], ["absent too"]], Where(absent=1), []),
        ],
    )
    def test_fields_are_read_in_one_pass(
        self, prepared: list[list[str]], where: Where, rows: list[int]
    ) -> None:
        """Prepared, filtered on, prepared again, or a field that no passage has."""
        read = Readings(self.every)
        held = MetadataRows(read, 60)
        for names in prepared:
            held.prepare(names)
            assert set(held.fields) <= {"t", "u", "f0"}
        assert (held.allowed(where).tolist(), read.count) == (rows, 1)

    def test_impossible_filter_reads_nothing(self) -> None:
        read = Readings(self.every)
        assert (MetadataRows(read, 60).allowed(Where(t=1, u=[])).size, read.count) == (0, 0)

    def test_reading_blocks_no_other_fields(self) -> None:
        read = HeldUp(self.every)
        held = MetadataRows(read, 60)
        held.prepare(["t"])
        read.begun.clear()
        read.let_go.clear()
        with ThreadPoolExecutor(2) as pool:
            preparing = pool.submit(held.prepare, ["u"])
            assert read.begun.wait(PATIENCE_SECONDS)
            try:
                wheres = (Where(t=2), Where(absent=1))
                found, absent = pool.submit(
                    lambda: [held.allowed(where) for where in wheres]
                ).result(PATIENCE_SECONDS)
                assert held.fields == ("t",)
                assert not preparing.done()
            finally:
                read.let_go.set()
            preparing.result(PATIENCE_SECONDS)
        assert (absent.size, found.tolist()) == (0, list(range(2, 60, 5)))
        assert held.fields == ("t", "u")

    def test_readers_of_one_field_share_it(self) -> None:
        """Those who need the field that is being read wait for that one pass."""
        read = HeldUp(self.every)
        held = MetadataRows(read, 60)
        read.let_go.clear()
        with ThreadPoolExecutor(9) as pool:
            preparing = pool.submit(held.prepare, ["t"])
            assert read.begun.wait(PATIENCE_SECONDS)
            asked = [pool.submit(held.allowed, Where(t=n % 5)) for n in range(8)]
            read.let_go.set()
            preparing.result(PATIENCE_SECONDS)
            found = [each.result(PATIENCE_SECONDS).tolist() for each in asked]
        assert (found, read.count) == ([list(range(n % 5, 60, 5)) for n in range(8)], 1)

    def test_failed_pass_is_read_again(self) -> None:
        read = Readings(self.every)
        failures = iter([OSError("a page is missing")])

        def unsure() -> Iterator[object]:
            for failure in failures:
                raise failure
            yield from read()

        held = MetadataRows(unsure, 60)
        with pytest.raises(OSError, match="a page"):
            held.prepare(["t"])
        assert held.allowed(Where(t=1)).size == 12

    def test_forked_child_waits_for_nobody(self) -> None:
        held = MetadataRows(Readings(self.every), 60)
        with held._reading:
            fork_safety._reset_all()
            assert held.allowed(Where(t=1)).size == 12


class TestWarmingUp:
    @pytest.fixture
    def readings(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """One entry, the number of passages, for every pass over the metadata of an index."""
        passes: list[int] = []
        each_metadata = PassageTable._each_metadata

        def counted(table: PassageTable) -> Iterator[object]:
            passes.append(len(table))
            return each_metadata(table)

        monkeypatch.setattr(PassageTable, "_each_metadata", counted)
        return passes

    @pytest.fixture
    def retriever(self, readings: list[int]) -> HybridRetriever:
        corpus = [
            Passage(f"p{n}", "red fox", metadata={"tenant": n % 2, "groups": [n % 3]})
            for n in range(6)
        ]
        return build(corpus)

    def test_without_fields_no_metadata_is_read(
        self, retriever: HybridRetriever, readings: list[int]
    ) -> None:
        retriever.warm_up()
        assert readings == []

    def test_new_generations_read_before_answering(
        self, retriever: HybridRetriever, readings: list[int]
    ) -> None:
        retriever.warm_up(filter_fields=iter(("tenant", "groups")))
        kept = [retriever.passage(each) for each in retriever.passage_ids if each != "p1"]
        new = Passage("p9", "red fox", metadata={"tenant": 1, "groups": [1]})
        retriever.update([*kept, new])
        assert readings == [6, 6]
        ranking = retriever.retrieve("red", where=Where(tenant=1, groups=[0, 2]))
        assert (sorted(ranking.passage_ids), readings) == (["p3", "p5"], [6, 6])

    def test_pinned_view_prepares_its_own_passages(
        self, retriever: HybridRetriever, readings: list[int]
    ) -> None:
        pinned = retriever.pinned()
        retriever.update([retriever.passage("p2")])
        pinned.warm_up(filter_fields=["tenant"])
        assert (readings, len(pinned.retrieve("red", where=Where(tenant=1)))) == ([6], 3)
        assert readings == [6]

    def test_one_string_of_names_is_refused(self, retriever: HybridRetriever) -> None:
        with pytest.raises(ConfigurationError, match=r"give \['tenant'\]"):
            retriever.warm_up(filter_fields="tenant")


class TestRowsOfMetadata:
    @given(corpora(), WHERES)
    @settings(max_examples=50, deadline=None)
    def test_allowed_rows_follow_the_filter(self, corpus: list[Passage], where: Where) -> None:
        held = MetadataRows(lambda: [each.metadata for each in corpus], len(corpus))
        rows = held.allowed(where).tolist()
        assert rows == [n for n, each in enumerate(corpus) if where.allows(each.metadata)]

    def test_text_cannot_claim_metadata(self) -> None:
        """Nor a nested field, nor a line of a saved index that is not as it was written."""
        claim = ', "metadata": {"t": "a"}}\n'
        corpus = [
            Passage("p0", claim),
            Passage("p1", f"red {claim}", title=claim),
            Passage("p2", "red", metadata={"x": {"metadata": {"t": "a"}}, "y": claim}),
            Passage("p3", "red", metadata={"x": claim, "t": "a"}),
            Passage("p4", "red", metadata={}),
        ]
        table = read_passages(corpus)[0]
        assert table.metadata_rows.allowed(Where(t="a")).tolist() == [3]
        lines = [b'{"_id": "p", "metadata":{"t":"a"}}\n', b'{"_id": "q", "metadata": [1}\n']
        starts = np.array([0, len(lines[0]), len(b"".join(lines))])
        block = np.frombuffer(b"".join(lines), np.uint8)
        odd = PassageTable(block, starts, ["p", "q"], np.zeros(2, np.uint64))
        assert odd.metadata_rows.allowed(Where(t="a")).size == 0

    def test_unencodable_tenants_stay_apart(self, tmp_path: Path) -> None:
        tenants = ("a?", "a\ud800", "a\ufffd")
        build(passages(*tenants)).save(tmp_path / "index")
        loaded = HybridRetriever.load(tmp_path / "index", embedder=WordHashEmbedder())
        for n, tenant in enumerate(tenants):
            assert loaded.retrieve("red", where=Where(t=tenant)).passage_ids == (f"p{n}",)

    def test_forbidden_row_of_leg_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        retriever = build(passages(0, 1, 2))
        search = Bm25sIndex.search
        monkeypatch.setattr(
            Bm25sIndex, "search", lambda index, query, k, _: search(index, query, k)
        )
        with pytest.raises(FilterViolationError, match="`where` excludes: a bug"):
            retriever.retrieve("red", where=Where(t=1))


class Ranked:
    """A wrapped retriever that filters, or says that it does."""

    def __init__(self, hits: Sequence[Hit], *, honest: bool = True) -> None:
        self.hits = hits
        self.honest = honest
        self.asked: list[Where | None] = []

    def retrieve(self, query: str, *, depth: int = 100, where: Where | None = None) -> Ranking:
        self.asked.append(where)
        hits = [
            h for h in self.hits if not self.honest or where is None or where.allows(h.metadata)
        ]
        return Ranking.from_hits(hits[:depth], ScoreKind.RATIO)


HITS = [
    Hit("a1", 9.0, "one", metadata={"tenant": "a"}),
    Hit("b1", 8.0, "two", metadata={"tenant": "b"}),
    Hit("a2", 7.0, "three", metadata={"tenant": "a"}),
    Hit("none", 6.0, "four"),
]
TENANT_A = Where(tenant="a")


class Taken:
    """A sampler that takes everything."""

    def __init__(self) -> None:
        self.contexts: list[object] = []

    def draw(self, request_id: str, /) -> float:
        return 1.0

    def offer(self, context: object, probability: float, time_seconds: float, /) -> bool:
        self.contexts.append(context)
        return True


class Guarded:
    """A guard with a registry and a sampler of its own."""

    def __init__(self, retriever: object, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        self.sampler = Taken()
        self.guard = ContextGuard(
            retriever,
            telemetry=Telemetry(self.registry, all_metrics=True),
            sampler=self.sampler,
            **settings,
        )

    def counted(self, name: str) -> float:
        return sum(
            sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == f"ctxguard_{name}_total"
        )


class TestThroughTheGuard:
    @pytest.mark.parametrize("mode", list(Mode))
    def test_filter_reaches_retriever_and_serves(self, mode: Mode) -> None:
        retriever = Ranked(HITS)
        guarded = Guarded(retriever, mode=mode)
        for context in (
            guarded.guard.retrieve("q?", where=TENANT_A),
            asyncio.run(guarded.guard.aretrieve("q?", where=TENANT_A)),
        ):
            assert [passage.passage_id for passage in context.passages] == ["a1", "a2"]
        assert retriever.asked == [TENANT_A, TENANT_A]

    @pytest.mark.parametrize("mode", list(Mode))
    @pytest.mark.parametrize("awaited", [False, True])
    def test_disobedient_retriever_serves_nothing(self, mode: Mode, awaited: bool) -> None:
        """A retriever that does not keep to it is a failure and nothing is served."""
        guarded = Guarded(Ranked(HITS, honest=False), mode=mode)

        def ask() -> object:
            if awaited:
                return asyncio.run(guarded.guard.aretrieve("q?", where=TENANT_A))
            return guarded.guard.retrieve("q?", where=TENANT_A)

        with pytest.raises(FilterViolationError, match=r"2 of 4 candidates .* 'tenant'"):
            ask()
        assert (guarded.counted("failed_requests"), guarded.counted("filter_violations")) == (1, 1)
        assert (guarded.counted("requests"), guarded.sampler.contexts) == (0, [])

    def test_retriever_without_filter_is_never_asked(self) -> None:
        asked = []

        def blind(query: str, *, depth: int) -> Ranking:
            asked.append(query)
            return Ranking.from_hits(HITS, ScoreKind.RATIO)

        def careless(query: str, *, depth: int, **options: object) -> Ranking:
            return blind(query, depth=depth)

        for retriever in (blind, careless):
            guarded = Guarded(retriever)
            with pytest.raises(ConfigurationError, match="cannot filter"):
                guarded.guard.retrieve("q?", where=TENANT_A)
            with pytest.raises(ConfigurationError, match="cannot filter"):
                asyncio.run(guarded.guard.aretrieve("q?", where=TENANT_A))
            assert guarded.counted("failed_requests") == 2
        assert asked == []

    def test_async_half_without_filter_never_asked(self) -> None:
        class Half(Ranked):
            async def aretrieve(self, query: str, *, depth: int) -> Ranking:
                return Ranking.from_hits(HITS, ScoreKind.RATIO)

        with pytest.raises(ConfigurationError, match="cannot filter"):
            asyncio.run(Guarded(Half(HITS)).guard.aretrieve("q?", where=TENANT_A))

    @pytest.mark.parametrize("where", [{"tenant": "a"}, "tenant=a", [], 0, False])
    def test_only_a_filter_is_accepted(self, where: Any) -> None:
        retriever = Ranked(HITS)
        guarded = Guarded(retriever)
        for ask in (
            lambda: guarded.guard.retrieve("q?", where=where),
            lambda: asyncio.run(guarded.guard.aretrieve("q?", where=where)),
            lambda: guarded.guard.filter("q?", HITS, where=where),
        ):
            with pytest.raises(ConfigurationError, match=r"must be a ctxguard\.Where"):
                ask()
        assert (retriever.asked, guarded.counted("failed_requests")) == ([], 3)

    def test_results_at_hand_are_checked_too(self) -> None:
        guard = Guarded(None, score_kind="ratio").guard
        allowed = [hit for hit in HITS if TENANT_A.allows(hit.metadata)]
        assert len(guard.filter("q?", allowed, where=TENANT_A)) == 2
        with pytest.raises(FilterViolationError):
            guard.filter("q?", HITS, where=TENANT_A)

    def test_unreadable_passage_stays_out(self) -> None:
        """A passage that cannot be read costs itself and cannot come back."""

        class Flaky:
            """Unreadable when it is checked, readable afterwards."""

            readings = 0

            def __getitem__(self, position: int, /) -> Passage:
                Flaky.readings += 1
                if position == 0 and Flaky.readings == 1:
                    raise OSError("a page is missing")
                tenant = "b" if position == 0 else "a"
                return Passage(f"p{position}", f"text {position}", metadata={"tenant": tenant})

        ranking = replace(
            Ranking.from_hits([Hit("p0", 2.0), Hit("p1", 1.0)], ScoreKind.RATIO), passages=Flaky()
        )
        context = Guarded(None).guard.filter("q?", ranking, where=TENANT_A)
        assert [passage.passage_id for passage in context.passages] == ["p1"]
        assert context.dropped_by_reason == {DropReason.UNREADABLE: 1}

    def test_served_is_what_was_checked(self) -> None:
        class Turncoat:
            def __init__(self) -> None:
                self.readings = 0

            def __getitem__(self, position: int, /) -> Passage:
                self.readings += 1
                tenant = "a" if self.readings == 1 else "b"
                return Passage("p", f"text of {tenant}", metadata={"tenant": tenant})

        ranking = replace(Ranking.from_hits([Hit("p", 2.0)], ScoreKind.RATIO), passages=Turncoat())
        checked = verified(ranking, TENANT_A)
        assert checked.passages[0].text == checked.passages[0].text == "text of a"

    @given(corpora(), QUERIES, WHERES, st.sampled_from(list(Mode)), st.data())
    @settings(max_examples=25, deadline=None)
    def test_forbidden_passages_never_leave(
        self, corpus: list[Passage], query: str, where: Where, mode: Mode, data: st.DataObject
    ) -> None:
        """No forbidden passage is served, ranked or sampled, whatever changes in between."""
        retriever = build(corpus)
        guarded = Guarded(retriever, mode=mode)
        known = {passage.passage_id: passage for passage in corpus}
        for turn in range(3):
            context = guarded.guard.retrieve(query, where=where)
            for passage_id in context.decision.ranking.passage_ids:
                assert where.allows(known[passage_id].metadata)
            for passage in context.passages:
                assert passage == known[passage.passage_id]
            if len(known) > 1 and data.draw(st.booleans()):
                gone = data.draw(st.sampled_from(sorted(known)))
                del known[gone]
            else:
                new = Passage(f"new{turn}", "red fox", metadata=data.draw(metadata))
                known[new.passage_id] = new
            retriever.update(known.values())
        assert guarded.counted("requests") == len(guarded.sampler.contexts) == 3
