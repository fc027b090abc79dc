"""What every policy of a whole grid would cost, for all queries at once.

A policy keeps a prefix, so a candidate survives (k, threshold) when its rank is at most k and
its threshold at most that of every candidate before it. Counting candidates by (rank, highest
threshold survived) and summing that table along both axes gives the mean over queries of any
sum over kept passages, for every cell of the grid, in one pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.labelling.datasets import Dataset
from calibration.replay import Pools
from ctxguard.errors import CalibrationError
from ctxguard.metrics import DEFAULT_UTILITIES, Negative, Utilities, strict_utilities
from ctxguard.scores import is_relative, within_domain
from ctxguard.types import FloatArray, ScoreKind

IntArray = NDArray[np.int64]

_PROBABILITY_EDGE = 1e-9


@dataclass(frozen=True)
class Labels:
    """A replay's candidates with what the labels say of them, row by row as in the pools.

    Attributes:
        grades: Shape (n_q, depth), 0 where not relevant, not judged, or beyond the pool.
        judged: Shape (n_q, depth), whether a label exists at all.
        utilities: Shape (n_q, depth), the strict worth of each candidate; 0 beyond the pool.
        negatives: Shape (n_q, depth) as nested tuples: the label of known misleading passages.
        in_baseline: Shape (n_q, depth), candidates that the baseline of recall loss would have
            served: all of the pool, or the retriever's own first few.
        query_grades: Length n_q, all the grades that the labels hold for each query, in the
            pool or not.
        top_grade: The collection's highest grade.
        worst_utility: The least that any passage can be worth, ≤ 0.
    """

    grades: IntArray
    judged: NDArray[np.bool_]
    utilities: FloatArray
    negatives: tuple[tuple[Negative | None, ...], ...]
    in_baseline: NDArray[np.bool_]
    query_grades: tuple[tuple[int, ...], ...]
    top_grade: int
    worst_utility: float

    @property
    def relevant(self) -> NDArray[np.bool_]:
        """Shape (n_q, depth)."""
        return self.grades > 0

    @property
    def n_answerable(self) -> int:
        """Queries for which the labels know a relevant passage."""
        return sum(any(grade > 0 for grade in grades) for grades in self.query_grades)

    def rows(self, rows: IntArray) -> "Labels":
        """The labels of these queries."""
        return Labels(
            self.grades[rows],
            self.judged[rows],
            self.utilities[rows],
            tuple(self.negatives[row] for row in rows),
            self.in_baseline[rows],
            tuple(self.query_grades[row] for row in rows),
            self.top_grade,
            self.worst_utility,
        )

    def reordered(self, order: IntArray) -> "Labels":
        """The labels of the same candidates in another order, shape (n_q, depth) of columns."""
        return Labels(
            np.take_along_axis(self.grades, order, axis=1),
            np.take_along_axis(self.judged, order, axis=1),
            np.take_along_axis(self.utilities, order, axis=1),
            tuple(
                tuple(row[column] if column < len(row) else None for column in columns)
                for row, columns in zip(self.negatives, order.tolist(), strict=True)
            ),
            np.take_along_axis(self.in_baseline, order, axis=1),
            self.query_grades,
            self.top_grade,
            self.worst_utility,
        )

    def recall_shares(self) -> tuple[FloatArray, NDArray[np.bool_]]:
        """What dropping each candidate adds to its query's recall loss.

        Returns:
            Shape (n_q, depth), rows summing to 1 where the baseline serves a relevant passage;
            and shape (n_q,), whether it does: elsewhere recall loss is undefined.
        """
        counted = self.relevant & self.in_baseline
        totals = counted.sum(axis=1)
        return counted / np.maximum(totals, 1)[:, None], totals > 0


def label(
    pools: Pools,
    dataset: Dataset,
    utilities: Utilities = DEFAULT_UTILITIES,
    *,
    baseline_k: int | None = None,
) -> Labels:
    """Look the labels of every candidate up.

    Args:
        pools: The replay of one route.
        dataset: The labels.
        utilities: What a passage is worth.
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
    negatives, query_grades = [], []
    for row, (query_id, ids) in enumerate(zip(pools.query_ids, pools.passage_ids, strict=True)):
        qrels = dataset.qrels.get(query_id, {})
        misleading = dataset.distractors.get(query_id, {})
        row_grades = [max(qrels.get(passage_id, 0), 0) for passage_id in ids]
        row_negatives = tuple(
            Negative(misleading[passage_id]) if passage_id in misleading else None
            for passage_id in ids
        )
        n = len(ids)
        grades[row, :n] = row_grades
        judged[row, :n] = [passage_id in qrels or passage_id in misleading for passage_id in ids]
        worth[row, :n] = strict_utilities(
            row_grades, top_grade=top_grade, negatives=row_negatives, utilities=utilities
        )
        query_grades.append(tuple(qrels.values()))
        negatives.append(row_negatives)
    in_baseline = ~np.isnan(pools.scores)
    if baseline_k is not None:
        in_baseline[:, baseline_k:] = False
    return Labels(
        grades,
        judged,
        worth,
        tuple(negatives),
        in_baseline,
        tuple(query_grades),
        top_grade,
        min(
            utilities.irrelevant,
            utilities.hard_negative,
            utilities.distractor,
            *(utilities.by_grade or {}).values(),
        ),
    )


