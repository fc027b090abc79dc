"""What a replay records of the answers, and the labels of every candidate beside its scores."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from simulated_pools import Recorded, labelled, ranking_of

from calibration.data.dataset import Dataset, Query
from calibration.grid import ratio_grid, with_expected
from calibration.pools import LabelledPools, label
from calibration.replay import Readings, replay
from ctxguard.core.decision import decide
from ctxguard.core.passages import estimate_tokens
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Hit, Leg, Passage, Ranking, Route, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.measure.worth import READERS, STRICT, Utilities
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import PassageLines
from tests.doubles import WordHashEmbedder


class TestLabelledPools:
    DATASET = Dataset(
        "hand-made",
        (Query("q0", "question 0"),),
        {"q0": {"p0": 2, "p2": 1, "p3": 0, "far": 2}},
        {"q0": {"p1": "hard_negative", "p3": "distractor"}},
    )

    def of(self, **settings: object) -> LabelledPools:
        pools = labelled([ranking_of([5.0, 4.0, 3.0, 2.0, 1.0])], [{"p0": 1}], depth=6)
        return label(pools, self.DATASET, **settings)  # type: ignore[arg-type]

    def test_candidates_have_grade_and_worth(self) -> None:
        labels = self.of(utilities=STRICT)
        assert labels.grades.tolist() == [[2, 0, 1, 0, 0, 0]]
        assert labels.judged.tolist() == [[True, True, True, True, False, False]]
        assert labels.utilities.tolist() == [[1.0, -0.5, 0.5, -1.0, -0.2, 0.0]]
        assert not labels.positives_only
        assert labels.misleading[0].tolist() == [False, True, False, True, False, False]
        assert labels.best_grades.tolist() == [[2, 2, 1, *[0] * 7]]
        assert labels.top_grade == 2
        assert labels.rules.worst == -1.0
        assert labels.n_answerable == 1

    def test_unlabelled_is_worth_unjudged(self) -> None:
        assert self.of(utilities=Utilities(unjudged=-0.05)).utilities[0, 4] == -0.05

    @pytest.mark.parametrize(
        ("qrels", "distractors", "judged", "utilities"),
        [
            # Where labels hold relevant passages only, an unlabelled one is not relevant.
            ([{"p0": 1}], [], None, [[1.0, READERS.irrelevant]]),
            ([{"p0": 1}, None], [], None, [[1.0, READERS.irrelevant], [READERS.irrelevant] * 2]),
            # A distractor is a label of one that is not.
            (
                [{"p0": 1}, None],
                [{"p1": "distractor"}],
                [[True, True], [False, False]],
                [[1.0, READERS.distractor], [READERS.unjudged] * 2],
            ),
            # An empty list of relevant passages judges every candidate of its query.
            (
                [{"p0": 1}, {}],
                [],
                [[True, False], [True, True]],
                [[1.0, READERS.unjudged], [READERS.irrelevant] * 2],
            ),
        ],
    )
    def test_what_judges_the_unlabelled(
        self,
        qrels: list[dict[str, int] | None],
        distractors: list[dict[str, Any]],
        judged: list[list[bool]] | None,
        utilities: list[list[float]],
    ) -> None:
        names = [f"q{n}" for n in range(len(qrels))]
        pools = labelled([ranking_of([2.0, 1.0])] * len(qrels), [{"p0": 1}] * len(qrels), depth=2)
        graded = {name: own for name, own in zip(names, qrels, strict=True) if own is not None}
        kinds = dict(zip(names, distractors, strict=False))
        queries = tuple(Query(name, f"question {name[1:]}") for name in names)
        labels = label(pools, Dataset("d", queries, graded, kinds))
        assert labels.positives_only == (judged is None)
        assert labels.utilities.tolist() == utilities
        if judged is not None:
            assert labels.judged.tolist() == judged

    def test_recall_loss_is_against_baseline(self) -> None:
        assert np.flatnonzero(self.of().at_stake).tolist() == [0, 2]
        assert np.flatnonzero(self.of(baseline_k=2).at_stake).tolist() == [0]

    def test_irrelevant_baseline_leaves_it_undefined(self) -> None:
        pools = labelled([ranking_of([2.0, 1.0])], [{"p1": 1}], depth=2, baseline_k=1)
        assert not pools.at_stake.any()
        assert np.isnan(ratio_grid(pools).means[1]).all()

    def test_expected_relevant_equal_labelled(self) -> None:
        probabilities = np.array([[0.4, 0.3, 0.2, 0.1, 0.0, np.nan]])
        labels = replace(self.of(utilities=STRICT), probabilities=probabilities)
        relevant, worth = with_expected(labels, 1.0)
        assert relevant == pytest.approx(np.array([[0.8, 0.6, 0.4, 0.2, 0.0, 0.0]]))
        wrong, right = (-0.5 - 1.0 - 0.2) / 3, (1.0 + 0.5) / 2
        expected = [0.8 + 0.2 * wrong, 0.6 * right - 0.4 * 0.5, 0.4 * 0.5 + 0.6 * wrong]
        assert worth[0, :3] == pytest.approx(expected)
        assert worth[0, 3:] == pytest.approx([0.2 * right - 0.8, -0.2, 0.0])
        half, _ = with_expected(labels, 0.5)
        assert half == pytest.approx((relevant + labels.relevant) / 2)
        none, as_labelled = with_expected(labels, 0.0)
        assert none.tolist() == labels.relevant.tolist()
        assert as_labelled.tolist() == labels.utilities.tolist()

    def test_no_relevant_labels_calibrate_nothing(self) -> None:
        with pytest.raises(CalibrationError, match="no passage is labelled relevant"):
            labelled([ranking_of([1.0])], [{"p0": 0}])


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


class TestColumns:
    def test_candidates_are_recorded_best_first(self) -> None:
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

    def test_garbage_and_repeats_are_none(self) -> None:
        ranking = ranking_of([1.0, None, 2.0, float("nan")], ids=["a", "b", "a", "c"])
        pools = replay(retriever_of(ranking), QUERIES[:1])
        assert pools.passage_ids == (("a",),)
        assert pools.scores[0, 0] == 2.0

    @given(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, None]), max_size=8), st.booleans(), st.randoms()
    )
    def test_order_is_that_of_decide(
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

    def test_reordered_pools_are_alike(self) -> None:
        pools = replay(
            retriever_of(ranking_of([1.0], ids=["a"]), ranking_of([2.0], ids=["b"])), QUERIES
        )
        part = pools.subset(["q1", "absent", "q0"])
        assert part.query_ids == ("q1", "q0")
        assert part.passage_ids == (("b",), ("a",))
        assert part.scores[:, 0].tolist() == [2.0, 1.0]


class TestSkipped:
    def test_garbage_only_query_is_skipped(self) -> None:
        garbage = ranking_of([None, float("nan")])
        pools = replay(retriever_of(garbage, ranking_of([1.0])), QUERIES)
        assert pools.query_ids == ("q1",)
        assert "set its score kind to rank" in pools.skipped[0]

    def test_refused_query_records_its_reason(self) -> None:
        done: list[int] = []
        pools = replay(retriever_of(ranking_of([1.0])), QUERIES, progress=done.append)
        assert pools.query_ids == ("q0",)
        assert pools.skipped == ("q1: 'second' cannot be searched",)
        assert sum(done) == 2

    def test_other_routes_do_not_mix(self) -> None:
        degraded = ranking_of([1.0], route=Route.LEXICAL)
        queries = (*QUERIES, Query("q2", "third"))
        answers = {"first": degraded, "second": ranking_of([1.0]), "third": ranking_of([1.0])}
        pools = replay(Recorded(answers), queries)
        assert pools.route is Route.HYBRID
        assert pools.query_ids == ("q1", "q2")
        assert pools.skipped == (
            "q0: answered by lexical with ratio scores, not hybrid with ratio",
        )

    def test_all_refused_names_first_reason(self) -> None:
        with pytest.raises(CalibrationError, match=r"none of 2 queries .*'first' cannot be"):
            replay(retriever_of(), QUERIES)
        with pytest.raises(CalibrationError, match="no queries"):
            replay(retriever_of(), ())


def test_answers_are_not_kept() -> None:
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


def test_each_passage_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and routes that find a passage again take what was read of it."""
    corpus = [Passage(f"p{n}", f"fox number {n} " * n) for n in range(1, 9)]
    retriever = HybridRetriever.build(corpus, embedder=WordHashEmbedder())
    read: list[int] = []

    def many(self: PassageLines, positions: Sequence[int]) -> list[Passage]:
        read.extend(self.starts[position] for position in positions)
        return own(self, positions)

    own = PassageLines.many
    monkeypatch.setattr(PassageLines, "many", many)
    readings = Readings()
    queries = [Query(f"q{n}", f"fox number {n}") for n in range(4)]
    for route in (Route.HYBRID, Route.LEXICAL, Route.DENSE):
        pools = replay(retriever.on_route(route), queries, depth=8, readings=readings)
        tokens = {each.passage_id: estimate_tokens(each.text) for each in corpus}
        for row, ids in enumerate(pools.passage_ids):
            assert pools.tokens[row, : len(ids)].tolist() == [tokens[one] for one in ids]
    assert len(read) == len(set(read)) == len(corpus)


def test_query_dependent_texts_count_each() -> None:
    """A retriever may return another part of a passage under the same id."""
    answers = {
        query: Ranking.from_hits([Hit("p", 1.0, text=text)], ScoreKind.COSINE)
        for query, text in (("first", "short"), ("second", "a text that is quite a bit longer"))
    }
    pools = replay(Recorded(answers), QUERIES)
    assert pools.tokens[0, 0] < pools.tokens[1, 0]
