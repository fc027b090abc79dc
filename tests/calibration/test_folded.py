"""Folded choices: what the other folds choose is what each query is measured by."""

import numpy as np
from simulated_pools import DEPTH, simulate

from calibration.choice import Folded, PolicySums, choose, tried
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.fit import fit_relevance, fold_numbers, out_of_fold
from calibration.grid import utility_grid
from calibration.pools import label
from calibration.replay import replay


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
        place = richer(folded.sums.without(number))
        assert place is not None
        expected = folded.grid.rows(rows).kept([folded.tried[place]])[:, 0]
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
        assert index is not None
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
