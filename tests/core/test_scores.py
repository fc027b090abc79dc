"""Score kinds: which values are scores, and how each kind is compared with its top."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.scores import (
    INVALID_MAGNITUDE,
    concordance,
    direction_advice,
    is_opposed,
    is_valid,
    relative_scores,
    within_domain,
)
from ctxguard.core.types import ScoreKind
from ctxguard.errors import ConfigurationError

IDENTITY_KINDS = [ScoreKind.COSINE, ScoreKind.INNER_PRODUCT, ScoreKind.LOGIT, ScoreKind.DISTANCE]
RANGES = {
    ScoreKind.RATIO: (0.0, 1e6),
    ScoreKind.COSINE: (-1.0, 1.0),
    ScoreKind.INNER_PRODUCT: (-1e3, 1e3),
    ScoreKind.LOGIT: (-50.0, 50.0),
    ScoreKind.DISTANCE: (-1e3, 0.0),
    ScoreKind.PROBABILITY: (0.0, 1.0),
}

kinds = st.sampled_from(list(RANGES))
temperatures = st.floats(0.05, 20.0)


FINITE = [0, 1.5, -3.0, True, np.float32(0.5), np.int64(3), Decimal(2)]
GARBAGE = [
    *(None, math.nan, math.inf, -math.inf, np.float32("nan"), "0.5", b"1", [], 1j, 10**400),
    *(-3.4e38, INVALID_MAGNITUDE, -INVALID_MAGNITUDE),
]


@pytest.mark.parametrize("score", [*FINITE, *GARBAGE])
def test_only_finite_numbers_are_scores(score: object) -> None:
    assert is_valid(score) == any(score is each for each in FINITE)


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [
        *[(kind, *ends) for kind, ends in RANGES.items()],
        # Single precision is no violation.
        (ScoreKind.COSINE, -1.000001, 1.000001),
        (ScoreKind.PROBABILITY, -1e-7, 1.0000001),
        (ScoreKind.DISTANCE, -2.0, 1e-7),
    ],
)
def test_every_kind_accepts_its_own_range(kind: ScoreKind, lowest: float, highest: float) -> None:
    assert within_domain(kind, lowest, highest)


ODDS_RATIO = (0.2 / 0.8) / (0.8 / 0.2)


@pytest.mark.parametrize(
    ("kind", "scores", "temperature", "relative"),
    [
        # The share of the top on a ratio scale, the exponential of the gap on an interval scale,
        # a ratio of odds on logits and probabilities.
        (ScoreKind.RATIO, [8.0, 6.0], 1.0, [1.0, 0.75]),
        (ScoreKind.RATIO, [8.0, 2.0], 2.0, [1.0, 0.5]),
        *[(kind, [-0.25, -0.75], 0.5, [1.0, math.exp(-1.0)]) for kind in IDENTITY_KINDS],
        (ScoreKind.PROBABILITY, [0.8, 0.2], 1.0, [1.0, ODDS_RATIO]),
        (ScoreKind.LOGIT, [math.log(4.0), -math.log(4.0)], 1.0, [1.0, ODDS_RATIO]),
        # Nothing is worse than a top of zero.
        (ScoreKind.RATIO, [0.0, 0.0], 1.0, [1.0, 1.0]),
        (ScoreKind.LOGIT, [], 1.0, []),
    ],
)
def test_relative_scores_follow_their_kind(
    kind: ScoreKind, scores: list[float], temperature: float, relative: list[float]
) -> None:
    assert relative_scores(kind, scores, temperature) == pytest.approx(relative)


def test_extreme_probabilities_have_finite_odds() -> None:
    _, half, none = relative_scores(ScoreKind.PROBABILITY, [1.0, 0.5, 0.0])
    assert 0.0 < half < 1.0
    assert 0.0 < none < 1e-15


def test_rank_only_has_no_relative_score() -> None:
    with pytest.raises(ConfigurationError, match="min_ratio to 0"):
        relative_scores(ScoreKind.RANK, [0.03, 0.02])


@given(kinds, st.data(), temperatures)
def test_relative_score_keeps_the_order(
    kind: ScoreKind, data: st.DataObject, temperature: float
) -> None:
    scores = data.draw(st.lists(st.floats(*RANGES[kind]), min_size=1, max_size=20))
    relative = relative_scores(kind, scores, temperature)
    assert all(0.0 <= r <= 1.0 for r in relative)
    assert relative[scores.index(max(scores))] == 1.0
    by_score = [r for _, r in sorted(zip(scores, relative, strict=True))]
    assert by_score == sorted(by_score)
    # A higher temperature is more forgiving.
    warm = relative_scores(kind, scores, 2 * temperature)
    assert all(r <= w + 1e-12 for r, w in zip(relative, warm, strict=True))


@given(
    st.lists(st.integers(-1024, 0), min_size=1, max_size=25),
    st.integers(-32, 32),
    st.integers(-4, 4).map(lambda exponent: 2.0**exponent),
    temperatures,
)
def test_shift_or_scale_changes_nothing(
    steps: list[int], shift: int, factor: float, temperature: float
) -> None:
    """A shift on identity kinds, a scale on ratios, and one with the temperature elsewhere."""
    # Sixty-fourths are exact, so the gaps are the same to the last bit.
    scores = [step / 64 for step in steps]
    for kind in IDENTITY_KINDS:
        relative = relative_scores(kind, scores, temperature)
        assert relative_scores(kind, [each + shift for each in scores], temperature) == relative
        scaled = [each * factor for each in scores]
        assert relative_scores(kind, scaled, temperature * factor) == relative
    ratios = [-score for score in scores]
    assert relative_scores(ScoreKind.RATIO, [each * factor for each in ratios]) == (
        relative_scores(ScoreKind.RATIO, ratios)
    )


class TestDirection:
    @pytest.mark.parametrize(
        "scores",
        [
            [0.05, 0.31, 0.36, 0.62, 0.8],  # distances
            [-31.0, -12.0, -3.5],  # BM25 of Milvus Lite
            [0.0, 0.0, 0.0, 0.5, 0.9],  # copies of the query
            [-0.4, 0.1, 0.9],
            [0.2, 0.7],
            [0.1, None, 0.4, math.nan, 0.9],
        ],
    )
    def test_scores_that_rise_oppose_the_order(self, scores: list[float | None]) -> None:
        assert concordance(scores) == 0.0
        assert is_opposed(scores)
        turned = [None if score is None else -score for score in scores]
        assert concordance(turned) == 1.0
        assert not is_opposed(turned)

    @pytest.mark.parametrize(
        "scores",
        [[], [0.4], [0.5, 0.5, 0.5], [None, None], [0.3, math.nan], [0.9, 0.9 + 1e-6, 0.9 + 2e-6]],
    )
    def test_equal_scores_tell_nothing(self, scores: list[float | None]) -> None:
        assert concordance(scores) is None
        assert not is_opposed(scores)

    @pytest.mark.parametrize(
        "order",
        [
            [3, 1, 2, 5, 4],  # reranked, beside the first stage's scores
            [1, 5, 2, 4, 3],  # fused with another leg
            [1, 3, 5, 4, 2],  # the best at both ends
            [4, 3, 5, 1, 2],
        ],
    )
    def test_another_scores_order_is_not_opposed(self, order: list[int]) -> None:
        assert not is_opposed([1.0 / rank for rank in order])

    def test_ranks_come_before_list_order(self) -> None:
        assert is_opposed([0.9, 0.5, 0.1], [3, 2, 1])
        assert not is_opposed([0.1, 0.5, 0.9], [3, 2, 1])
        assert concordance([0.9, 0.5, 0.1], [0, 0, 0]) is None
        assert concordance([0.9, 0.5, 0.1], [None, 1, 2]) == 1.0

    @given(st.permutations(range(30)))
    def test_turning_the_scores_turns_the_share(self, order: list[int]) -> None:
        share = concordance([float(rank) for rank in order])
        assert share is not None
        assert concordance([-float(rank) for rank in order]) == pytest.approx(1.0 - share)

    def test_a_long_list_takes_bounded_memory(self) -> None:
        assert is_opposed([float(rank) for rank in range(100_000)])

    @pytest.mark.parametrize(
        ("kind", "lowest", "highest", "expected"),
        [
            (ScoreKind.COSINE, 0.05, 0.8, "score_kind='distance'"),
            (ScoreKind.RATIO, 3.0, 40.0, "score_kind='distance'"),
            (ScoreKind.DISTANCE, 0.05, 0.8, "distances: return -distance"),
            (ScoreKind.DISTANCE, -0.9, -0.1, "score_kind='cosine'"),
            (ScoreKind.DISTANCE, -31.0, -4.0, "score_kind='ratio'"),
            (ScoreKind.RATIO, -31.0, -4.0, "opposite sign"),
            (ScoreKind.LOGIT, -3.0, 4.0, "no score_kind fits"),
        ],
    )
    def test_the_kind_that_fits_is_named(
        self, kind: ScoreKind, lowest: float, highest: float, expected: str
    ) -> None:
        assert expected in direction_advice(kind, lowest, highest)
