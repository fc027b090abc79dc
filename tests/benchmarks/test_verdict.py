"""The benchmark of the verdict: what its means and bars say of known splits."""

import pytest

from benchmarks.verdict import Split, bars, by_labels, sizes_of, summarised
from calibration.data.dataset import Dataset, Query


def split(decision: str, recall: float, *, refuted: bool = False) -> Split:
    return {
        "decision": decision,
        "recall": recall,
        "udcg": 0.2,
        "kept": 3.0,
        "refuted": refuted,
    }


GOOD = [split("enforce", 0.02), split("enforce", 0.0), split("shadow", -0.02)]


def test_a_policy_counts_in_its_mode_only_where_it_is_enforced() -> None:
    found = summarised(GOOD)
    assert found["always"] == pytest.approx(0.0)
    assert found["served"] == pytest.approx(0.02 / 3)
    assert (found["enforce"], found["shadow"]) == pytest.approx((2 / 3, 1 / 3))
    assert found["kept"] == pytest.approx((3.0 + 3.0 + 5.0) / 3)


def test_the_worst_set_is_that_of_the_means_over_splits() -> None:
    bad = summarised([split("enforce", -0.03, refuted=True)] * 3)
    rows = by_labels({"good": {100: summarised(GOOD)}, "bad": {100: bad}})
    assert list(rows) == ["100"]
    assert rows["100"]["worst_served"] == pytest.approx(-0.03)
    assert (rows["100"]["n_refuted"], rows["100"]["n_enforced"]) == (3, 5)
    assert rows["100"]["enforced_recall"] == pytest.approx((0.02 - 0.09) / 5)


def test_each_bar_can_be_missed() -> None:
    good = by_labels({"good": {100: summarised(GOOD)}})
    assert all(bars(good).values())
    bad = by_labels({"bad": {100: summarised([split("enforce", -0.03, refuted=True)] * 3)}})
    assert sum(bars(bad).values()) == 1  # it enforces often enough
    idle = by_labels({"idle": {400: summarised([split("keep", 0.0)])}})
    assert [words for words, holds in bars(idle).items() if not holds] == [
        "400 labels enforce in 75% of splits"
    ]


@pytest.mark.parametrize(("answerable", "sizes"), [(21, []), (39, [20]), (100, [20, 30, 50, 70])])
def test_a_fifth_of_the_queries_or_ten_are_left_for_the_truth(
    answerable: int, sizes: list[int]
) -> None:
    queries = tuple(Query(f"q{n}", f"question {n}") for n in range(answerable))
    dataset = Dataset("some", queries, {query.query_id: {"p": 1} for query in queries})
    assert sizes_of(dataset) == sizes
