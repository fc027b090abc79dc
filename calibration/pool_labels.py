"""The labels of every replayed candidate, as arrays beside its scores."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from calibration.replay import Pools
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.metrics import NDCG_CUTOFF
from ctxguard.measure.worth import READERS, Negative, Utilities, worths

IntArray = NDArray[np.int64]

_BY_CANDIDATE = ("grades", "retrieved", "judged", "utilities", "misleading", "in_baseline")
"""The fields of `PoolLabels` of shape (n_q, depth)."""

_BY_QUERY = (*_BY_CANDIDATE, "best_grades", "n_relevant", "groups")


@dataclass(frozen=True)
class PoolLabels:
    """Labels of the candidates of a replay, row by row as in the pools.

    Attributes:
        grades: Shape (n_q, depth); 0 if not relevant, not judged, or beyond the pool.
        retrieved: Shape (n_q, depth), False beyond the end of a query's pool.
        judged: Shape (n_q, depth), whether a label exists; true of every candidate of a query that
            no passage answers.
        utilities: Shape (n_q, depth), the strict utility of each candidate; 0 beyond the pool.
        misleading: Shape (n_q, depth), whether it is labelled hard negative or distractor, and not
            relevant.
        in_baseline: Shape (n_q, depth), whether the baseline of recall loss serves the
            candidate; the baseline is the whole pool, or the retriever's own first few.
        best_grades: Shape (n_q, 10), the highest grades that the labels hold for each query, in the
            pool or not; 0 beyond.
        n_relevant: Shape (n_q,), how many passages are relevant to each, in the pool or not.
        top_grade: The highest grade of the collection.
        rules: The worth of each label.
        positives_only: Whether the labels hold relevant passages only; an unlabelled one then
            counts as not relevant, otherwise as not judged.
        groups: Shape (n_q,), the name of each query's group of nearly equal questions.
    """

    grades: IntArray
    retrieved: NDArray[np.bool_]
    judged: NDArray[np.bool_]
    utilities: FloatArray
    misleading: NDArray[np.bool_]
    in_baseline: NDArray[np.bool_]
    best_grades: IntArray
    n_relevant: IntArray
    top_grade: int
    rules: Utilities
    positives_only: bool
    groups: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def relevant(self) -> NDArray[np.bool_]:
        """Shape (n_q, depth)."""
        return self.grades > 0

    @cached_property
    def at_stake(self) -> NDArray[np.bool_]:
        """Which relevant candidates the baseline serves, shape (n_q, depth)."""
        return self.relevant & self.in_baseline

    @property
    def n_answerable(self) -> int:
        """Queries with a relevant passage, in the pool or not."""
        return int((self.n_relevant > 0).sum())

    def rows(self, rows: IntArray) -> "PoolLabels":
        """Return the labels of these queries."""
        tables: dict[str, Any] = {name: getattr(self, name)[rows] for name in _BY_QUERY}
        return replace(self, **tables)

    def reordered(self, order: IntArray) -> "PoolLabels":
        """Return the labels with candidates in another order: shape (n_q, depth), of columns."""
        tables: dict[str, Any] = {
            name: np.take_along_axis(getattr(self, name), order, axis=1) for name in _BY_CANDIDATE
        }
        return replace(self, **tables)


def label(
    pools: Pools,
    dataset: Dataset,
    utilities: Utilities = READERS,
    *,
    baseline_k: int | None = None,
) -> PoolLabels:
    """Look up the labels of every candidate.

    Args:
        baseline_k: Recall loss is relative to the retriever's first ``baseline_k`` passages;
            None for the whole pool.

    Raises:
        CalibrationError: the labels hold no relevant passage at all.
    """
    top_grade = dataset.max_grade
    if top_grade is None or top_grade < 1:
        raise CalibrationError(
            f"{dataset.name}: no passage is labelled relevant, so nothing can be calibrated"
        )
    shape = pools.scores.shape
    grades = np.zeros(shape, dtype=np.int64)
    judged = np.zeros(shape, dtype=bool)
    worth = np.zeros(shape)
    misleading = np.zeros(shape, dtype=bool)
    best_grades, n_relevant = np.zeros((len(pools), NDCG_CUTOFF), np.int64), []
    for row, query_id in enumerate(pools.query_ids):
        graded = dataset.qrels.get(query_id)
        qrels, kinds = graded or {}, dataset.distractors.get(query_id, {})
        labelled = qrels.keys() | kinds.keys()
        ids = pools.labelled_ids(row, labelled)
        negatives: list[Negative | None] = [None] * len(ids)
        # An empty entry says that no passage answers the query.
        judged[row, : len(ids)] = graded == {}
        for column, names in enumerate(ids):
            if names:
                judged[row, column] = True
                grades[row, column] = grade = max(0, *[qrels.get(name, 0) for name in names])
                misleads = [kinds[name] for name in names if name in kinds]
                if misleads and not grade:
                    misleading[row, column], negatives[column] = True, Negative(misleads[0])
        worth[row, : len(ids)] = worths(
            grades[row, : len(ids)].tolist(),
            top_grade=top_grade,
            negatives=negatives,
            judged=None if dataset.positives_only else judged[row, : len(ids)].tolist(),
            utilities=utilities,
        )
        of_text: dict[str, int] = {}
        for name, grade in qrels.items():
            text = pools.same.get(name, name)
            of_text[text] = max(of_text.get(text, 0), grade)
        relevant = sorted((grade for grade in of_text.values() if grade > 0), reverse=True)
        n_relevant.append(len(relevant))
        best_grades[row, : len(relevant)] = relevant[:NDCG_CUTOFF]
    retrieved = ~np.isnan(pools.scores)
    most = shape[1] if baseline_k is None else baseline_k
    return PoolLabels(
        grades=grades,
        retrieved=retrieved,
        judged=judged,
        utilities=worth,
        misleading=misleading,
        in_baseline=retrieved & (np.arange(shape[1]) < most),
        best_grades=best_grades,
        n_relevant=np.array(n_relevant, dtype=np.int64),
        top_grade=top_grade,
        rules=utilities,
        positives_only=dataset.positives_only,
        groups=np.array([dataset.groups[query_id] for query_id in pools.query_ids], dtype=np.str_),
    )


def unlabelled_note(dataset: Dataset, utilities: Utilities) -> str:
    """Says in one line how the figures count a passage without a label."""
    if dataset.positives_only:
        return (
            "the labels hold relevant passages only, so a passage without one counts as not "
            f"relevant (utility {utilities.irrelevant:g}): precision is at least what is shown, "
            "and harm at most"
        )
    unjudged, irrelevant = (
        utilities.unjudged,
        (utilities.by_grade or {}).get(0, utilities.irrelevant),
    )
    worth = (
        f"as much as one labelled not relevant, {irrelevant:g}"
        if unjudged == irrelevant
        else f"{unjudged:g} (unjudged), one labelled not relevant {irrelevant:g}"
    )
    return (
        f"a passage without a label is worth {worth}; recall and precision count it as not "
        "relevant, precision_judged leaves it out"
    )
