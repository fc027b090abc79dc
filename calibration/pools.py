"""Holds the candidates of labelled queries on one route, as padded tables.

Pure. A table has shape (n_q, depth), best candidates first, and NaN beyond the end of a pool.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from ctxguard.core.passages import TOKENS
from ctxguard.core.scores import is_opposed
from ctxguard.core.types import FloatArray, Hit, Leg, Passage, PassagesBy, Ranking, Route, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.measure.metrics import NDCG_CUTOFF
from ctxguard.measure.rows import BoolArray, IntArray
from ctxguard.measure.worth import READERS, Negative, Utilities

_BY_QUERY = frozenset(
    {
        *("query_ids", "passage_ids", "scores", "legs", "tokens", "signals", "copies", "documents"),
        *("grades", "judged", "utilities", "misleading", "in_baseline", "probabilities"),
        *("best_grades", "n_relevant", "groups"),
    }
)
"""The fields with one entry for each query."""


@dataclass(frozen=True)
class Pools:
    """The candidates of every query on one route.

    Attributes:
        route: The stages that answered.
        kind: The meaning of ``scores``.
        query_ids: Length n_q.
        passage_ids: Length n_q, each as long as that query's pool.
        scores: A table.
        legs: Tables of each stage's own scores, NaN where absent.
        leg_kinds: The meaning of each leg's scores.
        skipped: Queries left out, with the reason, such as another route than most.
        tokens: A table of each passage's estimated tokens (``passage_tokens``), NaN where a text
            cannot be read. None if no texts were at hand.
        copies: For each query, by a candidate's place, the other passages with its text, retrieved
            below it or named by labels alone. They are not candidates: a guard serves one of them
            in the place of all.
        documents: For each query, by the place of a document's best-ranked chunk, the document;
            several where chunks are copies.
        same: Maps passages and documents that share a text to one of them.
        signals: Tables of the named signals that every candidate has.
        notes: Signals left out because a candidate lacks them, one line each.
        themselves: Queries that are a passage, which is left out of their candidates.
    """

    route: Route
    kind: ScoreKind
    query_ids: tuple[str, ...]
    passage_ids: tuple[tuple[str, ...], ...]
    scores: FloatArray
    legs: Mapping[str, FloatArray]
    leg_kinds: Mapping[str, ScoreKind]
    skipped: tuple[str, ...] = ()
    tokens: FloatArray | None = None
    copies: tuple[Mapping[int, tuple[str, ...]], ...] = ()
    documents: tuple[Mapping[int, tuple[str, ...]], ...] = ()
    same: Mapping[str, str] = field(default_factory=dict)
    signals: Mapping[str, FloatArray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    themselves: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.query_ids)

    @cached_property
    def lengths(self) -> IntArray:
        """The number of candidates of each query, shape (n_q,)."""
        return np.fromiter(map(len, self.passage_ids), np.int64, len(self))

    @cached_property
    def retrieved(self) -> BoolArray:
        """A table that is False beyond the end of a pool."""
        return ~np.isnan(self.scores)

    @property
    def sizes(self) -> FloatArray:
        """A table of each candidate's tokens: 1 if no texts were at hand, 0 beyond the pool."""
        return np.nan_to_num(self.retrieved * 1.0 if self.tokens is None else self.tokens)

    def labelled_ids(self, row: int, labelled: Container[str]) -> list[tuple[str, ...]]:
        """Return, for each candidate of a query, the ids by which labels may name it.

        They are its own id and those of its copies. If none of these is labelled, a document's
        label goes to its best-ranked chunk, so that a document counts once.
        """
        copies = self.copies[row] if self.copies else {}
        documents = self.documents[row] if self.documents else {}
        found = []
        for at, name in enumerate(self.passage_ids[row]):
            own = [each for each in (name, *copies.get(at, ())) if each in labelled]
            found.append(tuple(own or [each for each in documents.get(at, ()) if each in labelled]))
        return found

    def subset(self, query_ids: Iterable[str]) -> Self:
        """Return the pools of these queries, in this order, without those that were skipped."""
        where = {query_id: row for row, query_id in enumerate(self.query_ids)}
        return self.rows([where[query_id] for query_id in query_ids if query_id in where])

    def rows(self, rows: Sequence[int] | IntArray) -> Self:
        """Return the pools of the queries at these places."""
        names = [each.name for each in fields(self) if each.name in _BY_QUERY]
        return replace(self, **{name: _of_rows(getattr(self, name), rows) for name in names})

    def rankings(self) -> Iterator[Ranking]:
        """Yield each pool as the recorded ranking, without its texts.

        Ranks are those of the pool, so that ties keep the recorded order.
        """
        for row, ids in enumerate(self.passage_ids):
            n = len(ids)
            signals = {name: values[row, :n] for name, values in self.signals.items()}
            if self.tokens is not None:
                # A text that cannot be read is dropped when the context is assembled.
                signals[TOKENS] = np.nan_to_num(self.tokens[row, :n])
            yield Ranking(
                passage_ids=ids,
                scores=tuple(self.scores[row, :n].tolist()),
                kind=self.kind,
                passages=PassagesBy(partial(_textless, ids)),
                route=self.route,
                ranks=range(1, n + 1),
                legs={
                    name: Leg(scores[row, :n], self.leg_kinds[name])
                    for name, scores in self.legs.items()
                },
                signals=signals,
                contradicted=bool(self._contradicted[row]),
            )

    @cached_property
    def _contradicted(self) -> BoolArray:
        """Whether the order of each pool contradicts its scores, shape (n_q,)."""
        found = np.zeros(len(self), np.bool_)
        for row in np.flatnonzero((np.diff(self.scores, axis=1) > 0.0).any(axis=1)):
            found[row] = is_opposed(self.scores[row, : self.lengths[row]].tolist())
        return found

    def run(self) -> dict[str, tuple[Hit, ...]]:
        """Return the pools as a TREC run: candidates by query id, best first, without copies."""
        columns = zip(self.query_ids, self.passage_ids, self.scores.tolist(), strict=True)
        return {
            query_id: tuple([Hit(ids[at], scores[at], rank=at + 1) for at in range(len(ids))])
            for query_id, ids, scores in columns
        }


