"""The default objective: less harm at the recall of what is served today, or no change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pools import DEPTH, labelled, ranking_of, simulate

from calibration.evaluate import per_query
from calibration.grid import Grid, GridIndex, plain_grid, ratio_grid
from calibration.objectives import TOLERANCE, keep_recall
from calibration.pool_labels import PoolLabels, label
from calibration.replay import Pools, replay
from ctxguard.core.policies import RatioPolicy


def simulated(
    n: int, k: int, *, seed: int, noise: float, relevant: int, unanswerable: float = 0.0
) -> tuple[Pools, PoolLabels]:
    retriever, dataset = simulate(
        n, seed=seed, noise=noise, relevant=relevant, unanswerable=unanswerable
    )
    pools = replay(retriever, dataset.queries, depth=DEPTH)
    return pools, label(pools, dataset, baseline_k=k)


def chosen(
    pools: Pools, labels: PoolLabels, k: int, tolerance: float = TOLERANCE
) -> tuple[Grid, GridIndex | None]:
    grid = ratio_grid(pools, labels)
    return grid, keep_recall(grid, k, tolerance)


def two_of_five(n: int) -> tuple[Pools, PoolLabels]:
    """Queries whose first two passages are relevant and score clearly above the others."""
    ranking = ranking_of([1.0, 0.9, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1])
    return labelled([ranking] * n, [{"p0": 1, "p1": 1}] * n, baseline_k=5)


class TestKeepRecall:
    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        n=st.integers(5, 120),
        k=st.sampled_from([1, 3, 5, 10]),
        relevant=st.integers(1, 4),
        noise=st.sampled_from([0.05, 0.15, 0.3, 1.0]),
        unanswerable=st.sampled_from([0.0, 0.3]),
        tolerance=st.sampled_from([0.0, 0.01, 0.1]),
    )
    def test_by_decisions_one_at_a_time_it_keeps_the_recall_with_less_harm_and_no_less_utility(
        self,
        *,
        seed: int,
        n: int,
        k: int,
        relevant: int,
        noise: float,
        unanswerable: float,
        tolerance: float,
    ) -> None:
        pools, labels = simulated(
            n, k, seed=seed, noise=noise, relevant=relevant, unanswerable=unanswerable
        )
        grid, index = chosen(pools, labels, k, tolerance)
        if index is None:
            return
        ours = per_query(pools, labels, grid.policy(index)).values
        today = per_query(pools, labels, RatioPolicy(k=k)).values
        assert np.nanmean(ours["recall"] - today["recall"]) >= -tolerance - 1e-9
        assert ours["harm"].mean() < today["harm"].mean()
        assert ours["udcg_strict"].mean() >= today["udcg_strict"].mean() - 1e-9

    def test_passages_far_below_the_top_are_dropped(self) -> None:
        pools, labels = two_of_five(150)
        grid, index = chosen(pools, labels, 5)
        assert index is not None
        assert grid.at([index]).kept.tolist() == [[2.0]] * 150
        assert grid.at([index]).recall_difference.tolist() == [[0.0]] * 150

    @pytest.mark.parametrize("n", [10, 50, 100])
    def test_a_few_labels_on_which_nothing_was_lost_are_no_evidence(self, n: int) -> None:
        pools, labels = two_of_five(n)
        assert chosen(pools, labels, 5)[1] is None

    def test_a_context_may_be_many_times_larger_where_relevant_passages_are_many(self) -> None:
        """Half the questions have 30 relevant passages that score high, the others have one."""
        broad = ranking_of([1.0] * 30 + [0.1] * 10)
        narrow = ranking_of([1.0] + [0.1] * 39)
        pools, labels = labelled(
            [broad, narrow] * 100,
            [{f"p{i}": 1 for i in range(30)}, {"p0": 1}] * 100,
            depth=40,
            baseline_k=5,
        )
        grid, index = chosen(pools, labels, 5)
        assert index is not None
        assert grid.policy(index).k >= 29
        assert grid.at([index]).kept[1, 0] == 1.0

    def test_a_larger_context_is_taken_where_it_pays_for_what_a_threshold_drops(self) -> None:
        """Most queries have a sixth relevant passage; some end with one below three others."""
        long = ranking_of([1.0, *[0.9] * 4, 0.85, *[0.1] * 4])
        short = ranking_of([1.0, *[0.35] * 3, 0.3, *[0.1] * 5])
        n = 30
        pools, labels = labelled(
            [long] * 4 * n + [short] * n,
            [{f"p{i}": 1 for i in range(6)}] * 4 * n + [{"p0": 1, "p4": 1}] * n,
            baseline_k=5,
        )
        grid, index = chosen(pools, labels, 5)
        assert index is not None
        assert grid.policy(index).k > 5
        assert np.nanmean(grid.at([index]).recall_difference) > 0.0

    def test_where_every_drop_loses_recall_the_first_k_stays(self) -> None:
        # Equal scores, and the relevant passage is the last that is served.
        ranking = ranking_of([1.0] * 10)
        pools, labels = labelled([ranking] * 100, [{"p4": 1}] * 100, baseline_k=5)
        assert chosen(pools, labels, 5)[1] is None

    def test_where_nothing_served_is_harmful_the_first_k_stays(self) -> None:
        ranking = ranking_of([1.0, 0.8, 0.6, 0.4, 0.2])
        qrels = {f"p{i}": 1 for i in range(5)}
        pools, labels = labelled([ranking] * 100, [qrels] * 100, depth=5, baseline_k=5)
        assert chosen(pools, labels, 5, 0.5)[1] is None

    def test_queries_without_an_answer_say_nothing_about_recall(self) -> None:
        ranking = ranking_of([1.0, 0.1])
        pools, labels = labelled([ranking] * 4, [{"p0": 1}, {}, {}, {}], depth=2, baseline_k=2)
        rows = np.array([1, 2, 3])
        assert keep_recall(ratio_grid(pools, labels).rows(rows), 2) is None

    def test_more_tolerance_never_harms_more(self) -> None:
        pools, labels = simulated(150, 5, seed=3, noise=0.2, relevant=2)
        harms = []
        for tolerance in (0.0, 0.01, 0.05, 0.2, 0.9):
            grid, index = chosen(pools, labels, 5, tolerance)
            harms.append(grid.today[1] if index is None else grid.means.harm[index])
        assert harms == sorted(harms, reverse=True)
        assert harms[-1] < harms[0]

    @pytest.mark.parametrize("relevant", [1, 2])
    def test_on_other_queries_it_loses_a_percent_of_recall_at_most_on_the_mean(
        self, relevant: int
    ) -> None:
        """Thirty times 60 queries choose; a population of 3,000 says what that costs."""
        population, truth = simulated(3_000, 5, seed=99, noise=0.2, relevant=relevant)
        today = plain_grid(population, truth, 5).means.harm[0, 0]
        random = np.random.default_rng(0)
        lost, harm = [], []
        for _ in range(30):
            rows = random.choice(3_000, 60, replace=False)
            grid = ratio_grid(population, truth, temperature=1.0)
            index = keep_recall(grid.rows(rows), 5)
            lost.append(0.0 if index is None else -grid.means.recall_difference[index])
            harm.append(0.0 if index is None else today - grid.means.harm[index])
        assert np.mean(lost) <= 0.015
        assert np.mean(harm) > 0.0
