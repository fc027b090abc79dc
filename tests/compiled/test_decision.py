"""Decisions by the compiled module and by numpy are the same."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard._support import _compiled
from ctxguard.core.decision import Decision, decide
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import RANKING, feature_names, named_features
from ctxguard.core.trees import MAX_LEAVES, Trees
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind

pytestmark = pytest.mark.skipif(_compiled.kernels is None, reason="the compiled module is absent")

KINDS = [kind for kind in ScoreKind if kind is not ScoreKind.RANK]
SIGNALS = ("freshness", "ranker", "stem_coverage", "term_support", "vector_redundancy")


def trees_over(rng: np.random.Generator, n_features: int, n_trees: int) -> Trees:
    """Random trees of 1 to `MAX_LEAVES` leaves: each inner node splits the leaves of its part."""
    columns: list[list[tuple[Any, ...]]] = [[], [], [], []]
    for _ in range(n_trees):
        masks: list[int] = []
        parts = [(0, int(rng.integers(1, MAX_LEAVES + 1)))]
        n_leaves = parts[0][1]
        while parts:
            first, end = parts.pop()
            if end - first > 1:
                middle = int(rng.integers(first + 1, end))
                masks.append((1 << middle) - (1 << first))
                parts += [(first, middle), (middle, end)]
        own = rng.integers(n_features, size=len(masks)).tolist()
        thresholds = rng.normal(size=len(masks)).tolist()
        values = rng.normal(size=n_leaves).tolist()
        for column, row in zip(columns, (own, thresholds, masks, values), strict=True):
            column.append(tuple(row))
    return Trees(float(rng.normal()), *(tuple(column) for column in columns))


def model_over(
    rng: np.random.Generator, legs: tuple[str, ...], signals: tuple[str, ...]
) -> RelevanceModel:
    """A random model, clipped or not, with trees or without."""
    named = named_features(signals)
    n = len(feature_names(legs, named))
    return RelevanceModel(
        legs,
        tuple(rng.normal(size=n).tolist()),
        tuple(rng.normal(size=n).tolist()),
        tuple(rng.uniform(0.5, 2.0, n).tolist()),
        float(rng.normal(-2.0)),
        named,
        clip=float(rng.uniform(0.5, 5.0)) if rng.random() < 0.5 else None,
        trees=trees_over(rng, n, int(rng.integers(1, 30))) if rng.random() < 0.7 else None,
    )


def values_of(rng: np.random.Generator, kind: ScoreKind | None, n: int) -> FloatArray:
    """Scores of a kind; some lists have ties, and a few have a value outside the kind's range."""
    if kind in (ScoreKind.COSINE, ScoreKind.PROBABILITY, ScoreKind.RATIO):
        values = rng.uniform(0.0, 30.0 if kind is ScoreKind.RATIO else 1.0, n)
    else:
        values = rng.normal(size=n) * 5.0
    chance = rng.random()
    if chance < 0.2:
        values = values.round(1)
    elif chance < 0.25:
        values[:] = values[0]
    elif chance < 0.3:
        values[rng.integers(n)] = rng.choice([math.nan, math.inf, -3.4e38, -1.0, 0.0, 1.0])
    return values


def pool_over(rng: np.random.Generator, legs: tuple[str, ...], signals: tuple[str, ...]) -> Ranking:
    """A random ranking of 1 to 400 candidates: with legs or without, sorted or not."""
    n = int(rng.choice([1, 2, 5, 7, 8, 9, 30, 100, 130, 257, 400]))
    kind = KINDS[rng.integers(len(KINDS))]
    scores = values_of(rng, kind, n)
    if rng.random() < 0.6:
        scores = np.sort(scores)[::-1]
    own = {} if legs == (RANKING,) else {leg: KINDS[rng.integers(len(KINDS))] for leg in legs}
    return Ranking(
        passage_ids=[f"passage-{at}" for at in rng.permutation(n)],
        scores=tuple(scores.tolist()),
        kind=kind,
        passages=(),
        legs={leg: Leg(values_of(rng, kind, n), kind) for leg, kind in own.items()},
        signals={name: values_of(rng, None, n) for name in signals},
    )


def both(
    monkeypatch: pytest.MonkeyPatch, ranking: Ranking, policy: ExpectedUtilityPolicy
) -> tuple[Decision, Decision]:
    compiled = decide(ranking, policy)
    with monkeypatch.context() as patch:
        patch.setattr(_compiled, "kernels", None)
        return compiled, decide(ranking, policy)


