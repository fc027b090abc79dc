"""What is promised for labels: one labelling through the store, and the published share."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import RESULTS
from benchmarks.label_promises import CASES, Promise, labellings, outcome


def test_what_was_promised_for_the_labels_of_a_labelling_comes(tmp_path: Path) -> None:
    case = next(one for one in CASES if one.grades == (100, 100))
    promises = list(labellings(case, 1, 7, tmp_path))
    assert {one.turn for one in promises} == {1, 2}
    found = outcome(promises)
    assert found.promised > 0.5
    assert found.came == 1.0


def test_a_promise_counts_as_reached_if_the_interval_is_as_narrow() -> None:
    widths = [(0.2, 0.1), (0.2, 0.2), (0.2, 0.3), (0.2, None), (None, 0.1)]
    found = outcome([Promise("case", 1, "mrr", *each) for each in widths])
    assert (found.promised, found.came, found.reached) == (0.8, 0.75, 0.5)
    assert found.ratio == pytest.approx(1.0)


def test_the_published_labellings_kept_their_promises() -> None:
    published = json.loads((RESULTS / "label_promises.json").read_text(encoding="utf-8"))
    assert published["labellings"] >= 200
    assert published["came"] == 1.0
    assert published["reached"] >= 0.9