@dataclass(frozen=True)
class Survival:
    """How far up a grid of thresholds each candidate survives.

    Attributes:
        ks: Shape (n_k,), ascending, ≥ 1.
        thresholds: Shape (n_t,), ascending.
        reach: Shape (n_q, depth): how many of ``thresholds`` keep the candidate, non-increasing
            along ranks; −1 beyond the pool.
    """

    ks: IntArray
    thresholds: FloatArray
    reach: IntArray

    @classmethod
    def of(
        cls,
        values: FloatArray,
        ks: Sequence[int],
        thresholds: FloatArray,
        *,
        min_keep: int = 1,
        always: NDArray[np.bool_] | None = None,
    ) -> "Survival":
        """Where each candidate stands on the grid.

        Args:
            values: Shape (n_q, depth), what a threshold is compared with (a relative score, a
                probability), non-increasing along ranks, NaN beyond the pool.
            ks: Sizes of context, ascending.
            thresholds: Ascending.
            min_keep: Candidates that every threshold keeps.
            always: Shape (n_q,): queries whose threshold does not apply.
        """
        absent = np.isnan(values)
        reach = np.searchsorted(thresholds, values.ravel(), side="right").reshape(values.shape)
        reach[:, :min_keep] = thresholds.size
        if always is not None:
            reach[always] = thresholds.size
        reach[absent] = -1
        return cls(np.asarray(ks, dtype=np.int64), thresholds, reach)

    def mean_of_sums(self, weights: FloatArray, n: int) -> FloatArray:
        """Mean over ``n`` queries of the sum of ``weights`` over kept passages, per grid cell.

        Args:
            weights: Shape (n_q, depth); queries outside the mean have weight 0 throughout.
            n: How many queries the mean is over, ≥ 1.

        Returns:
            Shape (n_k, n_t).
        """
        depth, n_thresholds = self.reach.shape[1], self.thresholds.size
        cells = (self.reach + 1) + np.arange(depth) * (n_thresholds + 2)
        table = np.bincount(
            cells.ravel(), weights=weights.ravel(), minlength=depth * (n_thresholds + 2)
        ).reshape(depth, n_thresholds + 2)
        # Column j holds reach j − 1; threshold t keeps what reaches t + 1 or further.
        kept = table[:, ::-1].cumsum(axis=1)[:, ::-1][:, 2:]
        sums: FloatArray = kept.cumsum(axis=0)[np.minimum(self.ks, depth) - 1] / n
        return sums

    def kept(self, cells: Sequence[tuple[int, int]]) -> IntArray:
        """How many passages each query keeps at some cells of the grid.

        Args:
            cells: (index into ks, index into thresholds) of each.

        Returns:
            Shape (n_q, n_cells).
        """
        counts = np.empty((self.reach.shape[0], len(cells)), dtype=np.int64)
        for column, (row_k, row_t) in enumerate(cells):
            survivors = (self.reach > row_t).sum(axis=1)
            counts[:, column] = np.minimum(survivors, self.ks[row_k])
        return counts


