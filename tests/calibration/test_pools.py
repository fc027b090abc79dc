"""The labels of every candidate, as tables beside its scores."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated_pools import labelled, ranking_of

from calibration.data.dataset import Dataset, Query
from calibration.grid import ratio_grid, with_expected
from calibration.pools import LabelledPools, label
from ctxguard.errors import CalibrationError
from ctxguard.measure.worth import READERS, STRICT, Utilities


class TestLabelledPools:
    DATASET = Dataset(
        "hand-made",
        (Query("q0", "question 0"),),
        {"q0": {"p0": 2, "p2": 1, "p3": 0, "far": 2}},
        {"q0": {"p1": "hard_negative", "p3": "distractor"}},
    )

    def of(self, **settings: object) -> LabelledPools:
        pools = labelled([ranking_of([5.0, 4.0, 3.0, 2.0, 1.0])], [{"p0": 1}], depth=6)
        return label(pools, self.DATASET, **settings)  # type: ignore[arg-type]

    def test_candidates_have_grade_and_worth(self) -> None:
        labels = self.of(utilities=STRICT)
        assert labels.grades.tolist() == [[2, 0, 1, 0, 0, 0]]
        assert labels.judged.tolist() == [[True, True, True, True, False, False]]
        assert labels.utilities.tolist() == [[1.0, -0.5, 0.5, -1.0, -0.2, 0.0]]
        assert not labels.positives_only
        assert labels.misleading[0].tolist() == [False, True, False, True, False, False]
        assert labels.best_grades.tolist() == [[2, 2, 1, *[0] * 7]]
        assert labels.top_grade == 2
        assert labels.rules.worst == -1.0
        assert labels.n_answerable == 1

    def test_unlabelled_is_worth_unjudged(self) -> None:
        assert self.of(utilities=Utilities(unjudged=-0.05)).utilities[0, 4] == -0.05

    @pytest.mark.parametrize(
        ("qrels", "distractors", "judged", "utilities"),
        [
            # Where labels hold relevant passages only, an unlabelled one is not relevant.
            ([{"p0": 1}], [], None, [[1.0, READERS.irrelevant]]),
            ([{"p0": 1}, None], [], None, [[1.0, READERS.irrelevant], [READERS.irrelevant] * 2]),
            # A distractor is a label of one that is not.
            (
                [{"p0": 1}, None],
                [{"p1": "distractor"}],
                [[True, True], [False, False]],
                [[1.0, READERS.distractor], [READERS.unjudged] * 2],
            ),
            # An empty list of relevant passages judges every candidate of its query.
            (
                [{"p0": 1}, {}],
                [],
                [[True, False], [True, True]],
                [[1.0, READERS.unjudged], [READERS.irrelevant] * 2],
            ),
        ],
    )
    def test_what_judges_the_unlabelled(
        self,
        qrels: list[dict[str, int] | None],
        distractors: list[dict[str, Any]],
        judged: list[list[bool]] | None,
        utilities: list[list[float]],
    ) -> None:
        names = [f"q{n}" for n in range(len(qrels))]
        pools = labelled([ranking_of([2.0, 1.0])] * len(qrels), [{"p0": 1}] * len(qrels), depth=2)
        graded = {name: own for name, own in zip(names, qrels, strict=True) if own is not None}
        kinds = dict(zip(names, distractors, strict=False))
        queries = tuple(Query(name, f"question {name[1:]}") for name in names)
        labels = label(pools, Dataset("d", queries, graded, kinds))
        assert labels.positives_only == (judged is None)
        assert labels.utilities.tolist() == utilities
        if judged is not None:
            assert labels.judged.tolist() == judged

    def test_recall_loss_is_against_baseline(self) -> None:
        assert np.flatnonzero(self.of().at_stake).tolist() == [0, 2]
        assert np.flatnonzero(self.of(baseline_k=2).at_stake).tolist() == [0]

    def test_irrelevant_baseline_leaves_it_undefined(self) -> None:
        pools = labelled([ranking_of([2.0, 1.0])], [{"p1": 1}], depth=2, baseline_k=1)
        assert not pools.at_stake.any()
        assert np.isnan(ratio_grid(pools).means[1]).all()

    def test_expected_relevant_equal_labelled(self) -> None:
        probabilities = np.array([[0.4, 0.3, 0.2, 0.1, 0.0, np.nan]])
        labels = replace(self.of(utilities=STRICT), probabilities=probabilities)
        relevant, worth = with_expected(labels, 1.0)
        assert relevant == pytest.approx(np.array([[0.8, 0.6, 0.4, 0.2, 0.0, 0.0]]))
        wrong, right = (-0.5 - 1.0 - 0.2) / 3, (1.0 + 0.5) / 2
        expected = [0.8 + 0.2 * wrong, 0.6 * right - 0.4 * 0.5, 0.4 * 0.5 + 0.6 * wrong]
        assert worth[0, :3] == pytest.approx(expected)
        assert worth[0, 3:] == pytest.approx([0.2 * right - 0.8, -0.2, 0.0])
        half, _ = with_expected(labels, 0.5)
        assert half == pytest.approx((relevant + labels.relevant) / 2)
        none, as_labelled = with_expected(labels, 0.0)
        assert none.tolist() == labels.relevant.tolist()
        assert as_labelled.tolist() == labels.utilities.tolist()

    def test_no_relevant_labels_calibrate_nothing(self) -> None:
        with pytest.raises(CalibrationError, match="no passage is labelled relevant"):
            labelled([ranking_of([1.0])], [{"p0": 0}])
