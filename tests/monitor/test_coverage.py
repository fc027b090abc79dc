"""The benchmark of intervals simulates what the monitor computes, and reports it as it is."""

from pathlib import Path

import numpy as np
import pytest
from judged_rows import ratio_sums, sums, table, term_of

from benchmarks._traffic import ErrorRates, Population, Requests, draw, error_rates, pick
from benchmarks.coverage import METRICS, best_narrower, main, simulate
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import DEFAULT_K, Mode, Route, ScoreKind
from ctxguard.monitor.estimation.ppi import (
    LabelledClusters,
    estimate_from_clusters,
    label_weights,
    ppi_estimate,
)
from ctxguard.monitor.estimation.reduce import judged_request
from ctxguard.monitor.estimation.sums import ControlSums, control_columns, request_terms
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord

DEPTH = 14
RATES = JudgingRates(dropped_rate=0.3, full_pool_rate=0.1, full_pool_rate_if_no_hit=0.6)


@pytest.fixture(scope="module")
def population() -> Population:
    rng = np.random.default_rng(3)
    n_queries = 400
    chance = rng.choice((0.3, 0.9), (n_queries, 1)) / np.sqrt(np.arange(1, DEPTH + 1))
    relevant = rng.random((n_queries, DEPTH)) < chance
    return Population(
        "made up",
        relevant,
        np.where(relevant[:, :DEFAULT_K], 1.0, -0.5),
        np.ones((n_queries, DEPTH), dtype=bool),
        np.full(n_queries, 1.0 / n_queries),
    )


@pytest.fixture(scope="module")
def errors(population: Population) -> ErrorRates:
    return error_rates(population, 0.85, 0.90, by_rank=True)


@pytest.fixture(scope="module")
def requests(population: Population, errors: ErrorRates) -> Requests:
    return draw(population, errors, RATES, 600, np.random.default_rng(4))


def as_judged(requests: Requests, row: int, *, human: bool) -> JudgedRequest:
    """The same request through the monitor's own reduction."""
    served, dropped = tuple(range(DEFAULT_K)), tuple(range(DEFAULT_K, DEPTH))
    chance = requests.chance[row]
    record = SampleRecord(
        request_id=str(row),
        time_seconds=0.0,
        probability=1.0,
        session_id=None,
        segment=None,
        route=Route.HYBRID,
        mode=Mode.ENFORCE,
        query="query",
        passage_ids=tuple(f"p{position}" for position in range(DEPTH)),
        scores=np.arange(DEPTH, 0, -1, dtype=np.float32),
        kind=ScoreKind.RANK,
        legs={},
        served=served,
        dropped=dropped,
        kept=DEFAULT_K,
        sampled=tuple(position for position in dropped if requests.sampled[row, position]),
        full_pool=bool(chance < RATES.full_pool_rate),
        full_pool_if_no_hit=bool(chance < RATES.full_pool_rate_if_no_hit),
        baseline=bool(requests.baseline[row]),
        rates=RATES,
        passages={},
        flags=(),
        profile_id=None,
    )
    found = (requests.relevant if human else requests.verdicts)[row]
    verdicts = {
        f"p{position}": Judgment(f"p{position}", int(found[position])) for position in range(DEPTH)
    }
    return judged_request(record, verdicts, utilities=DEFAULT_UTILITIES, max_grade=1)


@pytest.mark.parametrize("metric", METRICS)
def test_its_columns_are_what_the_monitor_makes_of_the_same_requests(
    requests: Requests, metric: Metric
) -> None:
    people = [as_judged(requests, row, human=True) for row in range(600)]
    judge = [as_judged(requests, row, human=False) for row in range(600)]
    terms = [term_of(metric, request) or (0.0, 0.0) for request in people]
    np.testing.assert_allclose(requests.human_terms()[metric], terms)
    controls = request_terms(table(judge)).values[:, control_columns(metric)]
    np.testing.assert_allclose(requests.judge_controls()[metric], controls)


