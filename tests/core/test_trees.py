"""Boosted trees as bit masks: the leaf that a walk from the root would reach."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.trees import MAX_LEAVES, Trees
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError

# x0 ≤ 0.5: leaf 0 where x1 ≤ 2.0, else leaf 1; x0 > 0.5: leaf 2. The root rules out leaves 0 and 1.
ONE = Trees(
    intercept=-1.0,
    features=((0, 1),),
    thresholds=((0.5, 2.0),),
    masks=((0b011, 0b001),),
    values=((0.25, 0.5, 4.0),),
)

# A tree as a person would draw it: a leaf's value, or (feature, threshold, left, right).
Drawn = float | tuple[int, float, "Drawn", "Drawn"]


def leaves(drawn: Drawn) -> int:
    return 1 if isinstance(drawn, float) else leaves(drawn[2]) + leaves(drawn[3])


def walk(drawn: Drawn, candidate: FloatArray) -> float:
    while not isinstance(drawn, float):
        feature, threshold, left, right = drawn
        drawn = right if candidate[feature] > threshold else left
    return drawn


def written(*drawn: Drawn) -> Trees:
    columns: list[list[tuple[float, ...]]] = [[], [], [], []]
    for tree in drawn:
        rows: list[list[float]] = [[], [], [], []]

        def visit(node: Drawn, rows: list[list[float]] = rows) -> None:
            if isinstance(node, float):
                rows[3].append(node)
                return
            first, at = len(rows[3]), len(rows[2])
            for row, value in zip(rows, (node[0], node[1], 0), strict=False):
                row.append(value)
            visit(node[2])
            rows[2][at] = (1 << len(rows[3])) - (1 << first)
            visit(node[3])

        visit(tree)
        for column, row in zip(columns, rows, strict=True):
            column.append(tuple(row))
    return Trees(0.0, *(tuple(column) for column in columns))  # type: ignore[arg-type]


@st.composite
def drawn_trees(draw: st.DrawFn, most: int = MAX_LEAVES) -> Drawn:
    if most == 1 or draw(st.booleans()):
        return draw(st.floats(-2.0, 2.0))
    left = draw(drawn_trees(most - 1))
    right = draw(drawn_trees(most - leaves(left)))
    # Whole numbers, so that candidates meet a threshold exactly.
    return draw(st.integers(0, 2)), float(draw(st.integers(-2, 2))), left, right


class TestLogOdds:
    def test_one_tree_by_hand(self) -> None:
        """A value equal to the threshold goes to the left."""
        candidates = np.array([[0.5, 2.0], [0.5, 2.1], [0.6, 2.0], [0.6, 9.0]])
        assert ONE.log_odds(candidates.T).tolist() == [-0.75, -0.5, 3.0, 3.0]

    @given(st.lists(drawn_trees(), min_size=1, max_size=5), st.integers(1, 20))
    def test_it_is_the_sum_of_the_leaves_that_walks_reach(self, drawn: list[Drawn], n: int) -> None:
        candidates = np.random.default_rng(n).integers(-3, 4, (n, 3)).astype(float)
        expected = [math.fsum(walk(tree, own) for tree in drawn) for own in candidates]
        assert written(*drawn).log_odds(candidates.T) == pytest.approx(expected, abs=1e-12)

    def test_no_candidate(self) -> None:
        assert ONE.log_odds(np.empty((2, 0))).shape == (0,)

    def test_a_tree_of_one_leaf_adds_it(self) -> None:
        assert written(0.5).log_odds(np.zeros((1, 3))).tolist() == [0.5] * 3
        assert written(0.5).n_features == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"intercept": math.nan}, "intercept nan"),
            ({"values": ()}, "the same trees"),
            ({"masks": ((3, 1), (1,))}, "the same trees"),
            ({"values": ((0.0,) * 7,)}, "7 leaves"),
            ({"values": ((),)}, "0 leaves"),
            ({"thresholds": ((0.5,),)}, "2, 1 and 2"),
            ({"thresholds": ((0.5, math.inf),)}, "not finite"),
            ({"values": ((0.0, math.nan, 1.0),)}, "not finite"),
            ({"features": ((0, -1),)}, "feature -1"),
            ({"masks": ((3, 0),)}, "must rule out some"),
            ({"masks": ((4, 1),)}, "must rule out some"),
            ({"masks": ((-1, 1),)}, "must rule out some"),
        ],
    )
    def test_trees_that_cannot_work_are_refused(
        self, change: dict[str, object], message: str
    ) -> None:
        settings: dict[str, object] = {
            name: getattr(ONE, name)
            for name in ("intercept", "features", "thresholds", "masks", "values")
        }
        with pytest.raises(ConfigurationError, match=message):
            Trees(**{**settings, **change})  # type: ignore[arg-type]
