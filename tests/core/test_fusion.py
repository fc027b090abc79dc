"""Fusion: reciprocal rank against hand-worked values, convex against what may not change it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.fusion import Fusion, fuse, reciprocal_rank
from ctxguard.core.types import Leg, ScoreKind
from ctxguard.errors import ConfigurationError

CONVEX = Fusion("convex", weight=0.5)

bm25 = st.floats(0.0, 40.0, allow_subnormal=False)
cosine = st.floats(-1.0, 1.0)
candidates = st.lists(st.tuples(bm25, cosine), min_size=1, max_size=20)


def legs(
    lexical: list[float], dense: list[float], dense_kind: ScoreKind = ScoreKind.COSINE
) -> dict[str, Leg]:
    return {
        "lexical": Leg(np.array(lexical, dtype=float), ScoreKind.RATIO),
        "dense": Leg(np.array(dense, dtype=float), dense_kind),
    }


def legs_of(pairs: list[tuple[float, float]]) -> dict[str, Leg]:
    return legs([lexical for lexical, _ in pairs], [dense for _, dense in pairs])


@pytest.mark.parametrize(
    ("fusion", "lexical", "dense", "fused"),
    [
        (Fusion(), [9, 3, 5], [0.1, 0.9, 0.5], [1 / 61 + 1 / 63, 1 / 63 + 1 / 61, 2 / 62]),
        (Fusion(constant=2), [2, 1], [0.5, 0.1], [2 / 3, 2 / 4]),
        # A BM25 score of 0 is not a hit and has no rank; a cosine of 0 or less has one.
        (Fusion(), [4, 0, 0], [0.1, 0.9, 0.5], [1 / 61 + 1 / 63, 1 / 61, 1 / 62]),
        (Fusion(), [1, 2], [0.0, -0.5], [1 / 62 + 1 / 61, 1 / 61 + 1 / 62]),
        (Fusion(), [0, 0], [1, 0], [1 / 61, 1 / 62]),
        (Fusion(), [math.nan, 2], [0.5, math.nan], [1 / 61, 1 / 61]),
        (Fusion(), [], [], []),
        (
            Fusion("convex", weight=0.25),
            [10, 5, 0],
            [0.0, 0.5, 1.0],
            [0.25 * 0.5 + 0.75, 0.25 * 0.75 + 0.75 * 0.5, 0.25],
        ),
        # A missing score counts as the least possible.
        (CONVEX, [math.nan, 2], [1, math.nan], [0.5, 0.5]),
        (CONVEX, [0, 0], [1, 0], [0.5, 0.25]),
        (CONVEX, [], [], []),
    ],
)
def test_by_hand(
    fusion: Fusion, lexical: list[float], dense: list[float], fused: list[float]
) -> None:
    assert fuse(legs(lexical, dense), fusion) == pytest.approx(fused)


def test_ties_share_the_better_rank() -> None:
    assert reciprocal_rank(np.array([5.0, 7.0, 5.0, 1.0])) == pytest.approx(
        [1 / 62, 1 / 61, 1 / 62, 1 / 64]
    )


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, 3.4e38, -3.4e38])
@pytest.mark.parametrize("fusion", [Fusion(), CONVEX])
def test_a_garbage_score_counts_as_missing(fusion: Fusion, garbage: float) -> None:
    missing = fuse(legs([3.0, 2.0, 1.0], [0.9, math.nan, 0.1]), fusion)
    assert fuse(legs([3.0, 2.0, 1.0], [0.9, garbage, 0.1]), fusion).tolist() == missing.tolist()


@given(candidates, st.floats(0.0, 1.0))
def test_convex_scores_lie_in_unit_interval(
    pairs: list[tuple[float, float]], weight: float
) -> None:
    fused = fuse(legs_of(pairs), Fusion("convex", weight=weight))
    assert fused.min() >= 0.0
    assert fused.max() <= 1.0 + 1e-12


@given(candidates, st.floats(0.0, 1.0), st.data())
def test_bad_tail_changes_no_other_score(
    pairs: list[tuple[float, float]], weight: float, data: st.DataObject
) -> None:
    worst = (
        data.draw(st.floats(0.0, min(lexical for lexical, _ in pairs))),
        data.draw(st.floats(-1.0, min(dense for _, dense in pairs))),
    )
    fusion = Fusion("convex", weight=weight)
    without = fuse(legs_of(pairs), fusion)
    assert fuse(legs_of([*pairs, worst]), fusion)[:-1].tolist() == without.tolist()


@given(candidates, st.randoms(use_true_random=False), st.sampled_from([Fusion(), CONVEX]))
def test_input_order_changes_no_fused_score(
    pairs: list[tuple[float, float]], rng: object, fusion: Fusion
) -> None:
    order = list(range(len(pairs)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    fused = fuse(legs_of(pairs), fusion)
    shuffled = fuse(legs_of([pairs[position] for position in order]), fusion)
    assert shuffled.tolist() == fused[order].tolist()


def test_legs_are_left_unchanged() -> None:
    both = legs([math.nan, 2.0], [0.5, -3.4e38])
    fuse(both, CONVEX)
    fuse(both, Fusion())
    assert both["lexical"].scores[1] == 2.0
    assert math.isnan(both["lexical"].scores[0])
    assert both["dense"].scores.tolist() == [0.5, -3.4e38]


def test_only_convex_scores_compare_by_ratio() -> None:
    assert CONVEX.kind is ScoreKind.RATIO
    assert Fusion().kind is ScoreKind.RANK


def test_convex_needs_scores_with_a_minimum() -> None:
    with pytest.raises(ConfigurationError, match="'inner_product' has none"):
        fuse(legs([1.0], [3.0], ScoreKind.INNER_PRODUCT), CONVEX)


@pytest.mark.parametrize(
    "settings",
    [{"method": "borda"}, {"weight": 1.5}, {"weight": -0.1}, {"weight": math.nan}, {"constant": 0}],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Fusion(**settings)  # type: ignore[arg-type]
