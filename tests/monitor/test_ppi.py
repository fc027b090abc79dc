"""Human labels and a judge together: centred where people would put it, and narrower."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from judged_rows import ratio_sums, sums, table
from numpy.typing import NDArray

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.estimation.ppi import LabelledClusters, label_weights
from ctxguard.monitor.estimation.ppi import ppi_estimate as estimate_from_labels
from ctxguard.monitor.estimation.ratio import Estimate, Precision, estimate
from ctxguard.monitor.estimation.sums import sums_of
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric, Table

METRICS = (Metric.PRECISION, Metric.MRR, Metric.UDCG, Metric.RECALL)


class Labelled(NamedTuple):
    """One request as people graded it and as the judge did."""

    human: JudgedRequest
    judge: JudgedRequest
    probability: float = 1.0


def clusters(pairs: Sequence[Labelled]) -> LabelledClusters:
    return LabelledClusters.of(
        table(pair.human for pair in pairs),
        table(pair.judge for pair in pairs),
        np.array([pair.probability for pair in pairs]),
    )


def ppi_estimate(
    metric: Metric, labelled: Sequence[Labelled], unlabelled: Sequence[JudgedRequest]
) -> Estimate:
    return estimate_from_labels(metric, clusters(labelled), sums(unlabelled))


def request(grades: Sequence[int], dropped: int, session: str | None = None) -> JudgedRequest:
    return JudgedRequest(
        probability=1.0,
        grades=tuple(grades),
        utilities=tuple(1.0 if grade else -0.5 for grade in grades),
        dropped_relevant=float(dropped),
        dropped_probability=1.0,
        pool_relevant=sum(grades) + dropped,
        full_pool_probability=1.0,
        full_pool_probability_if_no_hit=1.0,
        session_id=session,
    )


class Traffic:
    """Requests of five served and ten dropped passages, as people and as a judge grade them."""

    def __init__(self, seed: int, *, by_rank: bool = False) -> None:
        self._rng = random.Random(seed)
        self._by_rank = by_rank

    def draw(self) -> Labelled:
        rng = self._rng
        chance = rng.choice((0.15, 0.6))
        served = [int(rng.random() < chance / math.sqrt(rank)) for rank in range(1, 6)]
        dropped = [int(rng.random() < 0.03) for _ in range(10)]
        seen = [self._judged(grade, rank) for rank, grade in enumerate(served, start=1)]
        below = [self._judged(grade, 6) for grade in dropped]
        return Labelled(request(served, sum(dropped)), request(seen, sum(below)))

    def _judged(self, grade: int, rank: int) -> int:
        """With sensitivity 0.85 and specificity 0.90, or worse the higher the passage ranks."""
        sensitivity, specificity = 0.85, 0.90
        if self._by_rank:
            sensitivity, specificity = 0.70 + 0.03 * rank, 0.80 + 0.03 * rank
        return int(self._rng.random() < (sensitivity if grade else 1.0 - specificity))


class Population(NamedTuple):
    """All requests there are; samples are drawn from it with replacement, and its mean is known."""

    human: Table
    judge: Table

    def draw(self, n: int, rng: np.random.Generator) -> "Population":
        rows = rng.integers(len(self.human), size=n)
        return Population(self.human[rows], self.judge[rows])

    def rows(self, which: slice | NDArray[np.bool_]) -> "Population":
        return Population(self.human[which], self.judge[which])


@cache
def population(*, by_rank: bool = False) -> Population:
    traffic = Traffic(99, by_rank=by_rank)
    pairs = [traffic.draw() for _ in range(10_000)]
    return Population(table(pair.human for pair in pairs), table(pair.judge for pair in pairs))


def truths(everything: Population) -> dict[Metric, float]:
    added = sums_of(everything.human)
    ratios = {metric: added.ratio(metric) for metric in METRICS}
    return {metric: ratio.a / ratio.b for metric, ratio in ratios.items()}


@pytest.mark.parametrize("by_rank", [False, True])
def test_intervals_cover_the_truth_though_the_judge_is_wrong(by_rank: bool) -> None:
    everything, rng, repeats = population(by_rank=by_rank), np.random.default_rng(5), 100
    truth = truths(everything)
    held, width, human_width = (dict.fromkeys(METRICS, 0.0) for _ in range(3))
    judge_held = dict.fromkeys(METRICS, 0)
    for _ in range(repeats):
        drawn = everything.draw(1_000, rng)
        labelled = LabelledClusters.of(*drawn.rows(slice(150)))
        unlabelled = sums_of(drawn.judge[150:])
        for metric in METRICS:
            found = estimate_from_labels(metric, labelled, unlabelled)
            alone = estimate_from_labels(metric, labelled)
            raw = estimate(metric, unlabelled.ratio(metric))
            held[metric] += found.lower <= truth[metric] <= found.upper
            width[metric] += found.upper - found.lower
            human_width[metric] += alone.upper - alone.lower
            judge_held[metric] += raw.lower <= truth[metric] <= raw.upper
    for metric in METRICS:
        assert held[metric] / repeats >= 0.90, metric
        assert width[metric] <= human_width[metric], metric
    # The judge's own interval, which knows nothing of its errors.
    assert judge_held[Metric.UDCG] / repeats <= 0.3
    assert width[Metric.UDCG] < 0.8 * human_width[Metric.UDCG]


def test_a_judge_that_agrees_with_people_gives_what_labels_on_everything_would() -> None:
    traffic = Traffic(6)
    humans = [traffic.draw().human for _ in range(20_000)]
    labelled = [Labelled(human, human) for human in humans[:200]]
    found = ppi_estimate(Metric.PRECISION, labelled, humans[200:])
    whole = estimate(Metric.PRECISION, ratio_sums(Metric.PRECISION, humans))
    assert found.value == pytest.approx(whole.value, abs=2e-3)
    assert found.upper - found.lower < 1.2 * (whole.upper - whole.lower)


def test_a_judge_that_says_nothing_about_the_truth_does_no_harm() -> None:
    traffic, strangers = Traffic(7), Traffic(8)
    labelled = [Labelled(traffic.draw().human, strangers.draw().judge) for _ in range(300)]
    unlabelled = [strangers.draw().judge for _ in range(3_000)]
    found = ppi_estimate(Metric.UDCG, labelled, unlabelled)
    alone = ppi_estimate(Metric.UDCG, labelled, [])
    assert found.upper - found.lower == pytest.approx(alone.upper - alone.lower, rel=0.03)


def test_without_unlabelled_requests_it_is_the_mean_of_the_human_labels() -> None:
    traffic = Traffic(9)
    labelled = [traffic.draw() for _ in range(100)]
    alone = ppi_estimate(Metric.PRECISION, labelled, [])
    humans = estimate(
        Metric.PRECISION, ratio_sums(Metric.PRECISION, [pair.human for pair in labelled])
    )
    assert alone.value == pytest.approx(humans.value)
    assert alone.upper - alone.lower == pytest.approx(humans.upper - humans.lower, rel=0.02)


def test_too_few_labels_are_no_data_however_much_was_judged() -> None:
    traffic = Traffic(10)
    labelled = [traffic.draw() for _ in range(10)]
    found = ppi_estimate(Metric.UDCG, labelled, [traffic.draw().judge for _ in range(1_000)])
    assert (found.value, found.n, found.n_needed) == (None, 10, 30)


def test_labels_that_are_all_relevant_leave_room_for_kinds_too_rare_to_be_seen() -> None:
    """Fifty of fifty say that the share is above 0.93; narrower needs more labels, and how many."""
    labelled = clusters([Labelled(request([1], 0), request([1], 0))] * 50)
    found = estimate_from_labels(Metric.PRECISION, labelled)
    assert (found.value, found.upper, found.method) == (1.0, 1.0, "unseen")
    assert found.lower == pytest.approx(0.025 ** (1 / 50))
    wanted = Precision(max_width={Metric.PRECISION: 0.02})
    needed = estimate_from_labels(Metric.PRECISION, labelled, precision=wanted).n_needed
    assert needed is not None
    assert needed > 200
    # Utility has no bounds to reason from.
    assert estimate_from_labels(Metric.UDCG, labelled).value is None


def test_requests_of_one_session_count_once() -> None:
    traffic = Traffic(11)
    pairs = []
    for i in range(80):
        drawn = traffic.draw()
        name = str(i // 2)
        pairs.append(Labelled(drawn.human, replace(drawn.judge, session_id=name)))
    assert ppi_estimate(Metric.UDCG, pairs, []).n == 40


def test_labels_that_were_picked_where_they_tell_most_leave_the_estimate_centred() -> None:
    everything, rng, repeats = population(), np.random.default_rng(13), 60
    truth = truths(everything)
    values = dict.fromkeys(METRICS, 0.0)
    unweighted = 0.0
    for _ in range(repeats):
        drawn = everything.draw(800, rng)
        chances = 0.1 * label_weights(drawn.judge)
        picked = rng.random(800) < chances
        chosen = drawn.rows(picked)
        labelled = LabelledClusters.of(*chosen, chances[picked])
        alike = LabelledClusters.of(*chosen)
        unlabelled = sums_of(drawn.judge[~picked])
        for metric in METRICS:
            values[metric] += estimate_from_labels(metric, labelled, unlabelled).value / repeats
        unweighted += estimate_from_labels(Metric.PRECISION, alike).value / repeats
    for metric in METRICS:
        assert values[metric] == pytest.approx(truth[metric], abs=0.035), metric
    assert unweighted < truth[Metric.PRECISION] - 0.02


def test_a_judge_that_says_the_opposite_is_as_good_as_one_that_is_right() -> None:
    traffic = Traffic(14)

    def opposed(human: JudgedRequest) -> JudgedRequest:
        return request([1 - grade for grade in human.grades], 0)

    humans = [traffic.draw().human for _ in range(3_000)]
    labelled = [Labelled(human, opposed(human)) for human in humans[:200]]
    found = ppi_estimate(Metric.PRECISION, labelled, [opposed(human) for human in humans[200:]])
    alone = ppi_estimate(Metric.PRECISION, labelled, [])
    assert found.upper - found.lower < 0.4 * (alone.upper - alone.lower)


def test_a_verdict_that_a_single_label_speaks_of_does_not_steer_the_estimate() -> None:
    traffic = Traffic(15)
    humans = [traffic.draw().human for _ in range(150)]
    silent = request([0] * 5, 0)
    labelled = [Labelled(human, silent) for human in humans[:-1]]
    labelled.append(Labelled(humans[-1], request([1] * 5, 0)))
    found = ppi_estimate(Metric.UDCG, labelled, [silent] * 1_000)
    alone = ppi_estimate(Metric.UDCG, labelled, [])
    assert (found.value, found.lower, found.upper) == pytest.approx(
        (alone.value, alone.lower, alone.upper)
    )


def test_few_labels_fit_few_coefficients() -> None:
    everything, rng = population(), np.random.default_rng(16)
    held, repeats = 0, 200
    truth = truths(everything)[Metric.UDCG]
    for _ in range(repeats):
        drawn = everything.draw(300, rng)
        labelled = LabelledClusters.of(*drawn.rows(slice(40)))
        found = estimate_from_labels(Metric.UDCG, labelled, sums_of(drawn.judge[40:]))
        held += found.lower <= truth <= found.upper
    assert held / repeats >= 0.91


@pytest.mark.parametrize("probability", [0.0, -0.5, math.inf, math.nan])
def test_a_label_that_had_no_chance_is_refused(probability: float) -> None:
    with pytest.raises(ConfigurationError, match="labelling probability"):
        clusters([Labelled(request([1], 0), request([1], 0), probability)])


def test_a_session_whose_requests_had_different_probabilities_has_their_mean_weight() -> None:
    pair = Labelled(request([1], 0), request([1], 0, "s"))
    found = clusters([pair, pair._replace(probability=0.5), Labelled(pair.human, pair.human, 0.25)])
    assert found.weights.tolist() == [4.0, 1.5]


def test_a_judge_that_does_not_call_the_first_passage_relevant_leaves_more_to_label() -> None:
    judged = [request([1, 0], 0), request([0, 1], 0), request([], 0)]
    assert label_weights(table(judged)).tolist() == [1.0, 2.0, 2.0]


def test_an_interval_of_a_share_stays_inside_its_range() -> None:
    pairs = [Labelled(request([1], 0), request([1], 0))] * 60
    pairs += [Labelled(request([0], 1), request([1], 0))]
    found = ppi_estimate(Metric.PRECISION, pairs, [])
    assert 0.0 < found.lower < found.value < found.upper < 1.0
