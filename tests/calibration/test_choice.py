"""Choices among policies, by all queries and by other folds."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pools import DEPTH, labelled, part_of, ranking_of, served_today, simulate

from calibration.choice import LADDERS, Folded, PolicySums, choose, extend, tried
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.fit import fit_relevance, fold_numbers, out_of_fold
from calibration.grid import Grid, GridIndex, ratio_grid, utility_grid
from calibration.pools import LabelledPools, label
from calibration.replay import replay
from calibration.settings import TOLERANCE, Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.measure.worth import STRICT


def simulated(
    n: int, k: int, *, seed: int, noise: float, relevant: int, unanswerable: float = 0.0
) -> LabelledPools:
    retriever, dataset = simulate(
        n, seed=seed, noise=noise, relevant=relevant, unanswerable=unanswerable
    )
    return label(replay(retriever, dataset.queries, depth=DEPTH), dataset, baseline_k=k)


def chosen(
    pools: LabelledPools, k: int, context: Context = "balanced", tolerance: float = TOLERANCE
) -> tuple[Grid, GridIndex | None]:
    grid = ratio_grid(pools)
    folded = Folded(grid, tried(grid, k))
    return grid, folded.chosen(lambda sums: choose(sums, context, tolerance=tolerance))


def extended(pools: LabelledPools, k: int) -> tuple[Grid, GridIndex | None]:
    grid = ratio_grid(pools, min_keep=k)
    return grid, Folded(grid, tried(grid, k)).chosen(extend)


TWO_CLEAR = [1.0, 0.9, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]


def two_of_five(n: int) -> LabelledPools:
    """Queries whose first two passages are relevant and score clearly above the others."""
    return labelled([ranking_of(TWO_CLEAR)] * n, [{"p0": 1, "p1": 1}] * n, baseline_k=5)


def eight_of_many(n: int, depth: int = 40) -> LabelledPools:
    """Queries with eight relevant passages, which come first."""
    ranking = ranking_of([1.0] * 8 + [0.1] * (depth - 8))
    return labelled([ranking] * n, [{f"p{i}": 1 for i in range(8)}] * n, depth=depth, baseline_k=5)


def recall_gained(grid: Grid, *indices: GridIndex) -> FloatArray:
    """Recall less that of the first k by query, 0 where it has no relevant passage."""
    gained: FloatArray = np.take_along_axis(grid.beyond_today[0], grid.kept(indices), axis=1)
    return gained


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1_000), n=st.integers(5, 40))
def test_sums_are_of_other_folds(seed: int, n: int) -> None:
    pools = simulated(n, 3, seed=seed, noise=0.3, relevant=2, unanswerable=0.2)
    grid = ratio_grid(pools)
    places = tried(grid, 3)[::7]
    fold = np.random.default_rng(seed).permutation(np.arange(n) % 3)
    sums = PolicySums.of(grid, places, fold != 1)
    others = part_of(grid, np.flatnonzero(fold != 1))
    udcg, _ = others.at(places)
    today = served_today(pools)[fold != 1, None]
    gains = udcg - today
    assert np.allclose(sums.mean_gain, gains.mean(axis=0))
    assert np.allclose(sums.gain_error, gains.std(axis=0, ddof=1) / np.sqrt(len(gains)), atol=1e-7)
    assert np.allclose(sums.mean_kept, others.kept(places).mean(axis=0))
    defined = recall_gained(others, *places)[others.pools.n_relevant > 0]
    if len(defined):
        assert np.allclose(sums.least_recall(0.0), defined.mean(axis=0))


class TestChoose:
    @settings(max_examples=25, deadline=None)
    @given(
        made=st.fixed_dictionaries(
            {
                "n": st.integers(5, 120),
                "seed": st.integers(0, 10_000),
                "relevant": st.integers(1, 4),
                "noise": st.sampled_from([0.05, 0.15, 0.3, 1.0]),
                "unanswerable": st.sampled_from([0.0, 0.3]),
            }
        ),
        k=st.sampled_from([1, 3, 5, 10]),
        tolerance=st.sampled_from([0.0, 0.01, 0.1]),
        context=st.sampled_from(["leaner", "balanced", "richer"]),
    )
    def test_single_decisions_keep_recall(
        self, made: dict[str, Any], k: int, tolerance: float, context: Context
    ) -> None:
        pools = simulated(k=k, **made)
        grid, index = chosen(pools, k, context, tolerance)
        if index is None:
            return
        ours = per_query(pools, grid.policy(index))
        today = per_query(pools, RatioPolicy(k=k))
        assert np.nanmean(ours["recall"] - today["recall"]) >= -tolerance - 1e-9
        assert ours["udcg"].mean() >= today["udcg"].mean() - 1e-9
        most = {"leaner": 1.0, "balanced": 0.9, "richer": 2.0}[context]
        assert ours["kept"].mean() <= most * today["kept"].mean() + 1e-9

    @pytest.mark.parametrize("context", ["balanced", "leaner"])
    def test_far_below_top_is_dropped(self, context: Context) -> None:
        grid, index = chosen(two_of_five(150), 5, context)
        assert grid.kept([index]).tolist() == [[2]] * 150
        assert recall_gained(grid, index).tolist() == [[0.0]] * 150

    @pytest.mark.parametrize(
        ("n", "scores", "relevant", "tolerance"),
        [
            (10, TWO_CLEAR, [0, 1], TOLERANCE),
            (50, TWO_CLEAR, [0, 1], TOLERANCE),
            (100, [1.0] * 10, [4], TOLERANCE),
            (100, [1.0, 0.8, 0.6, 0.4, 0.2], [0, 1, 2, 3, 4], 0.5),
        ],
        ids=["ten", "fifty", "equal scores, the last relevant", "all relevant"],
    )
    def test_first_k_stays_where_unproven(
        self, n: int, scores: list[float], relevant: list[int], tolerance: float
    ) -> None:
        qrels = {f"p{i}": 1 for i in relevant}
        pools = labelled([ranking_of(scores)] * n, [qrels] * n, depth=len(scores), baseline_k=5)
        assert chosen(pools, 5, tolerance=tolerance)[1] is None

    def test_only_richer_costs_more(self) -> None:
        pools = eight_of_many(60)
        assert chosen(pools, 5)[1] is chosen(pools, 5, "leaner")[1] is None
        grid, index = chosen(pools, 5, "richer")
        assert grid.kept([index])[0, 0] == 8
        assert recall_gained(grid, index)[0, 0] == pytest.approx(3 / 8)

    def test_richer_costs_at_most_twice(self) -> None:
        ranking = ranking_of([1.0] * 30 + [0.1] * 10)
        qrels = {f"p{i}": 1 for i in range(30)}
        pools = labelled([ranking] * 100, [qrels] * 100, depth=40, baseline_k=5)
        grid, richer = chosen(pools, 5, "richer")
        assert grid.kept([richer])[0, 0] == 10

    def test_unanswerable_queries_ignore_recall(self) -> None:
        ranking = ranking_of([1.0, 0.1])
        pools = labelled([ranking] * 4, [{"p0": 1}, {}, {}, {}], depth=2, baseline_k=2)
        rows = np.array([1, 2, 3])
        assert chosen(pools.rows(rows), 2)[1] is None

    def test_more_tolerance_never_gains_less(self) -> None:
        pools = simulated(150, 5, seed=3, noise=0.2, relevant=2)
        gains = []
        for tolerance in (0.0, 0.01, 0.05, 0.2, 0.9):
            grid, index = chosen(pools, 5, tolerance=tolerance)
            gains.append(grid.today if index is None else grid.means[0][index])
        assert gains == sorted(gains)
        assert gains[-1] > gains[0]

    @pytest.mark.parametrize("relevant", [1, 2])
    def test_others_lose_one_percent_recall(self, relevant: int) -> None:
        """Thirty times 60 queries choose; a population of 1,500 says what each step costs."""
        population = simulated(1_500, 5, seed=99, noise=0.2, relevant=relevant)
        random, steps = np.random.default_rng(0), LADDERS["balanced"]
        lost, size = np.zeros((30, len(steps))), np.ones((30, len(steps)))
        grid = ratio_grid(population, temperature=1.0)
        for draw in range(30):
            rows = random.choice(1_500, 60, replace=False)
            own = Folded(part_of(grid, rows), tried(grid, 5))
            for place, step in enumerate(steps):
                index = own.chosen(partial(choose, tolerance=TOLERANCE, step=step))
                if index is not None:
                    lost[draw, place] = -recall_gained(grid, index).mean()
                    size[draw, place] = grid.kept([index]).mean() / 5
        assert (lost.mean(axis=0) <= 0.015).all()
        assert (size.mean(axis=0) <= 1.02).all()
        assert size.min() < 0.95


class TestExtend:
    def test_continues_in_todays_order(self) -> None:
        pools = eight_of_many(30)
        grid, index = extended(pools, 5)
        kept = grid.kept([index])
        assert (kept >= 5).all()
        assert grid.policy(index).min_keep == 5
        assert (recall_gained(grid, index) >= 0.0).all()

    def test_what_gains_nothing_is_not_taken(self) -> None:
        assert extended(two_of_five(100), 5)[1] is None

    def test_noisy_gain_is_not_taken(self) -> None:
        """One query in six has a sixth relevant passage, the others a sixth that harms."""
        ranking = ranking_of([1.0] * 5 + [0.9] + [0.1] * 4)
        own = [{f"p{i}": 1 for i in range(5 + (row % 6 == 0))} for row in range(24)]
        harmed = labelled([ranking] * 24, own, baseline_k=5, utilities=STRICT)
        assert extended(harmed, 5)[1] is None
        # To readers the sixth does next to no harm, and the gain is one.
        assert extended(labelled([ranking] * 24, own, baseline_k=5), 5)[1] is not None


def folded_of(n: int, *, seed: int = 0) -> Folded:
    retriever, dataset = simulate(n, seed=seed, noise=0.2, relevant=8)
    pools = label(replay(retriever, dataset.queries, depth=DEPTH), dataset, baseline_k=5)
    model = fit_relevance(pools)
    grid = utility_grid(pools, out_of_fold(pools, model), model)
    return Folded(grid, tried(grid, 5))


def richer(sums: PolicySums) -> int | None:
    return choose(sums, "richer", tolerance=0.01)


def test_query_is_measured_by_others() -> None:
    folded = folded_of(60)
    order, kept = folded.contexts(folded.by_others(richer), 5)
    for number in np.unique(folded.fold):
        rows = np.flatnonzero(folded.fold == number)
        place = richer(PolicySums.of(folded.grid, folded.tried, folded.fold != number))
        expected = part_of(folded.grid, rows).kept([folded.tried[place]])[:, 0]
        assert kept[rows].sum(axis=1).tolist() == expected.tolist()
        assert (order[rows] == folded.grid.order[rows]).all()


def test_one_group_of_questions_measures_nothing() -> None:
    folded = folded_of(1)
    _, kept = folded.contexts(folded.by_others(lambda _: 0), 5)
    assert kept.sum() == 5
    assert folded.share_chosen(folded.by_others(lambda _: 0)) == 0.0


def test_own_labels_never_choose() -> None:
    """Over many small sets the mean of what is measured is that of the truth, not above it."""
    measured, true = [], []
    for seed in range(12):
        folded = folded_of(40, seed=seed)
        order, kept = folded.contexts(folded.by_others(richer), 5)
        retriever, dataset = simulate(40, seed=seed, noise=0.2, relevant=8)
        labels = label(replay(retriever, dataset.queries, depth=DEPTH), dataset, baseline_k=5)
        relevant = np.take_along_axis(labels.relevant, order, axis=1) & kept
        measured.append((relevant.sum(axis=1) / labels.n_relevant).mean())
        index = folded.chosen(richer)
        other, others = simulate(100, seed=1_000 + seed, noise=0.2, relevant=8)
        truth = label(replay(other, others.queries, depth=DEPTH), others, baseline_k=5)
        true.append(per_query(truth, folded.grid.policy(index))["recall"].mean())
    assert abs(np.mean(measured) - np.mean(true)) < 0.02


def test_folds_are_even_and_alike_together() -> None:
    texts = [f"how is thing {n} ordered from {n}a by {n}b" for n in range(50)]
    near = [f"How is thing {n} ordered, from {n}a by {n}b?" for n in range(50)]
    queries = tuple(Query(f"q{i}", text) for i, text in enumerate(texts + near))
    groups = Dataset("doubled", queries, {}).groups
    assert all(groups[f"q{n}"] == groups[f"q{n + 50}"] for n in range(50))
    assert len(set(groups.values())) == 50
    names = [groups[query.query_id] for query in queries]
    assert np.bincount(fold_numbers(names)).tolist() == [20] * 5
    # The names alone decide, whatever their order.
    shuffled = np.random.default_rng(0).permutation(100)
    assert (fold_numbers([names[i] for i in shuffled]) == fold_numbers(names)[shuffled]).all()
