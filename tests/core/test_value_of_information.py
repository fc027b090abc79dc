"""The value of asking about a candidate, the update by an answer, and the fit of both."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.scores import logistic
from ctxguard.core.types import FloatArray
from ctxguard.core.value_of_information import AnswerModel, bounded_log_odds, to_ask
from ctxguard.errors import ConfigurationError

CHANCES = st.lists(
    st.sampled_from([0.0, 0.01, 0.1, 0.2, 0.25, 0.5, 0.9, 1.0]) | st.floats(0.0, 1.0),
    min_size=1,
    max_size=12,
)
THRESHOLDS = st.sampled_from([0.0, 0.2, 0.25, 0.6])


def model_with(effect: float, *, slope: float = 0.0) -> AnswerModel:
    """Answers that are normal scores already, with a known effect."""
    scores = tuple(np.linspace(-3.0, 3.0, 25).tolist())
    return AnswerModel(scores, scores, -0.5 * effect, slope, effect, 1.0)


def utility(chances: FloatArray, k: int, threshold: float) -> float:
    """L(P): the first is kept whatever its P, the others above the threshold, at most k."""
    ranked = sorted(chances.tolist(), reverse=True)[:k]
    terms = (
        (chance - threshold if rank == 1 else max(chance - threshold, 0.0)) / np.log2(rank + 1)
        for rank, chance in enumerate(ranked, start=1)
    )
    return float(sum(terms))


@given(CHANCES, st.integers(1, 8), THRESHOLDS, st.floats(0.1, 3.0))
def test_value_is_expected_change_when_resorted(
    listed: list[float], k: int, threshold: float, effect: float
) -> None:
    chances, model = np.array(listed), model_with(effect)
    if_relevant, if_not, ratios = model._bins
    expected = []
    for position, chance in enumerate(listed):
        change = 0.0
        for relevant, other, ratio in zip(if_relevant, if_not, ratios, strict=True):
            after = chances.copy()
            after[position] = logistic(bounded_log_odds(np.array([chance])) + ratio)[0]
            weight = chance * relevant + (1.0 - chance) * other
            change += weight * (utility(after, k, threshold) - utility(chances, k, threshold))
        expected.append(max(change, 0.0) / (1.0 - threshold))
    assert model.values(chances, k, threshold) == pytest.approx(expected, abs=1e-9)
    first = np.argsort(-chances, kind="stable")[:3]
    of_first = np.zeros(chances.size)
    of_first[first] = np.array(expected)[first]
    assert model.values(chances, k, threshold, 3) == pytest.approx(of_first, abs=1e-9)


@given(st.floats(0.001, 0.999), st.floats(0.1, 4.0))
def test_mean_answers_leave_p(chance: float, effect: float) -> None:
    if_relevant, if_not, ratios = model_with(effect)._bins
    after = logistic(bounded_log_odds(np.array([chance])) + ratios)
    assert (chance * if_relevant + (1.0 - chance) * if_not) @ after == pytest.approx(chance)


def test_equal_values_keep_order_zeros_drop() -> None:
    values = np.array([0.0, 0.3, 0.1, 0.3, 0.0])
    assert to_ask(values, 0.0, 20).tolist() == [1, 3, 2]
    assert (to_ask(values, 0.1, 20).tolist(), to_ask(values, 0.0, 1).tolist()) == ([1, 3], [1])


def test_refused_and_unasked_keep_their_p() -> None:
    chances = np.array([0.6, 0.3, 0.2])
    after = model_with(1.0).updated(chances, np.array([np.nan, 2.0, np.inf]))
    assert after[[0, 2]].tolist() == [0.6, 0.2]
    assert after[1] > 0.3


def test_update_is_normals_likelihood_ratio() -> None:
    model = model_with(1.5, slope=0.2)
    odds, z = bounded_log_odds(np.array([0.3]))[0], 0.75
    mean = model.intercept + 0.2 * odds
    ratio = 0.5 * ((z - mean) ** 2 - (z - mean - 1.5) ** 2)
    assert bounded_log_odds(model.updated(np.array([0.3]), np.array([z])))[0] == pytest.approx(
        odds + ratio
    )


def test_increasing_transforms_give_same_update() -> None:
    rng = np.random.default_rng(0)
    chances, relevant, groups, answers = asked(rng, 60, 1.0)
    plain, curved = (
        AnswerModel.fit(own, chances, relevant, groups) for own in (answers, np.exp(3.0 * answers))
    )
    assert plain is not None
    assert curved is not None
    at = answers[:20]
    assert curved.updated(chances[:20], np.exp(3.0 * at)) == pytest.approx(
        plain.updated(chances[:20], at), abs=0.02
    )


def asked(
    rng: np.random.Generator, questions: int, d: float, slope: float = 0.3
) -> tuple[FloatArray, np.ndarray, np.ndarray, FloatArray]:
    """Ten candidates a question with a true P, and answers of a known effect."""
    odds = rng.normal(-1.5, 1.5, size=questions * 10)
    relevant = rng.random(odds.size) < logistic(odds)
    answers = slope * odds + d * relevant + rng.standard_normal(odds.size)
    return logistic(odds), relevant, np.repeat(np.arange(questions), 10), answers


def test_fit_recovers_distance_slightly_shrunk() -> None:
    found = []
    for repeat in range(40):
        chances, relevant, groups, answers = asked(np.random.default_rng(repeat), 100, 1.0)
        model = AnswerModel.fit(answers, chances, relevant, groups)
        assert model is not None
        found.append(model.distance)
    assert 0.85 < np.mean(found) < 1.0


@pytest.mark.parametrize("d", [0.0, -1.0])
def test_worthless_answers_are_worth_nothing(d: float) -> None:
    effects = []
    for repeat in range(100):
        chances, relevant, groups, answers = asked(np.random.default_rng(repeat), 30, d)
        model = AnswerModel.fit(answers, chances, relevant, groups)
        assert model is not None
        effects.append(model.effect)
    assert np.mean(np.array(effects) > 0.0) <= 0.02


def test_little_garbage_leaves_most_effect() -> None:
    rng = np.random.default_rng(1)
    chances, relevant, groups, answers = asked(rng, 200, 1.0)
    clean = AnswerModel.fit(answers, chances, relevant, groups)
    wild = np.where(
        rng.random(answers.size) < 0.05, 1e6 * rng.standard_cauchy(answers.size), answers
    )
    dirty = AnswerModel.fit(wild, chances, relevant, groups)
    assert clean is not None
    assert dirty is not None
    assert dirty.distance > 0.7 * clean.distance


def test_perfect_assessor_is_believed_within_bounds() -> None:
    chances, relevant, groups, _ = asked(np.random.default_rng(4), 60, 1.0)
    model = AnswerModel.fit(relevant.astype(float), chances, relevant, groups)
    assert model is not None
    assert model.distance < 50.0
    values = model.values(chances[:20], 5, 0.3)
    assert np.isfinite(values).all()
    assert values.max() > 0.0


def test_few_levels_rank_by_mid_ranks() -> None:
    chances, relevant, groups, answers = asked(np.random.default_rng(2), 60, 1.5)
    model = AnswerModel.fit((answers > 0.0).astype(float), chances, relevant, groups)
    assert model is not None
    assert model.answers == (0.0, 1.0)
    assert model.effect > 0.0


def test_too_few_answers_fit_nothing() -> None:
    chances, relevant, groups, answers = asked(np.random.default_rng(3), 20, 1.0)
    assert AnswerModel.fit(answers, chances, relevant & (chances > 0.9), groups) is None
    assert AnswerModel.fit(np.ones_like(answers), chances, relevant, groups) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"answers": (1.0, 0.0)},
        {"answers": (0.0,)},
        {"scores": (0.0, float("nan"))},
        {"slope": float("inf")},
        {"effect": -0.1},
        {"deviation": 0.0},
    ],
)
def test_numbers_without_model_are_refused(wrong: dict[str, object]) -> None:
    right = dict(
        zip(
            ("answers", "scores", "intercept", "slope", "effect", "deviation"),
            ((0.0, 1.0), (-1.0, 1.0), 0.0, 0.0, 1.0, 1.0),
            strict=True,
        )
    )
    with pytest.raises(ConfigurationError):
        AnswerModel(**right | wrong)  # type: ignore[arg-type]


def test_no_candidate_has_no_value() -> None:
    assert model_with(1.0).values(np.zeros(0), 5, 0.2).tolist() == []
    one = model_with(1.0).values(np.array([0.3]), 5, 0.2)
    assert one == pytest.approx([0.0], abs=1e-12)  # it is kept in any case
