"""Comparisons saved as JSON, and whether a new comparison is worse than a saved one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from simulated_pools import Recorded, ranking_of

from calibration.compare.candidates import Candidate
from calibration.compare.comparison import Comparison, compare
from calibration.compare.saved_comparison import (
    RegressionCheck,
    SavedComparison,
    check_metrics,
    check_regressions,
    values_as_json,
)
from calibration.data.dataset import Dataset, Query
from ctxguard.core.policies import RatioPolicy
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.measure.worth import READERS, STRICT, Utilities

DATASET = Dataset(
    "shelf/test",
    tuple(Query(f"q{i}", f"question {i}") for i in range(9)),
    {f"q{i}": {"good": 1} for i in range(9)},
)


def compared(ks: Mapping[str, int], utilities: Utilities = READERS) -> Comparison:
    """Candidates by name, each with its k: a larger one does more harm."""
    candidates = [Candidate(name, RatioPolicy(k=k)) for name, k in ks.items()]
    relevant_first = ranking_of([4.0, 3.0, 2.0, 1.0], ids=["good", "a", "b", "c"])
    shelf = Recorded({query.text: relevant_first for query in DATASET.queries})
    return compare(candidates, lambda _: shelf, DATASET, utilities=utilities)


def document(comparison: Comparison, **other: object) -> dict[str, object]:
    """What ``ctxguard evaluate --candidate … --json`` prints, as far as it is read back."""
    return {
        "data": DATASET.name,
        "dataset_digest": DATASET.digest(),
        "utilities": asdict(comparison.utilities),
        "query_ids": list(comparison.query_ids),
        "candidates": [
            {"name": each.candidate.name, "per_query": values_as_json(each.per_query)}
            for each in comparison.candidates
        ],
        **other,
    }


def saved(comparison: Comparison, **other: object) -> SavedComparison:
    return SavedComparison.model_validate_json(json.dumps(document(comparison, **other)))


def checks(
    new: Comparison,
    earlier: SavedComparison,
    *,
    tolerance: float = 0.0,
    metrics: Sequence[str] = (),
) -> dict[str, RegressionCheck]:
    made = check_regressions(
        new, earlier, DATASET.digest(), metrics=check_metrics(metrics), tolerance=tolerance
    )
    return {check.candidate: check for check in made}


def test_values_read_back_as_were() -> None:
    comparison = compared({"mine": 2}, Utilities(by_grade={1: 0.25}))
    comparison.candidates[0].per_query["recall"][0] = np.nan
    assert document(comparison)["candidates"][0]["per_query"]["recall"][:2] == [None, 1.0]
    [candidate] = saved(comparison).candidates
    assert saved(comparison).utilities == Utilities(by_grade={1: 0.25})
    for metric, expected in comparison.candidates[0].per_query.items():
        np.testing.assert_array_equal(np.array(candidate.per_query[metric], float), expected)


@pytest.mark.parametrize(
    ("new", "earlier", "expected"),
    [
        ({"mine": 3, "other": 1}, {"other": 1, "mine": 1}, {"mine": "mine", "other": "other"}),
        ({"renamed": 3}, {"mine": 1}, {"renamed": "mine"}),
        ({"mine": 1, "new": 3}, {"mine": 1, "other": 1}, {"mine": "mine", "new": None}),
    ],
    ids=["of its name", "the only one", "not saved"],
)
def test_candidate_meets_its_saved_namesake(
    new: dict[str, int], earlier: dict[str, int], expected: dict[str, str | None]
) -> None:
    made = checks(compared(new), saved(compared(earlier)))
    assert {name: check.saved for name, check in made.items()} == expected
    for name, check in made.items():
        assert check.regressed == (new[name] == 3 and check.saved is not None)
        assert set(check.differences) == ({"udcg", "recall"} if check.saved else set())


def test_runs_pair_by_query() -> None:
    """Saved queries may stand in another order, and others may be among them."""
    new = compared({"mine": 2})
    [candidate] = saved(new).candidates
    per_query = {name: (0.5, *values[::-1]) for name, values in candidate.per_query.items()}
    earlier = saved(new).model_copy(
        update={
            "query_ids": ("another", *new.query_ids[::-1]),
            "candidates": (candidate.model_copy(update={"per_query": per_query}),),
        }
    )
    recall = checks(new, earlier)["mine"].differences["recall"]
    assert (recall.value, recall.n) == (0.0, len(new.query_ids))


def test_a_check_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="none of these candidates; it has a, b"):
        checks(compared({"mine": 1}), saved(compared({"a": 1, "b": 1})))


def test_other_labels_cannot_be_paired() -> None:
    comparison = compared({"mine": 1})
    with pytest.raises(ConfigurationError, match="on the same queries and labels"):
        checks(comparison, saved(comparison, dataset_digest="e" * 64))
    with pytest.raises(ConfigurationError, match="uses other utilities"):
        checks(comparison, saved(compared({"mine": 1}, STRICT)))


def test_unsaved_metric_is_named() -> None:
    earlier = saved(compared({"mine": 1}), candidates=[{"name": "mine", "per_query": {}}])
    with pytest.raises(ConfigurationError, match="mine has no values of udcg"):
        checks(compared({"mine": 1}), earlier)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_hiding_tolerance_is_refused(tolerance: float) -> None:
    comparison = compared({"mine": 1})
    with pytest.raises(ConfigurationError, match="must be ≥ 0 and finite"):
        checks(comparison, saved(comparison), tolerance=tolerance)


def test_mismatched_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "base.json"
    file.write_text(json.dumps(document(compared({"mine": 1}), query_ids=["q0"])))
    with pytest.raises(DataError, match="mine has 9 values of recall for 1 queries"):
        SavedComparison.load(file)
