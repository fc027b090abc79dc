"""The predictions for all requests, corrected by what people graded of some."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_rows import GAIN, HARM, Judged, rows_of, sums_of

from ctxguard.measure.corrected import (
    FOLDS,
    N_COLUMNS,
    QUOTIENTS,
    Graded,
    Model,
    corrected_estimates,
    corrected_totals,
    predicted,
)
from ctxguard.measure.estimate import Estimate, Sums, estimate
from ctxguard.measure.metrics import Metric, udcg
from ctxguard.measure.rows import Rows

PRIOR = Model.fitted(rows_of([]), np.zeros(0, np.intp))
BELIEVES = Model(np.tile([-30.0, 60.0, *[0.0] * 8], (FOLDS, 1)))
"""Predicts that the judge is right."""
VERDICT = st.integers(0, 1)


def estimates(
    rows: Rows, is_graded: np.ndarray, model: Model = PRIOR, min_n: int = 2
) -> Mapping[Metric, Estimate]:
    """Estimates of requests of which some were graded, all with the same probability."""
    sums, weight = Sums.of(N_COLUMNS), 1.0 / rows.requests["probability"]
    p = model.of(rows, np.where(is_graded, np.cumsum(is_graded) % FOLDS, -1))
    sums.add(predicted(rows, p, model) * weight[:, None], rows.requests["session"])
    graded = Graded.of(rows, p, is_graded * 1.0)
    return corrected_estimates(sums.ended(), graded, model, min_n)


@st.composite
def graded_requests(draw: st.DrawFn) -> Judged:
    """A request of which people graded all that is judged."""
    served, dropped = (draw(st.lists(VERDICT, max_size=4)) for _ in range(2))
    return Judged(
        served,
        dropped,
        weight=draw(st.sampled_from([1.0, 3.0, 10.0])),
        session=draw(st.sampled_from([None, "s1", "s2"])),
        dropped_chance=draw(st.sampled_from([0.2, 0.5, 1.0])),
        grades=[draw(st.integers(0, 2)) for _ in (*served, *dropped)],
    )


def by_hand(requests: list[Judged]) -> dict[Metric, float]:
    """The metrics from the grades of people."""
    sums = {metric: np.zeros(2) for metric in QUOTIENTS}
    for one in requests:
        grades = [grade > 0 for grade in one.grades[: len(one.served)]]
        kept = sum(grades)
        dropped = sum(grade > 0 for grade in one.grades[len(one.served) :]) / one.dropped_chance
        [gain], [harm] = udcg(np.array([[GAIN if grade else -HARM for grade in grades]]))
        rank = grades.index(True) + 1 if kept else np.inf
        values = {
            Metric.GAIN: (gain, 1.0),
            Metric.HARM: (harm, 1.0),
            Metric.UDCG: (gain - harm, 1.0),
            Metric.POOLED_RECALL: (kept, kept + dropped),
        }
        if grades:
            values[Metric.PRECISION] = (kept / len(grades), 1.0)
            values[Metric.SERVED_MRR] = (1.0 / rank, 1.0)
        for metric, value in values.items():
            sums[metric] += one.weight * np.array(value)
    return {metric: a / b for metric, (a, b) in sums.items() if b > 0.0}


@settings(max_examples=50)
@given(st.lists(graded_requests(), min_size=2, max_size=20))
def test_fully_graded_figures_are_grades(requests: list[Judged]) -> None:
    """Whatever the judge says, and whatever is predicted of it."""
    rows, expected = rows_of(requests), by_hand(requests)
    number = np.arange(len(requests))
    for model in (PRIOR, BELIEVES, Model.fitted(rows, number % FOLDS)):
        for metric, one in estimates(rows, number >= 0, model, min_n=0).items():
            if one.value is not None:
                assert one.value == pytest.approx(expected[metric], abs=1e-9), metric
                assert one.lower - 1e-9 <= one.value <= one.upper + 1e-9


def test_perfect_judge_needs_no_correction() -> None:
    """The grades of a few add nothing to the figures of all, nor to their error."""
    rng = np.random.default_rng(1)
    requests = []
    for number in range(400):
        verdicts = (rng.random(9) < 0.6).astype(int).tolist()
        grades = verdicts if number < 60 else ()
        requests.append(Judged(verdicts[:5], verdicts[5:], grades=grades, dropped_chance=0.5))
    rows = rows_of(requests)
    found = estimates(rows, np.arange(400) < 60, BELIEVES)
    for metric in QUOTIENTS:
        by_judge = estimate(metric, sums_of(rows).ratio(metric))
        assert found[metric].value == pytest.approx(by_judge.value, abs=1e-9)
        width = by_judge.upper - by_judge.lower
        assert found[metric].upper - found[metric].lower <= 3.0 * width, metric


def test_spreadless_predictions_have_no_say() -> None:
    """If all that people graded is relevant, that is the estimate, whatever the judge said."""
    request = np.arange(20)
    coefficients, errors = corrected_totals(
        np.array([7.0, 50.0]),
        np.array([1]),
        cell=0 * request,
        weight=np.ones(20),
        found=np.ones((20, 1)),
        expected=np.random.default_rng(1).random((20, 1)),
        cluster=request,
        n_clusters=20,
    )
    assert coefficients.tolist() == [[0.0, 1.0]]
    assert not errors.any()
