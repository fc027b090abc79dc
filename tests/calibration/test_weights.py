"""Queries that stand for several requests: every mean is over requests, every test stays valid."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_pools import DEPTH, indistinct, labelled, ranking_of, simulate

from calibration.calibrate import calibrate
from calibration.calibrate_route import Settings
from calibration.certify import Promise
from calibration.data.dataset import Dataset
from calibration.evaluate import bootstrap_interval, per_query
from calibration.folded import Folded
from calibration.grid import ratio_grid
from calibration.objectives import choose, tried
from calibration.pool_labels import label
from calibration.replay import replay
from calibration.risk import (
    betting_lower_bound,
    betting_p_value,
    betting_upper_bound,
    labels_needed,
)
from calibration.sufficiency import certified_threshold
from calibration.weights import counted, deciles, effective_number, n_equivalent, weighted_mean
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError

DELTA = 0.1
REPEATS = 400
ALLOWED = DELTA + 3.0 * sqrt(DELTA * (1.0 - DELTA) / REPEATS)


def weighed(dataset: Dataset, weights: FloatArray) -> Dataset:
    queries = zip(dataset.queries, weights.tolist(), strict=True)
    return replace(
        dataset, queries=tuple(replace(query, weight=weight) for query, weight in queries)
    )


class TestFigures:
    def test_a_weight_of_two_is_two_rows(self) -> None:
        retriever, dataset = simulate(40, noise=0.3, unanswerable=0.2)
        weights = np.where(np.arange(40) % 3 == 0, 1.0, 0.5)
        pools = replay(retriever, dataset.queries, depth=DEPTH)
        own = label(pools, weighed(dataset, weights), baseline_k=5)
        repeated = np.repeat(np.arange(40), np.where(weights == 1.0, 2, 1))
        means = ratio_grid(pools, own, temperature=1.0).means
        rows = pools.subset([pools.query_ids[row] for row in repeated])
        twice = ratio_grid(rows, label(rows, dataset, baseline_k=5), temperature=1.0).means
        for name, values in vars(means).items():
            np.testing.assert_allclose(values, getattr(twice, name), atol=1e-12)
        policy = RatioPolicy(k=5, min_ratio=0.3)
        evidence = per_query(pools, own, policy).evidence().metrics
        plain = per_query(rows, label(rows, dataset, baseline_k=5), policy).evidence().metrics
        for metric, interval in evidence.items():
            assert interval.value == pytest.approx(plain[metric].value)

    def test_one_weight_leaves_the_digest_as_it_was_and_another_changes_it(self) -> None:
        _, dataset = simulate(3)
        assert weighed(dataset, np.ones(3)).digest() == dataset.digest()
        assert weighed(dataset, np.array([1.0, 0.5, 1.0])).digest() != dataset.digest()

    def test_intervals_cover_the_weighted_mean(self) -> None:
        random, covered = np.random.default_rng(0), 0
        for seed in range(REPEATS):
            weights = random.choice([0.05, 0.2, 1.0], 80)
            values = (random.random(80) < 0.2 + 0.4 * weights).astype(float)
            truth = np.mean([0.05 * 0.22, 0.2 * 0.28, 0.6]) / np.mean([0.05, 0.2, 1.0])
            found = bootstrap_interval(values, weights, seed=seed, resamples=300)
            assert found.lower is not None
            covered += found.lower <= truth <= found.upper
        assert 0.9 <= covered / REPEATS <= 0.99

    def test_deciles_are_of_the_weight(self) -> None:
        values = np.array([3.0, np.nan, 1.0, 2.0])
        found = deciles(values, np.array([0.1, 1.0, 0.1, 0.8]))
        assert found.tolist() == [1.0, 1.0, *[2.0] * 8, 3.0]
        assert deciles(values, np.ones(4))[5] == 2.0

    @given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20))
    def test_effective_numbers_lie_between_1_and_the_number(self, weights: list[float]) -> None:
        own = np.array(weights)
        effective = effective_number(own)
        assert 1.0 - 1e-9 <= effective <= len(weights) + 1e-9
        assert counted(own).sum() == pytest.approx(effective)
        assert effective >= own.sum() / own.max() - 1e-9
        assert n_equivalent(np.ones(3)) is None

    def test_a_heavy_query_that_loses_its_answer_stops_a_choice(self) -> None:
        """Of 300 queries the answer stands out; of the last it is the fifth of equals."""
        clear, unclear = ranking_of([1.0] + [0.1] * 9), ranking_of([1.0, *[0.2] * 9])
        rankings, grades = [clear] * 299 + [unclear], [{"p0": 1}] * 299 + [{"p4": 1}]
        pools, labels = labelled(rankings, grades, baseline_k=5)

        def chosen(weights: FloatArray) -> float | None:
            grid = ratio_grid(pools, replace(labels, weights=weights), temperature=1.0)
            folded = Folded.of(grid, tried(grid, 5), 5)
            index = folded.chosen(lambda sums: choose(sums, 5, tolerance=0.01))
            return None if index is None else grid.settings(index)[1]

        even, heavy = chosen(np.ones(300)), chosen(np.append(np.full(299, 0.1), 1.0))
        assert even is not None
        assert even > 0.1
        # The answer of the last stands at a fifth of the top score.
        assert heavy is None or heavy <= 0.2


class TestBounds:
    def test_where_the_frequent_lose_most_they_are_false_as_rarely_as_stated(self) -> None:
        """A tenth of the questions are asked twenty times as often, and lose far more."""
        false = np.zeros((REPEATS, 3), dtype=bool)
        for repeat in range(REPEATS):
            random = np.random.default_rng(repeat)
            frequent = random.random(120) < 0.1
            weights = np.where(frequent, 1.0, 0.05)
            losses = (random.random(120) < np.where(frequent, 0.5, 0.02)).astype(float)
            truth = (0.1 * 0.5 + 0.9 * 0.05 * 0.02) / (0.1 + 0.9 * 0.05)
            false[repeat] = (
                betting_upper_bound(losses, DELTA, weights) < truth,
                betting_lower_bound(-losses, DELTA, weights) > -truth,
                betting_upper_bound(losses, DELTA) < truth,
            )
        by_requests, difference, by_questions = false.mean(axis=0)
        assert max(by_requests, difference) <= ALLOWED
        assert by_questions > 0.9

    @given(
        losses=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
        limits=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)),
        data=st.data(),
    )
    def test_a_looser_limit_never_raises_the_p_value(
        self, losses: list[float], limits: tuple[float, float], data: st.DataObject
    ) -> None:
        """The upper bound bisects by that."""
        weight = st.floats(0.01, 1.0)
        every = st.lists(weight, min_size=len(losses), max_size=len(losses))
        weights = data.draw(st.none() | every)
        grid = np.linspace(*sorted(limits), 20)
        values = np.array([betting_p_value(losses, limit, weights) for limit in grid])
        assert (np.diff(values) <= 1e-9).all()
        assert 0.0 <= values.min() <= values.max() <= 1.0

    def test_light_queries_prove_as_much_as_their_weight(self) -> None:
        heavy = betting_upper_bound(np.zeros(20))
        assert betting_upper_bound(np.zeros(200), weights=np.full(200, 0.1)) == pytest.approx(
            heavy, rel=0.2
        )
        assert betting_upper_bound(np.zeros(200)) < heavy / 4
        few, many = (labels_needed([0.0] * 10, 0.1, weights=[w] * 10) for w in (1.0, 0.1))
        assert few is not None
        assert many > 5 * few

    @pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, 1.5], [1.0, np.nan]])
    def test_weights_that_are_none_are_refused(self, weights: list[float]) -> None:
        with pytest.raises(CalibrationError, match=r"a weight in \(0, 1\]"):
            betting_p_value([0.0, 0.0], 0.1, weights)

    def test_a_threshold_calls_at_most_that_share_of_requests_insufficient(self) -> None:
        """Frequent questions get the lower probabilities."""
        broken = given = 0
        for repeat in range(200):
            random = np.random.default_rng(repeat)
            frequent = random.random(300) < 0.3
            weights = np.where(frequent, 1.0, 0.2)
            probabilities = np.where(frequent, 0.7, 1.0) * random.random(300)
            found = certified_threshold(probabilities, 0.1, DELTA, weights)
            share = 0.0 if found is None else (0.3 * found / 0.7 + 0.14 * found) / 0.44
            given += found is not None and found > 0.0
            broken += share > 0.1
        assert broken / 200 <= DELTA + 3.0 * sqrt(0.09 / 200)
        assert given > 150
        equal = np.linspace(0.0, 1.0, 100)
        assert certified_threshold(equal, 0.1, DELTA, np.ones(100)) == certified_threshold(
            equal, 0.1, DELTA
        )


class TestCalibrating:
    def test_the_certificate_is_over_requests(self) -> None:
        retriever, dataset = simulate(400, noise=0.2)
        weights = np.where(np.arange(400) % 4 == 0, 1.0, 0.4)
        result = calibrate(
            retriever,
            weighed(dataset, weights),
            Settings(policy="ratio", depth=DEPTH, held_out=0.5),
        )
        (route,) = result.profile.routes.values()
        weights = np.array([query.weight for query in result.held_out.queries])
        assert route.certificate.n_equivalent == pytest.approx(weights.sum(), abs=1e-3)
        assert route.certificate.n_recall <= weights.size
        (outcome,) = result.outcomes.values()
        loss = outcome.chosen.metrics.values["recall_loss"]
        known = ~np.isnan(loss)
        mean = float(weighted_mean(loss[known], weights[known]))
        assert route.certificate.recall_loss == pytest.approx(mean, abs=1e-6)
        assert "over requests that have a relevant passage" in route.certificate.statement
        assert result.profile == type(result.profile).model_validate_json(result.profile.to_json())

    def test_a_promise_is_over_requests_as_well(self) -> None:
        retriever, dataset = simulate(400, noise=0.2)
        weights = np.where(np.arange(400) % 4 == 0, 1.0, 0.4)
        asked = Settings(policy="ratio", depth=DEPTH, promise=Promise(alpha=0.15))
        made = calibrate(retriever, weighed(dataset, weights), asked).profile
        (route,) = made.routes.values()
        assert route.certificate.n_equivalent < route.certificate.n_recall
        assert "over requests for which" in route.certificate.statement

    def test_weights_that_are_all_one_leave_every_byte(self) -> None:
        retriever, dataset = indistinct(40)
        plain = calibrate(retriever, dataset, Settings(depth=DEPTH)).profile
        same = calibrate(retriever, weighed(dataset, np.ones(40)), Settings(depth=DEPTH)).profile
        assert same.to_json() == plain.to_json()
