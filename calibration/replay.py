"""Replay every labelled query through a retriever once, and keep its candidates as columns.

Later steps read these pools, never the retriever.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset, Query
from calibration.retrievers import MultiRoute, RankingSource, wrapped
from ctxguard._support.extras import require
from ctxguard.core.columns import SignalColumn, with_columns
from ctxguard.core.decision import candidate_order
from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.tokens import TOKENS, estimate_tokens
from ctxguard.core.types import (
    DEFAULT_DEPTH,
    Flag,
    FloatArray,
    Hit,
    Leg,
    Passage,
    PassagesBy,
    Ranking,
    Route,
    ScoreKind,
)
from ctxguard.core.value_of_information import ANSWER
from ctxguard.errors import CalibrationError, ConfigurationError, CtxguardError, QueryError
from ctxguard.retrieval.chunks import document_of, is_chunk_id

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever

Progress = Callable[[int], None]

_NO_SCORES = (
    "no candidate has a score that is a number; if the retriever gives none, say that its score "
    "kind is rank"
)


@dataclass(frozen=True)
class Pools:
    """The candidates of every query on one route, best first, as padded columns.

    Attributes:
        route: The stages that answered.
        kind: The meaning of ``scores``.
        query_ids: Length n_q.
        passage_ids: Length n_q, each as long as that query's pool.
        scores: Shape (n_q, depth), NaN beyond a pool's end.
        legs: Each stage's own scores, shape (n_q, depth), NaN where absent.
        leg_kinds: The meaning of each leg's scores.
        tokens: Shape (n_q, depth), an estimate of each text's tokens (``estimate_tokens``); NaN
            beyond a pool's end and where a text cannot be read. None if no texts were at hand.
        skipped: Queries left out, with the reason: the retriever refused them, or answered on
            another route or with another kind of score than most.
        documents: As ``passage_ids``, with the document's id instead of its best-ranked chunk's;
            None where no passage is a chunk of a document.
        signals: Named signals that every candidate has, shape (n_q, depth), NaN beyond a pool's
            end.
        notes: Signals left out because a candidate lacks them, one line each.
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
    documents: tuple[tuple[str, ...], ...] | None = None
    signals: Mapping[str, FloatArray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.query_ids)

    @cached_property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Shape (n_q,): how many candidates each query has."""
        return np.fromiter(map(len, self.passage_ids), np.int64, len(self))

    def labelled_ids(self, row: int, labelled: Container[str]) -> tuple[str, ...]:
        """Return the ids by which labels may know a query's candidates, same length.

        A label of a document is one of its best-ranked chunk, so that a document counts once. Its
        other chunks have no label, unless they are labelled by their own ids.

        Args:
            row: The query's.
            labelled: The ids that have a label for it.
        """
        ids = self.passage_ids[row]
        if self.documents is None:
            return ids
        pairs = zip(ids, self.documents[row], strict=True)
        return tuple([own if own in labelled else document for own, document in pairs])

    def subset(self, query_ids: Sequence[str]) -> "Pools":
        """Return the pools of these queries, in this order, without those that were skipped."""
        where = {query_id: row for row, query_id in enumerate(self.query_ids)}
        return self.rows([where[query_id] for query_id in query_ids if query_id in where])

    def rows(self, rows: Sequence[int] | NDArray[np.int64]) -> "Pools":
        """Return the pools of the queries at these places."""
        return replace(
            self,
            query_ids=tuple(map(self.query_ids.__getitem__, rows)),
            passage_ids=tuple(map(self.passage_ids.__getitem__, rows)),
            scores=self.scores[rows],
            legs={name: scores[rows] for name, scores in self.legs.items()},
            tokens=None if self.tokens is None else self.tokens[rows],
            documents=self.documents and tuple(map(self.documents.__getitem__, rows)),
            signals={name: values[rows] for name, values in self.signals.items()},
        )

    def rankings(self, rows: Iterable[int] | None = None) -> Iterator[Ranking]:
        """Return each pool as the ranking that was recorded, without its texts.

        Ranks are those of the pool, so that ties keep the recorded order.

        Args:
            rows: The queries; all unless given.
        """
        for row in range(len(self)) if rows is None else rows:
            ids = self.passage_ids[row]
            n = len(ids)
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
                signals=self._signals_of(row, n),
            )

    def _signals_of(self, row: int, n: int) -> dict[str, FloatArray]:
        signals = {name: values[row, :n] for name, values in self.signals.items()}
        if self.tokens is not None:
            # A text that cannot be read is dropped when the context is assembled.
            signals[TOKENS] = np.nan_to_num(self.tokens[row, :n])
        return signals

    def run(self) -> dict[str, tuple[Hit, ...]]:
        """Write the pools as a TREC run: candidates by query id, best first."""
        columns = zip(self.query_ids, self.passage_ids, self.scores.tolist(), strict=True)
        return {
            query_id: tuple([Hit(ids[at], scores[at], rank=at + 1) for at in range(len(ids))])
            for query_id, ids, scores in columns
        }


def check_labels_are_found(pools: Pools, dataset: Dataset) -> None:
    """Refuse labels of passages that a retriever returned for no query.

    Raises:
        CalibrationError: no candidate of any query is a passage that is labelled relevant.
    """
    relevant = {one for grades in dataset.qrels.values() for one, grade in grades.items() if grade}
    retrieved = [one for ids in pools.passage_ids for one in ids]
    if relevant and retrieved and relevant.isdisjoint(retrieved):
        raise CalibrationError(
            f"{dataset.name}: none of the {len(relevant):,} relevant passages, first "
            f"{min(relevant)!r}, is among the {len(retrieved):,} candidates, first "
            f"{retrieved[0]!r}; give the labels of the corpus that the retriever searches, by the "
            "same ids"
        )


def _textless(ids: Sequence[str], position: int) -> Passage:
    return Passage(ids[position], "")


def encode_queries(
    retriever: MultiRoute, queries: Sequence[Query], progress: Progress
) -> dict[str, Any]:
    """Encode each query once, on one thread; return what the retriever takes by query id.

    The last bits of a vector depend on the number of threads; a profile must not.
    """
    vectors = {}
    if queries:
        with suppress(QueryError):
            retriever.encode_query(queries[0].text)  # loads the libraries to be limited
    with require("threadpoolctl", "calibrate").threadpool_limits(1):
        for query in queries:
            # If it is refused, the replay meets it again and records why.
            with suppress(QueryError):
                vectors[query.query_id] = retriever.encode_query(query.text)
            progress(1)
    return vectors


def replay(
    retriever: "AnyRetriever | RankingSource",
    queries: Sequence[Query],
    *,
    depth: int = DEFAULT_DEPTH,
    vectors: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    columns: Sequence[SignalColumn] = (),
) -> Pools:
    """Retrieve every query and keep its candidates in the order that ``decide`` sees.

    Args:
        retriever: The retriever that answers in production, on one route: anything that
            ``ContextGuard`` takes; a `RankingSource` says what plain hits' scores mean.
        queries: The labelled queries.
        depth: Candidates per query.
        vectors: Query vectors by query id, for a retriever that takes ``query_vector``.
        progress: Called with the number of queries done since the last call.
        columns: Columns of the passages' metadata that give signals.

    Raises:
        CalibrationError: no query could be replayed.
        ConfigurationError: the retriever is none, or returns neither a ranking nor hits.
    """
    if not queries:
        raise CalibrationError("there are no queries to replay")
    retriever = wrapped(retriever)
    answers: list[_Replayed] = []
    skipped: list[str] = []
    for query in queries:
        vector = None if vectors is None else vectors.get(query.query_id)
        try:
            ranking = retriever.retrieve(query.text, depth=depth, query_vector=vector)
            order, _, flag = candidate_order(ranking)
            if flag is Flag.INVALID_SCORES:
                raise QueryError(_NO_SCORES)
        except ConfigurationError:
            raise  # every query would meet it
        except CtxguardError as error:
            skipped.append(f"{query.query_id}: {error}")
        else:
            ranking = with_columns(ranking, columns, query.text)
            answers.append(_answer(query.query_id, ranking, list(order[:depth])))
        if progress is not None:
            progress(1)
    if not answers:
        raise CalibrationError(
            f"none of {len(queries)} queries could be replayed; the first: {skipped[0]}"
        )
    # A stage may be down for some queries. The commonest, not that of the first query.
    route, kind = Counter([each.answered for each in answers]).most_common(1)[0][0]
    own = [each for each in answers if each.answered == (route, kind)]
    skipped += [
        f"{each.query_id}: answered by {each.answered[0].value} with {each.answered[1].value} "
        f"scores, not {route.value} with {kind.value}"
        for each in answers
        if each.answered != (route, kind)
    ]
    found: dict[str, dict[str, FloatArray]] = {"": {}, "leg": {}, "signal": {}}
    for what, name in sorted(set(chain.from_iterable([each.columns for each in own]))):
        column = found[what][name] = np.full((len(own), depth), np.nan)
        for row, each in enumerate(own):
            values = each.columns.pop((what, name), ())
            column[row, : len(values)] = values
    passage_ids = tuple([each.passage_ids for each in own])
    documents = tuple([each.documents for each in own])
    signals, notes = _whole_signals(found["signal"], np.isnan(found[""]["scores"]))
    return Pools(
        route=route,
        kind=kind,
        query_ids=tuple([each.query_id for each in own]),
        passage_ids=passage_ids,
        scores=found[""]["scores"],
        legs=found["leg"],
        leg_kinds={name: leg for each in own for name, leg in each.leg_kinds.items()},
        skipped=tuple(skipped),
        tokens=found[""]["tokens"] if np.isfinite(found[""]["tokens"]).any() else None,
        documents=None if documents == passage_ids else documents,
        signals=signals,
        notes=notes,
    )


class _Replayed(NamedTuple):
    """A query's candidates, without their texts; a column has one value of each."""

    query_id: str
    answered: tuple[Route, ScoreKind]
    passage_ids: tuple[str, ...]
    documents: tuple[str, ...]
    leg_kinds: dict[str, ScoreKind]
    columns: dict[tuple[str, str], Any]


