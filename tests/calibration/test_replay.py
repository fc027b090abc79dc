"""Replay: what is recorded of a retriever's answers, in which order, and how it is kept."""

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulated_pools import Recorded, ranking_of, simulate

from calibration.data.dataset import Query
from calibration.replay import Pools, QueryVectors, replay
from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Leg, Ranking, Route, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.retrieval.protocols import QueryStates

QUERIES = (Query("q0", "first"), Query("q1", "second"))
LEGS = {
    "dense": Leg(np.array([0.1, 0.2, 0.3]), ScoreKind.COSINE),
    "lexical": Leg(np.array([1.0, 2.0, np.nan]), ScoreKind.RATIO),
}


def retriever_of(*rankings: Ranking) -> Recorded:
    return Recorded(
        {query.text: ranking for query, ranking in zip(QUERIES, rankings, strict=False)},
        {"system": "one"},
    )


def assert_equal(one: Pools, other: Pools) -> None:
    for name in ("route", "kind", "query_ids", "passage_ids", "leg_kinds", "skipped"):
        assert getattr(one, name) == getattr(other, name), name
    assert np.array_equal(one.scores, other.scores, equal_nan=True)
    for columns, others in ((one.legs, other.legs), (one.signals, other.signals)):
        assert columns.keys() == others.keys()
        for name, values in columns.items():
            assert np.array_equal(values, others[name], equal_nan=True), name


class TestColumns:
    def test_candidates_are_recorded_best_first_with_each_legs_own_scores(self) -> None:
        pools = replay(retriever_of(ranking_of([1.0, 3.0, 2.0], legs=LEGS)), QUERIES[:1], depth=4)
        assert pools.passage_ids == (("p1", "p2", "p0"),)
        assert np.array_equal(pools.scores, [[3.0, 2.0, 1.0, np.nan]], equal_nan=True)
        assert np.array_equal(pools.legs["dense"], [[0.2, 0.3, 0.1, np.nan]], equal_nan=True)
        assert np.array_equal(pools.legs["lexical"], [[2.0, np.nan, 1.0, np.nan]], equal_nan=True)
        assert pools.leg_kinds == {"dense": ScoreKind.COSINE, "lexical": ScoreKind.RATIO}
        assert (pools.route, pools.kind) == (Route.HYBRID, ScoreKind.RATIO)
        assert pools.lengths.tolist() == [3]
        two = replay(retriever_of(ranking_of([1.0, 3.0, 2.0])), QUERIES[:1], depth=2)
        assert two.passage_ids == (("p1", "p2"),)

    def test_garbage_and_repeated_ids_are_no_candidates(self) -> None:
        ranking = ranking_of([1.0, None, 2.0, float("nan")], ids=["a", "b", "a", "c"])
        pools = replay(retriever_of(ranking), QUERIES[:1])
        assert pools.passage_ids == (("a",),)
        assert pools.scores[0, 0] == 2.0

    @given(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, None]), max_size=8), st.booleans(), st.randoms()
    )
    def test_the_order_is_the_one_that_decide_sees(
        self, scores: list[float | None], with_ranks: bool, random: object
    ) -> None:
        ids = [f"p{i}" for i in range(len(scores))]
        ranks = list(range(1, len(scores) + 1))
        random.shuffle(ranks)  # type: ignore[attr-defined]
        assume(not scores or any(score is not None for score in scores))
        ranking = ranking_of(scores, ids=ids, ranks=ranks if with_ranks else None)
        pools = replay(retriever_of(ranking), QUERIES[:1])
        everything = RatioPolicy(k=100)
        assert pools.passage_ids[0] == decide(ranking, everything).kept_ids
        (recorded,) = pools.rankings()
        assert decide(recorded, everything).kept_ids == pools.passage_ids[0]

    def test_part_of_the_pools_in_another_order(self) -> None:
        pools = replay(
            retriever_of(ranking_of([1.0], ids=["a"]), ranking_of([2.0], ids=["b"])), QUERIES
        )
        part = pools.subset(["q1", "absent", "q0"])
        assert part.query_ids == ("q1", "q0")
        assert part.passage_ids == (("b",), ("a",))
        assert part.scores[:, 0].tolist() == [2.0, 1.0]


