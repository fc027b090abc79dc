"""The benchmark of the verdict: what its means and bars say of known splits."""

import pytest

from benchmarks.verdict import Split, bars, by_labels, summarised


def split(
    decision: str, recall: float, *, udcg: float = 0.2, kept: float = 3.0, refuted: bool = False
) -> Split:
    return {"decision": decision, "recall": recall, "udcg": udcg, "kept": kept, "refuted": refuted}


GOOD = [split("enforce", 0.02), split("enforce", 0.0), split("shadow", -0.02)]


def test_a_policy_counts_in_its_mode_only_where_it_is_enforced() -> None:
    found = summarised(GOOD)
    assert found["always_recall"] == pytest.approx(0.0)
    assert found["recall"] == pytest.approx(0.02 / 3)
    assert found["udcg"] == pytest.approx(0.4 / 3)
    assert (found["enforce"], found["shadow"]) == pytest.approx((2 / 3, 1 / 3))
    assert found["kept"] == pytest.approx((3.0 + 3.0 + 5.0) / 3)


def test_only_an_enforced_policy_can_be_refuted() -> None:
    splits = [split("enforce", -0.1, refuted=True), split("shadow", -0.1, refuted=True)]
    found = summarised(splits)
    assert (found["n_refuted"], found["n_enforced"]) == (1, 1)


def test_every_bar_holds_where_each_policy_gains() -> None:
    good = summarised([split("enforce", 0.02)] * 60)
    found = bars({name: {50: good, 100: good} for name in ("demo", "anthropic_docs", "musique")})
    assert len(found) == 6
    assert all(holds for _, holds in found.values())


def test_each_bar_can_be_missed() -> None:
    lost = summarised([split("enforce", -0.03, udcg=0.0, refuted=True), split("keep", 0.0)] * 60)
    found = bars({name: {50: lost, 100: lost} for name in ("demo", "anthropic_docs", "musique")})
    assert not any(holds for _, holds in found.values())


def test_bars_of_collections_that_were_not_measured_are_left_out() -> None:
    found = bars({"musique": {20: summarised(GOOD)}})
    assert [words.split(" ")[0] for words in found] == ["recall", "recall", "refuted"]


def test_means_are_over_the_collections_that_have_so_many_labels() -> None:
    found = by_labels(
        {
            "musique": {20: summarised(GOOD)},
            "demo": {20: summarised([split("enforce", -0.1)]), 50: summarised(GOOD)},
        },
        ["musique", "demo"],
    )
    assert [(n, own["sets"]) for n, own in found.items()] == [(20, 2), (50, 1)]
    assert found[20]["recall"] == pytest.approx((0.02 / 3 - 0.1) / 2)
    assert found[20]["worst_recall"] == pytest.approx(-0.1)
    assert found[20]["n_enforced"] == 3