def _answer(query_id: str, ranking: Ranking, order: list[int]) -> _Replayed:
    # Of scores that carry order only, none is needed: the reciprocal rank stands for it.
    columns: dict[tuple[str, str], Any] = {
        ("", "scores"): [
            1.0 / rank if ranking.scores[position] is None else ranking.scores[position]
            for rank, position in enumerate(order, start=1)
        ],
        ("", "tokens"): _tokens(ranking, order),
    }
    columns |= {("leg", name): leg.scores[order] for name, leg in ranking.legs.items()}
    columns |= {
        ("signal", name): values[order]
        for name, values in ranking.signals.items()
        if name != TOKENS and not name.startswith(ANSWER)
    }
    return _Replayed(
        query_id,
        (ranking.route, ranking.kind),
        tuple([ranking.passage_ids[position] for position in order]),
        _documents(ranking, order),
        {name: leg.kind for name, leg in ranking.legs.items()},
        columns,
    )


def _whole_signals(
    signals: Mapping[str, FloatArray], beyond: NDArray[np.bool_]
) -> tuple[dict[str, FloatArray], tuple[str, ...]]:
    """Return the signals that every candidate has, and a line about each of the others.

    Args:
        signals: Shape (n_q, depth) each.
        beyond: Same shape, whether there is no candidate.

    Raises:
        ConfigurationError: a signal's name has a full stop, as only the names of its features do.
    """
    whole, notes = {}, []
    for name, values in signals.items():
        if "." in name or not name:
            raise ConfigurationError(
                f"the retriever gives a signal named {name!r}: a name must have no full stop, and "
                "at least one letter"
            )
        lacking = int((~(beyond | (np.abs(values) < INVALID_MAGNITUDE)).all(axis=1)).sum())
        if lacking:
            notes.append(
                f"signal {name!r} is left out: {lacking} of {len(values)} queries have a candidate "
                "without it"
            )
        else:
            whole[name] = values
    return whole, tuple(notes)


def _tokens(ranking: Ranking, order: Sequence[int]) -> list[float]:
    """Return the candidates' tokens; NaN if there is no text: anyone's code may be behind it."""
    if (known := ranking.signals.get(TOKENS)) is not None:
        own: list[float] = known[order].tolist()
        return own
    found = []
    for position in order:
        try:
            text = ranking.passages[position].text
            found.append(float(estimate_tokens(text)) if text else np.nan)
        except Exception:
            found.append(np.nan)
    return found


def _documents(ranking: Ranking, order: Sequence[int]) -> tuple[str, ...]:
    """Return the ids in an order, with a document's instead of that of its first chunk."""
    ids: list[str] = []
    seen: set[str] = set()
    for position in order:
        passage_id = ranking.passage_ids[position]
        # Only a chunk's passage is read: that of another id may have no text at hand.
        document = document_of(ranking.passages[position]) if is_chunk_id(passage_id) else None
        ids.append(passage_id if document is None or document in seen else document)
        if document is not None:
            seen.add(document)
    return tuple(ids)
