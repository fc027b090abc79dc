"""Pools of candidates: few passages a question, hidden ranks, and a verdict as on full labels."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from calibration.pooling import FIRST, MOST, OF_OTHERS, Steps, pooled, to_grade
from calibration.verdict import verdict

N = 60


def graded(steps: Steps, grades: Mapping[str, int]) -> dict[str, int]:
    """What somebody who knows all grades is asked for, one passage at a time."""
    given: dict[str, int] = {}
    while left := [one for one in to_grade(steps, given) if one not in given]:
        given[left[0]] = grades.get(left[0], 0)
    return given


def rankings(rng: random.Random, noise: float) -> tuple[list[list[str]], dict[str, int]]:
    """Three routes over 200 passages, of which one to four are relevant."""
    ids = [f"p{number}" for number in range(200)]
    relevant = rng.sample(ids, rng.choice([1, 1, 2, 4]))
    grades = dict.fromkeys(relevant, 1)

    def route(spread: float) -> list[str]:
        score = {one: rng.gauss(3.0 * (one in grades), spread) for one in ids}
        return sorted(ids, key=lambda one: -score[one])

    return [route(noise), route(1.5 * noise), route(1.5 * noise)], grades


def test_heads_of_all_routes_come_first() -> None:
    today, other = [f"a{n}" for n in range(30)], [f"b{n}" for n in range(30)]
    steps = pooled("why?", [today, other])
    assert set(steps[0]) == {*today[:FIRST], *other[:OF_OTHERS]}
    assert sum(map(len, steps)) == MOST


@pytest.mark.parametrize("found", [[], [[]], [["a"], []], [["a", "a"], ["a"]], [["a"], ["b"]]])
def test_short_rankings_are_pooled_whole(found: list[list[str]]) -> None:
    steps = pooled("why?", found or [[]])
    assert sorted(one for step in steps for one in step) == sorted(
        {o for each in found for o in each}
    )


def test_order_hides_ranks() -> None:
    ids = [f"p{number}" for number in range(FIRST)]
    orders = {pooled(f"question {number}", [ids])[0] for number in range(40)}
    assert len(orders) > 30
    assert len({order.index("p0") for order in orders}) == FIRST


def test_irrelevant_step_ends_it() -> None:
    steps = (("a", "b"), ("c",), ("d",), ("e",))
    assert list(graded(steps, {})) == ["a", "b", "c"]
    assert list(graded(steps, {"a": 1})) == ["a", "b", "c"]
    assert list(graded(steps, {"c": 1})) == ["a", "b", "c", "d"]
    assert to_grade(steps, {"b": 1}) == ["a", "b"]


@pytest.mark.parametrize("noise", [0.7, 1.0, 1.5])
def test_at_most_12_passages_a_question(noise: float) -> None:
    rng = random.Random(5)
    asked, shares = [], []
    for number in range(N):
        routes, grades = rankings(rng, noise)
        given = graded(pooled(str(number), routes), grades)
        asked.append(len(given))
        in_reach = [one for one in grades if one in routes[0][:10]]
        if in_reach:
            shares.append(np.mean([one in given for one in in_reach]))
    assert np.mean(asked) <= 12
    assert np.mean(shares) >= 0.85


def decision(
    given: Sequence[tuple[list[str], Mapping[str, int]]], k: int, serving_k: int = FIRST
) -> str:
    """The verdict on the first k in place of today's, by labels of each question."""
    recall, udcg = [], []
    for today, grades in given:
        relevant = {one for one, grade in grades.items() if grade}
        found = [len(relevant & set(today[:n])) for n in (k, serving_k)]
        if relevant:
            recall.append((found[0] - found[1]) / len(relevant))
        udcg.append(found[0] - found[1] - 0.05 * (k - serving_k))
    tokens = np.full(len(given), k / serving_k - 1.0)
    made = verdict(np.array(recall), np.array(udcg), tokens, serving_k=serving_k, tolerance=0.01)
    return made.decision


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [3, 4, 8])
def test_pools_equal_all_labels_verdict(seed: int, k: int) -> None:
    """Simulated graders on a sharp retriever, 60 questions: on shorter and longer contexts."""
    rng = random.Random(seed)
    full, asked = [], []
    for number in range(N):
        routes, grades = rankings(rng, 0.8)
        full.append((routes[0], grades))
        asked.append((routes[0], graded(pooled(str(number), routes), grades)))
    assert decision(asked, k) == decision(full, k)