def _of_rows(values: Any, rows: Sequence[int] | IntArray) -> Any:
    if isinstance(values, Mapping):
        return {name: table[rows] for name, table in values.items()}
    if isinstance(values, tuple):
        return values and tuple(map(values.__getitem__, rows))
    return None if values is None else values[rows]


def _textless(ids: Sequence[str], position: int) -> Passage:
    return Passage(ids[position], "")


@dataclass(frozen=True, kw_only=True)
class LabelledPools(Pools):
    """Candidates with their labels.

    Attributes:
        grades: A table; 0 if not relevant, not judged, or beyond the pool.
        judged: A table, whether a label exists; true of every candidate of a query that no
            passage answers.
        utilities: A table of each candidate's strict utility; 0 beyond the pool.
        misleading: A table, whether a candidate is labelled hard negative or distractor, and not
            relevant.
        in_baseline: A table, whether the baseline of recall loss serves a candidate; the baseline
            is the whole pool, or the retriever's own first few.
        best_grades: Shape (n_q, 10), the highest grades that the labels hold for each query, in the
            pool or not; 0 beyond.
        n_relevant: Shape (n_q,), how many passages are relevant to each, in the pool or not.
        groups: Shape (n_q,), the name of each query's group of nearly equal questions.
        top_grade: The highest grade of the collection.
        rules: The worth of each label.
        positives_only: Whether the labels hold relevant passages only; an unlabelled one then
            counts as not relevant, otherwise as not judged.
        probabilities: A table of P(relevant), by models that did not see the query's labels; None
            without a model.
    """

    grades: IntArray
    judged: BoolArray
    utilities: FloatArray
    misleading: BoolArray
    in_baseline: BoolArray
    best_grades: IntArray
    n_relevant: IntArray
    groups: NDArray[np.str_]
    top_grade: int
    rules: Utilities
    positives_only: bool
    probabilities: FloatArray | None = None

    @cached_property
    def relevant(self) -> BoolArray:
        """A table of which candidates are labelled relevant."""
        return self.grades > 0

    @cached_property
    def at_stake(self) -> BoolArray:
        """A table of the relevant candidates that the baseline serves."""
        return self.relevant & self.in_baseline

    @property
    def n_answerable(self) -> int:
        """The number of queries with a relevant passage, in the pool or not."""
        return int((self.n_relevant > 0).sum())


