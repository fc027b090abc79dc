"""The benchmark of the verdict: what its means and bars say of known splits."""

import numpy as np
import pytest

from benchmarks._served import Recorded
from benchmarks.verdict import (
    AT,
    BARS,
    CONTEXTS,
    DENSE,
    FIGURES,
    MISLED,
    Key,
    Split,
    Summary,
    bars,
    mean_of,
    measured,
    summarised,
)
from tests.made_up import recorded_of


def split(**figures: float) -> Split:
    """An enforced split that gains in everything, except as told."""
    good = {"enforced": 1.0, "recall": 0.1, "tokens": -0.2, "equal": 0.1, "kept": 3.0}
    return {**dict.fromkeys(FIGURES, 0.0), **good, **figures}


def sets_of(own: Summary, today: int = 5) -> dict[Key, Summary]:
    return {(name, context, today, AT): own for name in DENSE for context in CONTEXTS}


def test_unenforced_counts_as_today() -> None:
    found = summarised([split(), {**dict.fromkeys(FIGURES, 0.0), "kept": 5.0}])
    assert (found["recall"], found["tokens"], found["kept"]) == pytest.approx((0.05, -0.1, 4.0))
    assert (found["enforced"], found["n_enforced"], found["splits"]) == (0.5, 1.0, 2.0)
    # Refuted policies are counted.
    found = summarised([split(refuted=1.0), split(refuted=1.0), split()])
    assert (found["n_refuted"], found["n_enforced"]) == (2.0, 3.0)


def test_bars_hold_where_policies_gain() -> None:
    found = bars(sets_of(summarised([split()] * 20)))
    assert len(found) == sum(map(len, BARS.values())) + 1
    assert all(holds for _, holds in found.values())


@pytest.mark.parametrize(
    ("worse", "context", "bar"),
    [
        ({"tokens": 0.02}, "balanced", "tokens ≤ +0.01"),
        ({"tokens": -0.1}, "leaner", "tokens ≤ -0.12"),
        ({"tokens": 1.1}, "richer", "tokens ≤ +1"),
        ({"recall": 0.02}, "balanced", "recall ≥ +0.03"),
        ({"recall": -0.01}, "leaner", "recall ≥ -0.005"),
        ({"equal": 0.02}, "balanced", "equal ≥ +0.03"),
        ({"enforced": 0.6}, "balanced", "enforce ≥ +0.7"),
    ],
)
def test_each_bar_can_be_missed(worse: dict[str, float], context: str, bar: str) -> None:
    found = bars(sets_of(summarised([split(**worse)] * 20)))
    words = f"{context}, today first 5, 50 labels: {bar}"
    assert not found[words][1]


def test_mean_hides_no_bad_set() -> None:
    sets = sets_of(summarised([split()] * 20))
    sets[DENSE[0], "leaner", 5, AT] = summarised([split(recall=-0.02)] * 20)
    found = bars(sets)
    assert found["leaner, today first 5, 50 labels: recall ≥ -0.005"][1]
    assert not found["leaner, today first 5, 50 labels: worst ≥ -0.015"][1]


def test_too_few_enforced_misses_bar() -> None:
    for splits in ([split(refuted=1.0)] + [split()] * 9, [split()] * 2):
        *_, (value, holds) = bars(sets_of(summarised(splits))).values()
        assert not holds
        assert value == f"{12 * (len(splits) == 10)} of {12 * len(splits)}"


def test_bars_need_all_sets() -> None:
    own = summarised([split()])
    sets = sets_of(own)
    assert mean_of(sets, "balanced", 5, AT) is not None
    assert mean_of(sets, "balanced", 5, 20) is None
    del sets[DENSE[1], "balanced", 5, AT]
    assert not any(words.startswith("balanced") for words in bars(sets))
    assert [*bars({(DENSE[0], "balanced", 5, AT): own})] == [*bars({})]


def test_each_context_size_has_bars() -> None:
    own = summarised([split()] * 20)
    found = bars({**sets_of(own, 5), **sets_of(own, 10)})
    assert sum("today first 10" in words for words in found) == sum(map(len, BARS.values()))


def test_misleading_passages_have_a_bar() -> None:
    """Two of three sets must have fewer, at the most labels that each has."""
    few, many = (summarised([split(misleading=each)] * 20) for each in (-0.1, 0.1))
    sets = {(name, "leaner", 5, 100): few for name in MISLED[:2]}
    words = "leaner, today first 5: misleading ≤ -8% in 2 of 3 sets"
    found = bars({**sets, (MISLED[2], "leaner", 5, 50): many})
    assert found[words] == ("demo -10%, musique -10%, ramdocs_200 +10%", True)
    assert words not in bars(sets)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """A perfect score over some relevant passages, the longer ones useless."""
    rng = np.random.default_rng(3)
    n, depth = 120, 20
    relevant = np.arange(depth) < rng.integers(1, 9, (n, 1))
    scores = np.where(relevant, 0.9, 0.1) + rng.normal(0.0, 0.02, (n, depth))
    scores = -np.sort(-scores, axis=1)
    return recorded_of(relevant, scores, np.where(relevant, 100.0, 200.0))


def test_split_is_measured_on_others(recorded: Recorded) -> None:
    found = measured(recorded, "balanced", 5, 50, 0)
    assert (set(found), found["enforced"], found["refuted"]) == (set(FIGURES), 1.0, 0.0)
    assert found["recall"] > 0.0
    assert found["equal"] > 0.0
    assert found["tokens"] < 0.05


def test_too_few_labels_mean_today(recorded: Recorded) -> None:
    assert measured(recorded, "balanced", 5, 10, 0) == {**dict.fromkeys(FIGURES, 0.0), "kept": 5.0}