class TestSkipped:
    def test_a_query_whose_scores_are_all_garbage_is_left_out_with_the_mend(self) -> None:
        garbage = ranking_of([None, float("nan")])
        pools = replay(retriever_of(garbage, ranking_of([1.0])), QUERIES)
        assert pools.query_ids == ("q1",)
        assert "say that its score kind is rank" in pools.skipped[0]

    def test_a_refused_query_is_recorded_with_the_reason(self, tmp_path: Path) -> None:
        done: list[int] = []
        retriever = retriever_of(ranking_of([1.0]))
        for _ in range(2):  # the second from the cache
            pools = replay(retriever, QUERIES, progress=done.append, cache=tmp_path)
            assert pools.query_ids == ("q0",)
            assert pools.skipped == ("q1: 'second' cannot be searched",)
        assert sum(done) == 4

    def test_a_query_answered_on_another_route_does_not_mix_in(self) -> None:
        degraded = ranking_of([1.0], route=Route.LEXICAL)
        queries = (*QUERIES, Query("q2", "third"))
        answers = {"first": degraded, "second": ranking_of([1.0]), "third": ranking_of([1.0])}
        pools = replay(Recorded(answers), queries)
        assert pools.route is Route.HYBRID
        assert pools.query_ids == ("q1", "q2")
        assert pools.skipped == (
            "q0: answered by lexical with ratio scores, not hybrid with ratio",
        )

    def test_where_every_query_is_refused_the_first_reason_is_given(self) -> None:
        with pytest.raises(CalibrationError, match=r"none of 2 queries .*'first' cannot be"):
            replay(retriever_of(), QUERIES)
        with pytest.raises(CalibrationError, match="no queries"):
            replay(retriever_of(), ())


def test_a_querys_vector_is_handed_over_where_there_is_one() -> None:
    @dataclass
    class Vectored:
        seen: list[object]

        def retrieve(self, query: str, *, depth: int = 100, query_vector: object = None) -> Ranking:
            self.seen.append(query_vector)
            return ranking_of([1.0])

    retriever = Vectored([])
    replay(retriever, QUERIES, vectors={"q1": "vector"})
    assert retriever.seen == [None, "vector"]