def label(
    pools: Pools, dataset: Dataset, utilities: Utilities = READERS, *, baseline_k: int | None = None
) -> LabelledPools:
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
    grades, judged = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    worth, misleading = np.zeros(shape), np.zeros(shape, np.bool_)
    best_grades, n_relevant = np.zeros((len(pools), NDCG_CUTOFF), np.int64), []
    for row, query_id in enumerate(pools.query_ids):
        graded = dataset.qrels.get(query_id)
        qrels, kinds = graded or {}, dataset.distractors.get(query_id, {})
        ids = pools.labelled_ids(row, qrels.keys() | kinds.keys())
        # An empty entry says that no passage answers the query.
        judged[row, : len(ids)] = is_judged = graded == {}
        worth[row, : len(ids)] = utilities.of(
            0, top_grade=top_grade, is_judged=is_judged or dataset.positives_only
        )
        for column, names in enumerate(ids):
            if names:
                judged[row, column] = True
                grades[row, column] = grade = max(0, *[qrels.get(name, 0) for name in names])
                misleads = [Negative(kinds[name]) for name in names if name in kinds]
                misleading[row, column] = bool(misleads) and not grade
                negative = misleads[0] if misleads else None
                worth[row, column] = utilities.of(grade, top_grade=top_grade, negative=negative)
        of_text: dict[str, int] = {}
        for name, grade in qrels.items():
            text = pools.same.get(name, name)
            of_text[text] = max(of_text.get(text, 0), grade)
        relevant = sorted((grade for grade in of_text.values() if grade > 0), reverse=True)
        n_relevant.append(len(relevant))
        best_grades[row, : len(relevant)] = relevant[:NDCG_CUTOFF]
    most = shape[1] if baseline_k is None else baseline_k
    return LabelledPools(
        **{each.name: getattr(pools, each.name) for each in fields(Pools)},
        grades=grades,
        judged=judged,
        utilities=worth,
        misleading=misleading,
        in_baseline=pools.retrieved & (np.arange(shape[1]) < most),
        best_grades=best_grades,
        n_relevant=np.array(n_relevant, dtype=np.int64),
        groups=np.array([dataset.groups[query_id] for query_id in pools.query_ids], dtype=np.str_),
        top_grade=top_grade,
        rules=utilities,
        positives_only=dataset.positives_only,
    )


def unlabelled_note(dataset: Dataset, utilities: Utilities) -> str:
    """A line that says how the figures count a passage without a label."""
    if dataset.positives_only:
        return (
            "the labels hold only relevant passages, so a passage without a label counts as not "
            f"relevant (utility {utilities.irrelevant:g}): precision is at least what is shown, "
            "and harm at most"
        )
    unjudged, irrelevant = utilities.unjudged, utilities.of(0, top_grade=1)
    worth = (
        f"as much as one labelled not relevant, {irrelevant:g}"
        if unjudged == irrelevant
        else f"{unjudged:g} (unjudged), one labelled not relevant {irrelevant:g}"
    )
    return (
        f"a passage without a label is worth {worth}; recall and precision count it as not "
        "relevant, precision_judged leaves it out"
    )


def check_labels_are_found(pools: Pools, dataset: Dataset) -> None:
    """Refuse labels if the retriever returned none of the labelled passages for any query.

    Raises:
        CalibrationError: no candidate of any query is a passage that is labelled relevant.
    """
    relevant = {one for grades in dataset.qrels.values() for one, grade in grades.items() if grade}
    retrieved = [one for ids in pools.passage_ids for one in ids]
    others = (
        names for rows in (pools.copies, pools.documents) for own in rows for names in own.values()
    )
    if relevant and retrieved and relevant.isdisjoint(chain(retrieved, *others)):
        raise CalibrationError(
            f"{dataset.name}: none of the {len(relevant):,} relevant passages, such as "
            f"{min(relevant)!r}, is among the {len(retrieved):,} candidates, such as "
            f"{retrieved[0]!r}; give labels made for the corpus that the retriever searches, with "
            "the same ids"
        )


def notes_on_themselves(several: Iterable[Pools]) -> tuple[str, ...]:
    """Say once that queries are also passages, and are left out of their own candidates."""
    names = list(dict.fromkeys(name for pools in several for name in pools.themselves))
    if not names:
        return ()
    note = (
        "questions that are passages themselves, left out of their own candidates as BEIR does: "
        f"{len(names):,}, such as {names[0]!r}"
    )
    return (note,)
