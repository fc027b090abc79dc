"""A filter on metadata: applied inside the search in both legs, checked again, failing closed."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
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

from ctxguard._support import fork_safety
from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where, tokens, verified
from ctxguard.core.types import (
    DropReason,
    Hit,
    Mode,
    Passage,
    Ranking,
    Route,
    ScoreKind,
)
from ctxguard.errors import ConfigurationError, FilterViolationError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.filters import MetadataRows
from ctxguard.retrieval.index.lexical import Bm25sIndex
from ctxguard.retrieval.index.passages import PassageTable, read_passages
from tests.counted import Counted
from tests.doubles import FaultyRetriever, WordHashEmbedder
from tests.guard.guards import Sampled, served
from tests.timing import PATIENCE_SECONDS

WORDS = ("red", "fox", "dog", "rose", "snow", "hill", "rain", "cloud")
ROUTES = (Route.HYBRID, Route.LEXICAL, Route.DENSE)


def build(corpus: Sequence[Passage], **settings: Any) -> HybridRetriever:
    return HybridRetriever.build(corpus, embedder=WordHashEmbedder(), **settings)


def passages(*tenants: object) -> list[Passage]:
    """One passage for each tenant, p0 for the first."""
    return [Passage(f"p{n}", "red fox", metadata={"t": t}) for n, t in enumerate(tenants)]


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

    def test_equal_filters_share_hash_and_digest(self) -> None:
        where = Where({"tenant": "a"}, groups=["b", 1])
        same = Where(groups=(1, "b", 1), tenant=["a"])
        assert (where, hash(where), where.digest) == (same, hash(same), same.digest)
        others = [
            Where(tenant="a", groups=["b", "1"]),
            Where(tenant="a", groups=["b", True]),
            Where(tenant="a"),
            Where({"tenant": "a", "groups": ["b', '1"]}),
        ]
        assert len({where, *others}) == len({each.digest for each in (where, *others)}) == 5
        with pytest.raises(AttributeError):
            where.conditions = ()  # type: ignore[misc]

    def test_fields_are_described_without_values(self) -> None:
        where = Where({"tenant.id": "secret"}, groups=["x"])
        assert where.fields == ("groups", "tenant.id")
        assert repr(where) == "Where(groups=…, tenant.id=…)"

    def test_metadata_that_raises_is_not_allowed(self) -> None:
        class Broken(dict[str, object]):
            def get(self, *_: object) -> object:
                raise RuntimeError("gone")

        assert not Where(tenant="a").allows(Broken(tenant="a"))

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


class TestSearching:
    @pytest.mark.parametrize("engine", ["bm25s", "rank-bm25"])
    @given(corpus=corpora(), query=QUERIES, where=WHERES, depth=st.integers(1, 30))
    @settings(max_examples=40, deadline=None)
    def test_filtered_ranking_cuts_forbidden_first(
        self, engine: Any, corpus: list[Passage], query: str, where: Where, *, depth: int
    ) -> None:
        """BM25 scores stay those of the whole index: word rarity is counted over all of it."""
        whole = build(corpus, lexical=engine).with_fusion(Fusion("convex", weight=0.6))
        allowed = {each.passage_id for each in corpus if where.allows(each.metadata)}
        scores: dict[str, dict[str, float]] = {}
        united: set[str] = set()
        for leg, route in (("lexical", Route.LEXICAL), ("dense", Route.DENSE)):
            every = whole.on_route(route).retrieve(query, depth=len(whole))
            scores[leg] = dict(zip(every.passage_ids, every.scores, strict=True))
            best = [each for each in every.passage_ids if each in allowed][:depth]
            ranking = whole.on_route(route).retrieve(query, depth=depth, where=where)
            expected = [scores[leg][each] for each in best]
            assert ranking.route is route
            assert ranking.scores == pytest.approx(expected, abs=1e-6)
            if all(one - other > 1e-5 for one, other in pairwise(expected)):
                # Scores that differ in the last bit may change places.
                assert list(ranking.passage_ids[:-1]) == best[:-1]
            united |= {*ranking.passage_ids}
        ranking = whole.retrieve(query, depth=depth, where=where)
        assert (len(ranking), ranking.failures) == (min(depth, len(united)), ())
        assert {*ranking.passage_ids} <= united <= allowed
        for leg, found in ranking.legs.items():
            own = [scores[leg].get(each, 0.0) for each in ranking.passage_ids]
            assert found.scores == pytest.approx(own, abs=1e-6)

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
    """Metadata that counts how often it was read from the start, and waits while it is held."""

    def __init__(self, every: Sequence[object]) -> None:
        self.every, self.count = every, 0
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()

    def __call__(self) -> Iterator[object]:
        self.begun.set()
        assert self.let_go.wait(PATIENCE_SECONDS)
        self.count += 1
        yield from self.every


class TestReadingFields:
    every = tuple({"t": n % 5, "u": n % 3, f"f{n % 20}": 1} for n in range(60))

    @pytest.mark.parametrize(
        ("prepared", "where", "rows", "passes"),
        [
            ([["t", "u", "f0"]], Where(t=1, u=1), [1, 16, 31, 46], 1),
            ([["t", "u", "f0"]], Where(f0=1), [0, 20, 40], 1),
            ([], Where(t=1, u=1, f1=1), [1], 1),
            ([["t", "u"], ["u", "t", "t"], []], Where(u=2, t=0), [5, 20, 35, 50], 1),
            ([["absent", "t"], ["absent too"]], Where(absent=1), [], 1),
            ([], Where(t=1, u=[]), [], 0),
        ],
    )
    def test_fields_are_read_in_one_pass(
        self, prepared: list[list[str]], where: Where, rows: list[int], passes: int
    ) -> None:
        """Prepared, filtered on, prepared again, or absent; none for what nothing satisfies."""
        read = Readings(self.every)
        held = MetadataRows(read, 60)
        for names in prepared:
            held.prepare(names)
            assert set(held.fields) <= {"t", "u", "f0"}
        assert (held.allowed(where).tolist(), read.count) == (rows, passes)

    def test_only_readers_of_one_field_wait(self) -> None:
        """Those who need the field that is being read share that one pass."""
        read = Readings(self.every)
        held = MetadataRows(read, 60)
        held.prepare(["t"])
        read.begun.clear()
        read.let_go.clear()
        with ThreadPoolExecutor(9) as pool:
            preparing = pool.submit(held.prepare, ["u"])
            assert read.begun.wait(PATIENCE_SECONDS)
            waiting = [pool.submit(held.allowed, Where(u=n % 3)) for n in range(6)]
            try:
                wheres = (Where(t=2), Where(absent=1))
                others = pool.submit(lambda: [held.allowed(where).tolist() for where in wheres])
                assert others.result(PATIENCE_SECONDS) == [list(range(2, 60, 5)), []]
                assert (held.fields, preparing.done()) == (("t",), False)
            finally:
                read.let_go.set()
            found = [each.result(PATIENCE_SECONDS).tolist() for each in waiting]
        assert found == [list(range(n % 3, 60, 3)) for n in range(6)]
        assert (held.fields, read.count) == (("t", "u"), 2)

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
        fields = [{"tenant": n % 2, "groups": [n % 3]} for n in range(6)]
        return build([Passage(f"p{n}", "red fox", metadata=each) for n, each in enumerate(fields)])

    def test_new_generations_read_before_answering(
        self, retriever: HybridRetriever, readings: list[int]
    ) -> None:
        retriever.warm_up()
        assert readings == []
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
        with pytest.raises(FilterViolationError, match="`where` excludes: this is a bug"):
            retriever.retrieve("red", where=Where(t=1))


class Ranked:
    """A wrapped retriever that filters, or says that it does."""

    def __init__(self, *, honest: bool = True) -> None:
        self.honest = honest
        self.asked: list[Where | None] = []

    def retrieve(self, query: str, *, depth: int = 100, where: Where | None = None) -> Ranking:
        self.asked.append(where)
        allowed = [h for h in HITS if not self.honest or where is None or where.allows(h.metadata)]
        return Ranking.from_hits(allowed[:depth], ScoreKind.RATIO)


HITS = [
    Hit("a1", 9.0, "one", metadata={"tenant": "a"}),
    Hit("b1", 8.0, "two", metadata={"tenant": "b"}),
    Hit("a2", 7.0, "three", metadata={"tenant": "a"}),
    Hit("none", 6.0, "four"),
]
TENANT_A = Where(tenant="a")


class Guarded:
    """A guard with counts and a sampler of its own."""

    def __init__(self, retriever: object, **settings: Any) -> None:
        self.counted, self.sampler = Counted(), Sampled()
        self.guard = ContextGuard(
            retriever, telemetry=self.counted.telemetry, sampler=self.sampler, **settings
        )

    def ask(self, where: Any, *, awaited: bool = False) -> Any:
        if awaited:
            return asyncio.run(self.guard.aretrieve("q?", where=where))
        return self.guard.retrieve("q?", where=where)


class Changing:
    """Passages of another tenant at each reading, or an error; of the last from then on."""

    def __init__(self, readings: Sequence[str | Exception]) -> None:
        self.readings = list(readings)

    def __getitem__(self, position: int, /) -> Passage:
        found = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(found, Exception):
            raise found
        return Passage(f"p{position}", f"text of {found}", metadata={"tenant": found})


def ranked(n: int, passages: Changing) -> Ranking:
    hits = [Hit(f"p{at}", 2.0 - at) for at in range(n)]
    return replace(Ranking.from_hits(hits, ScoreKind.RATIO), passages=passages)


both_calls = pytest.mark.parametrize("awaited", [False, True], ids=["called", "awaited"])


class TestThroughTheGuard:
    @both_calls
    @pytest.mark.parametrize("mode", list(Mode))
    def test_filter_reaches_retriever_and_serves(self, mode: Mode, *, awaited: bool) -> None:
        retriever = Ranked()
        assert served(Guarded(retriever, mode=mode).ask(TENANT_A, awaited=awaited)) == ["a1", "a2"]
        assert retriever.asked == [TENANT_A]

    @both_calls
    @pytest.mark.parametrize("mode", list(Mode))
    def test_disobedient_retriever_serves_nothing(self, mode: Mode, *, awaited: bool) -> None:
        """A retriever that does not keep to it is a failure and nothing is served."""
        guarded = Guarded(Ranked(honest=False), mode=mode)
        with pytest.raises(FilterViolationError, match=r"2 of 4 candidates .* 'tenant'"):
            guarded.ask(TENANT_A, awaited=awaited)
        counted = guarded.counted
        assert (counted["failed_requests"], counted["filter_violations"]) == (1, 1)
        assert (counted["requests"], guarded.sampler.contexts) == (0, [])

    @both_calls
    def test_retriever_without_filter_is_never_asked(self, *, awaited: bool) -> None:
        """Nor one that swallows the keyword, nor the asynchronous half of one that filters."""
        asked = []

        def blind(query: str, *, depth: int) -> Ranking:
            asked.append(query)
            return Ranking.from_hits(HITS, ScoreKind.RATIO)

        def careless(query: str, *, depth: int, **options: object) -> Ranking:
            return blind(query, depth=depth)

        class Half(Ranked):
            async def aretrieve(self, query: str, *, depth: int) -> Ranking:
                return blind(query, depth=depth)

        for retriever in (blind, careless, *([Half()] if awaited else [])):
            guarded = Guarded(retriever)
            with pytest.raises(ConfigurationError, match="cannot filter"):
                guarded.ask(TENANT_A, awaited=awaited)
            assert guarded.counted["failed_requests"] == 1
        assert asked == []

    @pytest.mark.parametrize("where", [{"tenant": "a"}, "tenant=a", [], 0, False])
    def test_only_a_filter_is_accepted(self, where: Any) -> None:
        retriever = Ranked()
        guarded = Guarded(retriever)
        for ask in (
            lambda: guarded.ask(where),
            lambda: guarded.ask(where, awaited=True),
            lambda: guarded.guard.filter("q?", HITS, where=where),
        ):
            with pytest.raises(ConfigurationError, match=r"must be a ctxguard\.Where"):
                ask()
        assert (retriever.asked, guarded.counted["failed_requests"]) == ([], 3)

    def test_results_at_hand_are_checked_too(self) -> None:
        guard = Guarded(None, score_kind="ratio").guard
        allowed = [hit for hit in HITS if TENANT_A.allows(hit.metadata)]
        assert len(guard.filter("q?", allowed, where=TENANT_A)) == 2
        with pytest.raises(FilterViolationError):
            guard.filter("q?", HITS, where=TENANT_A)

    def test_unreadable_passage_stays_out(self) -> None:
        """A passage that cannot be read costs itself and cannot come back."""

        changing = Changing([OSError("a page is missing"), "a", "b"])
        context = Guarded(None).guard.filter("q?", ranked(2, changing), where=TENANT_A)
        assert served(context) == ["p1"]
        assert context.dropped_by_reason == {DropReason.UNREADABLE: 1}

    def test_served_is_what_was_checked(self) -> None:
        checked = verified(ranked(1, Changing(["a", "b"])), TENANT_A)
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
        assert guarded.counted["requests"] == len(guarded.sampler.contexts) == 3