class TestCache:
    def record(
        self, cache: Path, *, queries: Sequence[Query] = QUERIES, depth: int = 5
    ) -> Recorded:
        signals = {"price": np.array([1.0, 2.0, 3.0])}
        ranking = replace(ranking_of([1.0, 3.0, 2.0], legs=LEGS), signals=signals)
        retriever = retriever_of(ranking, ranking_of([]))
        replay(retriever, queries, depth=depth, cache=cache)
        return retriever

    def test_the_second_replay_asks_nothing_and_gives_equal_pools(self, tmp_path: Path) -> None:
        simulated, dataset = simulate(20)
        done: list[int] = []
        first = replay(simulated, dataset.queries, depth=15, cache=tmp_path)
        simulated.asked.clear()
        second = replay(simulated, dataset.queries, depth=15, cache=tmp_path, progress=done.append)
        assert_equal(first, second)
        assert simulated.asked == []
        assert sum(done) == 20

    def test_another_system_query_or_depth_is_asked_anew(self, tmp_path: Path) -> None:
        self.record(tmp_path)
        other = retriever_of(ranking_of([1.0]), ranking_of([2.0]))
        other.identity = {"system": "two"}
        replay(other, QUERIES, depth=5, cache=tmp_path)
        assert other.asked == ["first", "second"]
        assert self.record(tmp_path, depth=6).asked == ["first", "second"]
        renamed = [replace(QUERIES[0], query_id="other"), QUERIES[1]]
        assert self.record(tmp_path, queries=renamed).asked == ["first", "second"]
        assert self.record(tmp_path).asked == []

    def test_a_route_of_one_system_is_not_taken_for_another(self, tmp_path: Path) -> None:
        one, other = self.record(tmp_path), retriever_of(ranking_of([1.0]), ranking_of([2.0]))
        assert one.fingerprint() == other.fingerprint()
        other.route = Route.LEXICAL  # type: ignore[attr-defined]
        replay(other, QUERIES, depth=5, cache=tmp_path)
        assert other.asked == ["first", "second"]

    def test_a_system_that_cannot_be_told_apart_is_not_cached(self, tmp_path: Path) -> None:
        class Anonymous:
            def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
                return ranking_of([1.0])

        replay(Anonymous(), QUERIES, cache=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_nothing_but_the_pools_is_left_in_the_folder(self, tmp_path: Path) -> None:
        self.record(tmp_path / "new" / "folder")
        (file,) = (tmp_path / "new" / "folder").iterdir()
        assert file.suffix == ".npz"

    @settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_a_damaged_cache_is_made_anew(self, tmp_path: Path, data: st.DataObject) -> None:
        self.record(tmp_path)
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()
        content = bytearray(whole)
        position = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content = content[:position]
        else:
            content[position] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        retriever = self.record(tmp_path)
        again = replay(retriever, QUERIES, depth=5, cache=tmp_path)
        file.unlink()
        assert_equal(replay(retriever, QUERIES, depth=5), again)

    @pytest.mark.parametrize(
        "content",
        [b"", b"PK\x05\x06" + b"\x00" * 18, b"not an archive", b"\x93NUMPY\x01\x00"],
        ids=["empty", "no members", "text", "array"],
    )
    def test_what_is_no_cache_at_all_is_replaced(self, tmp_path: Path, content: bytes) -> None:
        self.record(tmp_path)
        (file,) = tmp_path.iterdir()
        file.write_bytes(content)
        assert self.record(tmp_path).asked == ["first", "second"]
        assert self.record(tmp_path).asked == []

    def test_a_pickle_in_the_cache_is_never_run(self, tmp_path: Path) -> None:
        self.record(tmp_path)
        (file,) = tmp_path.iterdir()
        ran = tmp_path / "ran"

        class Harm:
            def __reduce__(self) -> object:
                return (ran.touch, ())

        about = np.frombuffer(json.dumps({}).encode(), dtype=np.uint8)
        np.savez(file, about=about, scores=np.array([Harm()], dtype=object))
        assert self.record(tmp_path).asked == ["first", "second"]
        assert not ran.exists()


def test_a_cache_that_cannot_be_written_says_so_before_the_work(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    retriever = retriever_of(ranking_of([1.0]))
    with pytest.raises(ConfigurationError, match="give another"):
        replay(retriever, QUERIES[:1], cache=blocked)
    assert retriever.asked == []


class TestQueryVectors:
    def test_arrays_and_word_pieces_come_back_as_they_were(self) -> None:
        rng = np.random.default_rng(0)
        tokens = QueryStates(
            rng.random(3, np.float32), np.array([7, 5]), rng.random((2, 4), np.float32)
        )
        none = QueryStates(np.ones(3, np.float32), np.zeros(0, int), np.zeros((0, 4), np.float32))
        vectors = QueryVectors()
        for query_id, encoded in (("t", tokens), ("v", tokens.vector), ("n", none)):
            vectors.add(query_id, encoded)
        assert list(vectors) == ["t", "v", "n"]
        for expected, found in ((tokens, vectors["t"]), (none, vectors["n"])):
            assert isinstance(found, QueryStates)
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one, other)
                assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(vectors["v"], tokens.vector)
        assert vectors.get("unknown") is None

    def test_each_query_has_its_own(self) -> None:
        vectors = QueryVectors()
        for number in range(50):
            vectors.add(str(number), np.full(8, number, np.float32))
        assert vectors["31"].tolist() == [31.0] * 8


def test_the_answers_of_queries_are_not_kept() -> None:
    scores: list[weakref.ref[FloatArray]] = []
    most = 0

    class Retriever:
        def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
            nonlocal most
            del query, depth
            most = max(most, sum(one() is not None for one in scores))
            own = np.array([0.5, 0.2])
            scores.append(weakref.ref(own))
            return ranking_of([2.0, 1.0], legs={"dense": Leg(own, ScoreKind.COSINE)})

    queries = tuple(Query(str(number), f"query {number}") for number in range(20))
    assert len(replay(Retriever(), queries, depth=5)) == len(scores) == 20
    assert most <= 2