def relative_values(pools: Pools, temperature: float) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Relative scores of every pool, and which pools lie outside their kind's domain.

    Returns:
        Shape (n_q, depth), NaN beyond each pool's end, equal to ``scores.relative_score``; and
        shape (n_q,), true where ``decide`` would skip the relative filter: there every relative
        score is 1, since none is defined.
    """
    scores, kind = pools.scores, pools.kind
    if not is_relative(kind):
        return np.where(np.isnan(scores), np.nan, 1.0), np.ones(len(pools), dtype=bool)
    top = scores[:, :1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if kind is ScoreKind.RATIO:
            relative = (scores / top) ** (1.0 / temperature) if temperature != 1 else scores / top
        elif kind is ScoreKind.PROBABILITY:
            clipped = np.clip(scores, _PROBABILITY_EDGE, 1.0 - _PROBABILITY_EDGE)
            logits = np.log(clipped / (1.0 - clipped))
            relative = np.exp((logits - logits[:, :1]) / temperature)
        else:
            relative = np.exp((scores - top) / temperature)
    outside = np.array(
        [
            n > 0 and not within_domain(kind, float(row[n - 1]), float(row[0]))
            for row, n in zip(scores, pools.lengths, strict=True)
        ],
        dtype=bool,
    )
    relative = np.where((scores >= top) | outside[:, None], 1.0, relative)
    return np.where(np.isnan(scores), np.nan, relative), outside


def discounts(depth: int) -> FloatArray:
    """1 / log2(rank + 1) for ranks 1 … depth."""
    return 1.0 / np.log2(np.arange(2, depth + 2))


def grid_means(labels: Labels, survival: Survival) -> Mapping[str, FloatArray]:
    """Mean strict UDCG, its harm, recall loss and kept count for every cell of a grid.

    Recall loss is the share of the baseline's relevant passages that the policy drops, averaged
    over the queries whose baseline holds one; NaN throughout where none does.

    Returns:
        Shape (n_k, n_t) each: ``udcg_strict``, ``harm``, ``recall_loss``, ``kept``.

    Raises:
        CalibrationError: there are no queries.
    """
    n_queries, depth = labels.grades.shape
    if n_queries == 0:
        raise CalibrationError(
            "there is no query to choose on: the retriever answered none of them; see which "
            "queries were skipped, and why"
        )
    discounted = labels.utilities * discounts(depth)
    share, defined = labels.recall_shares()
    n_defined = int(defined.sum())
    recall = (
        survival.mean_of_sums(share, n_defined)
        if n_defined
        else np.full((survival.ks.size, survival.thresholds.size), np.nan)
    )
    return {
        "udcg_strict": survival.mean_of_sums(discounted, n_queries),
        "harm": survival.mean_of_sums(np.maximum(-discounted, 0.0), n_queries),
        "recall_loss": 1.0 - recall,
        "kept": survival.mean_of_sums((survival.reach >= 0).astype(float), n_queries),
    }


def losses_at(
    labels: Labels, survival: Survival, cells: Sequence[tuple[int, int]]
) -> tuple[FloatArray, FloatArray]:
    """Recall loss and harm of every query at some cells of a grid.

    Returns:
        Shape (n_q, n_cells) each; recall loss is NaN for queries on which it is undefined.
    """
    kept = survival.kept(cells)
    share, defined = labels.recall_shares()
    recall = np.take_along_axis(_running(share), kept, axis=1)
    recall_loss = np.where(defined[:, None], np.clip(1.0 - recall, 0.0, 1.0), np.nan)
    harms = np.maximum(-labels.utilities * discounts(labels.grades.shape[1]), 0.0)
    return recall_loss, np.take_along_axis(_running(harms), kept, axis=1)


def _running(values: FloatArray) -> FloatArray:
    """Sums of the first 0, 1, … columns, shape (n_q, depth + 1)."""
    return np.concatenate([np.zeros((values.shape[0], 1)), values.cumsum(axis=1)], axis=1)