@pytest.mark.parametrize("metric", METRICS)
def test_its_intervals_are_those_of_the_library_on_the_same_draws(
    requests: Requests, metric: Metric
) -> None:
    judge = [as_judged(requests, row, human=False) for row in range(600)]
    weights = label_weights(table(judge))
    labelled = pick(weights, 120, np.random.default_rng(8)).tolist()
    rest = [row for row in range(600) if row not in set(labelled)]
    expected = ppi_estimate(
        metric,
        LabelledClusters.of(
            table(as_judged(requests, row, human=True) for row in labelled),
            table(judge[row] for row in labelled),
            weights[labelled],
        ),
        sums(judge[row] for row in rest),
    )
    own = requests.judge_controls()[metric]
    found = estimate_from_clusters(
        metric,
        requests.human_terms()[metric][labelled],
        own[labelled],
        ControlSums.of(own[rest]),
        1.0 / weights[labelled],
        inclusion=requests.human_inclusion(metric)[labelled],
    )
    assert (found.value, found.lower, found.upper) == pytest.approx(
        (expected.value, expected.lower, expected.upper)
    )
    assert found.n == expected.n


def test_the_truth_is_what_the_estimators_say_of_all_the_traffic(population: Population) -> None:
    everything = Requests(
        relevant=population.relevant,
        verdicts=population.relevant,
        utilities=population.utilities,
        sampled=np.ones_like(population.relevant),
        chance=np.zeros(len(population.share)),
        baseline=np.ones(len(population.share), dtype=bool),
        rates=RATES,
    )
    people = [as_judged(everything, row, human=True) for row in range(len(population.share))]
    truths = population.truths()
    for metric in (Metric.PRECISION, Metric.UDCG, Metric.GAIN, Metric.HARM):
        everyone = ratio_sums(metric, people)
        assert truths[metric] == pytest.approx(everyone.a / everyone.b)
    relevant = population.relevant
    kept = relevant[:, :DEFAULT_K].sum()
    assert truths[Metric.RECALL] == pytest.approx(kept / relevant.sum())
    first = [row.argmax() + 1 for row in relevant[:, :DEFAULT_K] if row.any()]
    assert truths[Metric.MRR] == pytest.approx(
        sum(1.0 / rank for rank in first) / relevant.any(axis=1).sum()
    )


def test_a_judge_that_trusts_the_ranking_is_right_as_often_over_what_is_served(
    population: Population, errors: ErrorRates
) -> None:
    served = population.relevant[:, :DEFAULT_K]
    sensitivity = errors.sensitivity[:DEFAULT_K]
    specificity = errors.specificity[:DEFAULT_K]
    assert (served * sensitivity).sum() / served.sum() == pytest.approx(0.85)
    assert (~served * specificity).sum() / (~served).sum() == pytest.approx(0.90)
    assert sensitivity[0] > sensitivity[4]
    assert specificity[0] < specificity[4]


def test_rows_are_picked_in_proportion_to_their_weight() -> None:
    rng, weights = np.random.default_rng(5), np.array([2.0] * 10 + [1.0] * 20)
    counts = np.zeros(30)
    for _ in range(4_000):
        rows = pick(weights, 8, rng)
        assert len(set(rows.tolist())) == 8
        counts[rows] += 1
    np.testing.assert_allclose(counts / 4_000, 8 * weights / weights.sum(), atol=0.03)


def test_intervals_cover_and_are_narrower_than_labels_alone(
    population: Population, errors: ErrorRates
) -> None:
    outcomes = simulate(
        population,
        "by rank",
        errors,
        JudgingRates(full_pool_rate_if_no_hit=1.0),
        n_requests=1_000,
        n_labels=150,
        repeats=150,
        seed=6,
    )
    assert all(outcome.estimates == 150 for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.coverage >= 0.89, outcome
        assert outcome.metric is Metric.RECALL or outcome.narrower > 0.18, outcome
        # Within simulation error of the most that random labels allow.
        if outcome.labelling == "random" and outcome.best_narrower is not None:
            assert outcome.narrower < outcome.best_narrower + 0.03, outcome


def test_a_judge_that_is_always_right_leaves_the_error_of_the_requests_alone(
    population: Population,
) -> None:
    perfect = error_rates(population, 1.0, 1.0, by_rank=False)
    best = best_narrower(
        population,
        perfect,
        JudgingRates(full_pool_rate_if_no_hit=1.0),
        0.1,
        np.random.default_rng(7),
    )
    # √0.1 of the width is left where a tenth is labelled and the verdicts tell all.
    assert best[Metric.UDCG] == pytest.approx(1.0 - 0.1**0.5, abs=1e-6)


def test_more_than_every_other_request_cannot_be_labelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--labels", "600", "--requests", "1000"])
    assert "twice as many requests" in capsys.readouterr().err


def test_a_folder_without_collections_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path)])
    assert "no folder with a corpus.jsonl" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.model
def test_the_bars_are_met_on_the_shared_collections(shared_data: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(shared_data), "--cache", str(tmp_path)]
    assert main(arguments) == 0