def assert_equal(compiled: Decision, reference: Decision) -> None:
    assert list(compiled.order) == list(reference.order)
    assert compiled.n_kept == reference.n_kept
    assert compiled.flags == reference.flags
    assert compiled.set_aside == reference.set_aside
    if reference.probabilities is None:
        assert compiled.probabilities is None
    else:
        assert compiled.probabilities == pytest.approx(reference.probabilities, abs=1e-12)


def test_10_000_decisions_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    by_probability = 0
    for _ in range(500):
        legs = [("dense", "lexical"), ("dense",), (RANKING,)][rng.integers(3)]
        signals = SIGNALS[: rng.integers(len(SIGNALS) + 1)]
        model = model_over(rng, legs, signals)
        policy = ExpectedUtilityPolicy(model, k=int(rng.integers(1, 20)), cost=rng.uniform())
        for _ in range(20):
            compiled, reference = both(monkeypatch, pool_over(rng, legs, signals), policy)
            assert_equal(compiled, reference)
            by_probability += reference.probabilities is not None
    assert by_probability > 7_000


@given(st.data())
def test_any_scores_are_decided_on_as_by_the_reference(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300))
    numbers = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.floats(-3.0, 3.0)
    columns = [np.array(data.draw(st.lists(numbers, min_size=n, max_size=n))) for _ in range(2)]
    kind = data.draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(n)
    ranking = Ranking(
        [str(at) for at in range(n)],
        tuple(np.linspace(1.0, 0.0, n).tolist()),
        ScoreKind.COSINE,
        (),
        legs={"dense": Leg(columns[0], kind)},
        signals={"freshness": columns[1]},
    )
    policy = ExpectedUtilityPolicy(model_over(rng, ("dense",), ("freshness",)))
    with pytest.MonkeyPatch.context() as patch:
        assert_equal(*both(patch, ranking, policy))


@pytest.mark.parametrize(
    "scores",
    [
        np.array([0.9, 0.1], np.float32),
        np.array([[0.9, 0.0], [0.1, 0.0]])[:, 0],
        np.array([1, 0]),
        [0.9, 0.1],
    ],
)
def test_arrays_of_other_types_are_taken_as_the_reference_takes_them(
    scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_over(np.random.default_rng(0), ("dense",), ())
    legs = {"dense": Leg(scores, ScoreKind.COSINE)}
    ranking = Ranking(["a", "b"], (0.9, 0.1), ScoreKind.COSINE, (), legs=legs)
    assert_equal(*both(monkeypatch, ranking, ExpectedUtilityPolicy(model)))


@pytest.mark.parametrize(
    "change",
    [
        {0: np.zeros(3)},
        {0: np.array([99])},
        {0: np.array([-1])},
        {1: np.zeros(2)},
        {2: "a"},
        {3: np.zeros(3)},
        {4: np.array([7, 0, 0, 0, 0])},
        {10: [np.zeros(2)]},
        {10: ()},
        {10: (np.zeros(2, np.float32),)},
        {10: (np.zeros(3),)},
        {11: np.array([0, 2])},
        {11: np.array([0, -1])},
        {11: np.array([0])},
        {13: bytes(16)},
        {14: np.zeros(1, np.int64)},
    ],
)
def test_a_kernel_refuses_arrays_that_do_not_fit(change: dict[int, Any]) -> None:
    none = np.zeros(0)
    arguments: list[Any] = [
        np.array([0]), np.ones(1), 0.0, None, np.zeros(0, np.int64), none, np.zeros(0, np.uint8),
        none, 0.0, b"\0", (np.zeros(2),), None, 0.5, np.zeros(2), np.zeros(2, np.int64),
    ]  # fmt: skip
    assert _compiled.kernels is not None
    assert _compiled.kernels.rank_by_probability(*arguments) == 2
    for at, value in change.items():
        arguments[at] = value
    with pytest.raises((BufferError, TypeError, ValueError)):
        _compiled.kernels.rank_by_probability(*arguments)


def test_a_kernel_refuses_another_number_of_arguments() -> None:
    assert _compiled.kernels is not None
    with pytest.raises(TypeError, match="was given 2 arguments"):
        _compiled.kernels.rank_by_probability(np.array([0]), np.ones(1))
