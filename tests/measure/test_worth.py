"""What passages are worth, UDCG and keywords: worked examples and edges.

Figures of whole pools are tested where they are computed, in ``tests/calibration``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.measure.metrics import keyword_first_ranks, udcg
from ctxguard.measure.worth import PRESETS, READERS, Negative, Utilities

EXACT = 1e-9


def test_worked_udcg(examples: dict[str, Any]) -> None:
    for case in examples["udcg"]:
        gain, harm = udcg(np.array([case["utilities_in_rank_order"]]))
        assert gain[0] - harm[0] == pytest.approx(case["exact"], abs=EXACT)
        assert gain[0] == pytest.approx(case["gain_exact"], abs=EXACT)
        assert harm[0] == pytest.approx(case["harm_exact"], abs=EXACT)


def udcg_reference(
    relevant: list[bool], abstain: list[float], penalty: float = 0.333
) -> float | None:
    """UDCG as the authors of the paper that named it compute it, without a rank discount.

    sigmoid of the mean over all passages of 1 − a for a relevant one and −penalty·(1 − a) for
    another; a is the probability that the reader abstains on that passage alone. Trappolini,
    Cuconasu, Filice, Maarek and Silvestri, EACL 2026, arXiv 2510.21440.
    """
    if not relevant:
        return None
    worth = [
        (1.0 - probability) * (1.0 if is_relevant else -penalty)
        for is_relevant, probability in zip(relevant, abstain, strict=True)
    ]
    return 1.0 / (1.0 + math.exp(-math.fsum(worth) / len(worth)))


def test_worked_reference_udcg(examples: dict[str, Any]) -> None:
    reference = examples["udcg_reference"]
    assert reference["penalty"] == 0.333
    for case in reference["cases"]:
        value = udcg_reference(case["relevant"], case["abstain"])
        assert value == pytest.approx(case["exact"], abs=EXACT)
    assert udcg_reference([], []) is None


@given(st.lists(st.floats(-1, 1), max_size=30))
def test_udcg_is_gain_less_harm(utilities: list[float]) -> None:
    gain, harm = udcg(np.array([utilities]))
    assert min(gain[0], harm[0]) >= 0.0
    plain = sum(worth / math.log2(rank + 1) for rank, worth in enumerate(utilities, start=1))
    assert gain[0] - harm[0] == pytest.approx(plain, abs=EXACT)


HARD, DISTRACTOR = ({"negative": one} for one in Negative)
UNJUDGED = {"is_judged": False}
MAPPED = {"by_grade": {0: -0.4, 1: 0.3}}


@pytest.mark.parametrize(
    ("grade", "label", "utilities", "expected"),
    [
        (2, {}, {}, 1.0),
        # A positive grade below the collection's highest is partial.
        (1, {}, {}, 0.5),
        (0, {}, {}, -0.02),
        (0, UNJUDGED, {"unjudged": -0.3}, -0.3),
        # A map replaces the preset for the grades that it names.
        (0, {}, MAPPED, -0.4),
        (1, {}, MAPPED, 0.3),
        (2, {}, MAPPED, 1.0),
        (0, UNJUDGED, MAPPED, -0.02),
        # A labelled negative comes first.
        (0, HARD, MAPPED, -0.1),
        (0, DISTRACTOR, {}, -0.2),
        # A relevant passage does not mislead.
        (2, DISTRACTOR, {}, 1.0),
    ],
)
def test_what_each_label_is_worth(
    grade: int, label: dict[str, Any], utilities: dict[str, Any], expected: float
) -> None:
    assert Utilities(**utilities).of(grade, top_grade=2, **label) == expected


def test_worst_utility_is_the_lowest() -> None:
    assert (Utilities().worst, Utilities(unjudged=-2.0).worst) == (-0.2, -2.0)
    assert Utilities(by_grade={0: -3.0}).worst == -3.0


def test_presets_charge_labelled_negatives_most() -> None:
    for preset in PRESETS.values():
        assert preset.distractor <= preset.hard_negative <= preset.irrelevant <= preset.unjudged


@pytest.mark.parametrize(
    ("keywords", "texts", "ranks"),
    [
        (["Queue"], ["queueing", "a QUEUE."], [2]),
        (["C++", "C"], ["C++ only", "plain c"], [1, 1]),
        (["straße"], ["die STRASSE"], [1]),
        (["wait for"], ["wait\n  for it"], [1]),
        (["a.c"], ["abc", "a.c"], [2]),
    ],
)
def test_keywords_match_whole_words_in_any_case(
    keywords: list[str], texts: list[str], ranks: list[int]
) -> None:
    assert keyword_first_ranks(keywords, texts) == ranks


@pytest.mark.parametrize(
    "settings",
    [
        {"irrelevant": 0.5},
        {"distractor": 1.0},
        {"hard_negative": float("nan")},
        {"relevant": -1.0},
        {"partial": float("inf")},
        {"score_ratio": 70.0},
        {"rank_limit": -1},
        {"by_grade": {1: float("nan")}},
    ],
)
def test_utilities_of_wrong_sign_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Utilities(**settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: READERS.of(3, top_grade=2), "grade 3 is above top_grade 2"),
        (lambda: keyword_first_ranks([" "], ["text"]), "keyword ' ' is empty"),
    ],
)
def test_what_cannot_be_measured_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
