"""Replays every labelled query through a retriever once, and keeps its candidates as columns.

Calls the retriever; later steps read these pools alone. `encode_queries` keeps native libraries to
one thread meanwhile, and needs the extra `calibrate`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibration.data.dataset import Dataset, Query, named_passages
from calibration.pools import Pools
from calibration.retrievers import MultiRoute, RankingSource, wrapped
from ctxguard._support.extras import require
from ctxguard.core.columns import SignalColumn, with_columns
from ctxguard.core.decision import candidate_order
from ctxguard.core.passages import TOKENS, copies_of, passage_tokens, read_passages, text_key
from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.types import DEFAULT_DEPTH, Flag, FloatArray, Passage, Ranking, Route, ScoreKind
from ctxguard.core.value_of_information import ANSWER
from ctxguard.errors import CalibrationError, ConfigurationError, CtxguardError, QueryError
from ctxguard.measure.rows import BoolArray
from ctxguard.retrieval.index.passages import PassageLines, chunk_id, document_of, is_chunk_id

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever

Progress = Callable[[int], None]
"""Called with the number of queries done since the last call."""
Passes = Callable[[str, int], Progress]
"""Called with the name and size of each pass over the queries; returns its progress callback."""
PassageOf = Callable[[str], Passage]
"""Returns a passage by its id, or raises KeyError."""

_NO_SCORES = (
    "no candidate has a score that is a number; if the retriever gives no scores, set its score "
    "kind to rank"
)


def silent(_name: str, _total: int) -> Progress:
    """Begin a pass that reports nothing."""
    return lambda _done: None


def encode_queries(
    retriever: MultiRoute, queries: Sequence[Query], progress: Progress
) -> dict[str, Any]:
    """Encode each query once, on one thread; return the encodings by query id.

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
    labels: Dataset | None = None,
    readings: "Readings | None" = None,
) -> Pools:
    """Retrieve every query and keep its candidates in the order that ``decide`` sees.

    Of candidates with the same text the first stays, as in a guard.

    Args:
        retriever: The retriever that answers in production, on one route: anything that
            ``ContextGuard`` takes; a `RankingSource` says what plain hits' scores mean.
        vectors: Query vectors by query id, for a retriever that takes ``query_vector``.
        progress: Called with the number of queries done since the last call.
        columns: Columns of the passages' metadata that give signals.
        labels: The labels of the queries. The texts of passages that they name and no query finds
            are looked up, where the retriever has a method ``passage``, so that their copies are
            known; and a query that is a passage itself, as in ArguAna, is left out of its own
            candidates, unless it is labelled relevant.
        readings: Passages that other replays over the same index have read.

    Raises:
        CalibrationError: no query could be replayed.
        ConfigurationError: it is not a retriever, it returns neither a ranking nor hits, or the
            order of most lists contradicts their scores.
    """
    if not queries:
        raise CalibrationError("there are no queries to replay")
    retriever = wrapped(retriever)
    read = Readings() if readings is None else readings
    answers: list[_Replayed] = []
    skipped: list[str] = []
    themselves: list[str] = []
    for query in queries:
        vector = None if vectors is None else vectors.get(query.query_id)
        try:
            ranking = retriever.retrieve(query.text, depth=depth, query_vector=vector)
            order, _, flag = candidate_order(ranking)
            if flag is Flag.INVALID_SCORES:
                raise QueryError(_NO_SCORES)
        except ConfigurationError:
            raise  # every query would fail the same way
        except CtxguardError as error:
            skipped.append(f"{query.query_id}: {error}")
        else:
            if columns:
                ranking = with_columns(ranking, columns, query.text)
            passages = read.of(ranking, order[:depth], retriever.passage)
            others = _without_itself(query, labels, ranking, order[:depth], passages)
            themselves += [query.query_id] * (len(others) < len(order[:depth]))
            answers.append(_answer(query.query_id, ranking, others, passages, read))
        if progress is not None:
            progress(1)
    retriever.check_directions()
    if not answers:
        raise CalibrationError(
            f"none of {len(queries)} queries could be replayed; the first: {skipped[0]}"
        )
    # A stage may be down for some queries: take the commonest route, not the first query's.
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
    read.look_up(named_passages(labels) if labels else (), retriever.passage)
    same = read.same()
    members: dict[str, list[str]] = {}
    for name, first in same.items():
        members.setdefault(first, []).append(name)
    copies, documents = zip(
        *[_names(each, same, members, read.document_of) for each in own], strict=True
    )
    signals, notes = _whole_signals(found["signal"], np.isnan(found[""]["scores"]))
    return Pools(
        route=route,
        kind=kind,
        query_ids=tuple([each.query_id for each in own]),
        passage_ids=tuple([each.passage_ids for each in own]),
        scores=found[""]["scores"],
        legs=found["leg"],
        leg_kinds={name: leg for each in own for name, leg in each.leg_kinds.items()},
        skipped=tuple(skipped),
        tokens=found[""]["tokens"] if np.isfinite(found[""]["tokens"]).any() else None,
        copies=copies if any(copies) else (),
        documents=documents if any(documents) else (),
        same=same,
        themselves=tuple(themselves),
        signals=signals,
        notes=notes,
    )


class _Replayed(NamedTuple):
    """A query's candidates, without their texts; a column holds one value per candidate.

    ``copies`` has the ids of retrieved candidates that repeat a better one, by its place.
    """

    query_id: str
    answered: tuple[Route, ScoreKind]
    passage_ids: tuple[str, ...]
    copies: dict[int, list[str]]
    leg_kinds: dict[str, ScoreKind]
    columns: dict[tuple[str, str], Any]


class Readings:
    """The passages read for all queries and routes, and which of them have equal texts.

    A guard serves one of equal passages in place of all, so a label of any of them applies to the
    one retrieved, and together they count as one relevant passage. Passages of an index are read
    once, those of another retriever for every query: its texts may depend on the query.

    Attributes:
        document_of: The documents of passages that are chunks, by the chunks' ids.
    """

    def __init__(self) -> None:
        self._passages: dict[str, Passage] = {}
        self._tokens: dict[int, float] = {}
        self._keys: dict[str, bytes | None] = {}
        self._chunks: dict[str, list[str]] = {}
        self.document_of: dict[str, str] = {}

    def of(
        self, ranking: Ranking, candidates: Sequence[int], passage_of: PassageOf
    ) -> dict[int, Passage]:
        """Return the candidates' passages by position, except those that have no text."""
        ids = ranking.passage_ids
        known = self._passages if isinstance(ranking.passages, PassageLines) else {}
        missing = [position for position in candidates if ids[position] not in known]
        for position, passage in _readable(ranking, missing, passage_of).items():
            known[ids[position]] = passage
        return {position: known[ids[position]] for position in candidates if ids[position] in known}

    def tokens(self, passage: Passage) -> float:
        """Estimate a passage's tokens; those with the same title and text are counted once."""
        key = hash((passage.title, passage.text))
        found = self._tokens.get(key)
        if found is None:
            found = self._tokens[key] = float(passage_tokens(passage))
        return found

    def add(self, passage: Passage) -> None:
        """Note a passage; the first text seen for an id is kept."""
        name = passage.passage_id
        if name in self._keys:
            return
        self._keys[name] = text_key(passage.text)
        document = document_of(passage) if is_chunk_id(name) else None
        if document is not None:
            self.document_of[name] = document

    def key(self, passage_id: str) -> bytes | None:
        """Return the digest of a passage's text; None if the text is unknown or has no word."""
        return self._keys.get(passage_id)

    def look_up(self, labelled: Iterable[str], passage_of: PassageOf) -> None:
        """Note the passages and documents that labels name, as far as they can be looked up."""
        for name in sorted(labelled):
            if not self._is_known(name, passage_of):
                chunks = [*self._chunks_of(name, passage_of)]
                if chunks:
                    self._chunks[name] = chunks

    def same(self) -> dict[str, str]:
        """Map the ids of passages, and of documents, with the same text to the first of them."""
        by_text: dict[object, list[str]] = {}
        for name, key in self._keys.items():
            if key is not None:
                by_text.setdefault(key, []).append(name)
        for document, chunks in self._chunks.items():
            by_text.setdefault(tuple(map(self.key, chunks)), []).append(document)
        several = [names for names in by_text.values() if len(names) > 1]
        return {name: min(names) for names in several for name in names}

    def _chunks_of(self, document: str, passage_of: PassageOf) -> Iterator[str]:
        for number in count(1):
            name = chunk_id(document, number)
            self._is_known(name, passage_of)
            if self.document_of.get(name) != document:
                return
            yield name

    def _is_known(self, name: str, passage_of: PassageOf) -> bool:
        if name not in self._keys:
            with suppress(Exception):  # anyone's code: if it fails, the text is unknown
                passage = passage_of(name)
                if isinstance(passage, Passage) and passage.passage_id == name:
                    self.add(passage)
        return name in self._keys


def _answer(
    query_id: str,
    ranking: Ranking,
    candidates: Sequence[int],
    passages: Mapping[int, Passage],
    readings: Readings,
) -> _Replayed:
    """Keep the first candidate of each text, using the ranking's own copies or the texts.

    Candidates are positions in the ranking, best first; ``readings`` notes their texts.
    """
    ids = ranking.passage_ids
    order: list[int] = []
    place: dict[object, int] = {}
    copies: dict[int, list[str]] = {}
    for position in candidates:
        if position in passages:
            readings.add(passages[position])
        key = readings.key(ids[position])
        key_or_root = ranking.copies.get(position, position) if ranking.copies or not key else key
        at = place.setdefault(key_or_root, len(order))
        if at == len(order):
            order.append(position)
        else:
            copies.setdefault(at, []).append(ids[position])
    # Scores that carry only order are not needed: the reciprocal rank replaces them.
    columns: dict[tuple[str, str], Any] = {
        ("", "scores"): [
            1.0 / rank if ranking.scores[position] is None else ranking.scores[position]
            for rank, position in enumerate(order, start=1)
        ],
        ("", "tokens"): [
            readings.tokens(passages[each]) if each in passages else np.nan for each in order
        ]
        if (tokens := ranking.signals.get(TOKENS)) is None
        else tokens[order],
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
        copies,
        {name: leg.kind for name, leg in ranking.legs.items()},
        columns,
    )


def _whole_signals(
    signals: Mapping[str, FloatArray], beyond: BoolArray
) -> tuple[dict[str, FloatArray], tuple[str, ...]]:
    """Return the signals that every candidate has, and a line about each other signal.

    Raises:
        ConfigurationError: a signal's name has a full stop, as only the names of its features do.
    """
    whole, notes = {}, []
    for name, values in signals.items():
        if "." in name or not name:
            raise ConfigurationError(
                f"the retriever gives a signal named {name!r}: a name must not be empty or contain "
                "a full stop"
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


def _readable(
    ranking: Ranking, candidates: Sequence[int], passage_of: PassageOf
) -> dict[int, Passage]:
    """Read the candidates' passages; look up those without a text, such as those of a run."""
    read = read_passages(ranking.passages, candidates)
    found = {}
    for position, passage, text in zip(read.positions, read.passages, read.texts, strict=True):
        name = ranking.passage_ids[position]
        if text:
            # Under the candidate's id, whatever the source calls it.
            title = str(getattr(passage, "title", None) or "")
            found[position] = Passage(name, text, title, getattr(passage, "metadata", None))
        else:
            with suppress(KeyError):
                found[position] = passage_of(name)
    return {position: passage for position, passage in found.items() if passage.text}


def _without_itself(
    query: Query,
    labels: Dataset | None,
    ranking: Ranking,
    candidates: Sequence[int],
    passages: Mapping[int, Passage],
) -> Sequence[int]:
    """Leave out the query's own passage: one with its text, or with its id and a similar text."""
    if labels is None:
        return candidates
    relevant = labels.relevant(query.query_id)
    read = [(each, passages[each]) for each in candidates if each in passages]
    same: set[int] = set()
    for texts in (
        {position: passage.text for position, passage in read},
        {position: f"{each.title} {each.text}" for position, each in read if each.title},
    ):
        for at, first in copies_of([query.text, *texts.values()]).items():
            if first == 0:
                same.add([*texts][at - 1])

    def is_itself(position: int) -> bool:
        name, passage = ranking.passage_ids[position], passages.get(position)
        if name in relevant or (position not in same and name != query.query_id):
            return False
        if position in same or passage is None:
            return True
        # Questions and passages that are both numbered have the same ids by chance.
        whole = f"{passage.title} {passage.text}"
        words, others = (set(each.casefold().split()) for each in (query.text, whole))
        return 2 * len(words & others) > len(words | others)

    return [position for position in candidates if not is_itself(position)]


def _names(
    answer: _Replayed,
    same: Mapping[str, str],
    members: Mapping[str, Sequence[str]],
    document_of: Mapping[str, str],
) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """Return the copies of a query's candidates, and their documents, both by position.

    ``same`` maps passages with the same text to the first of them, ``members`` back.
    """
    copies, documents = dict[int, tuple[str, ...]](), dict[int, tuple[str, ...]]()
    seen: set[str] = set()
    for at, name in enumerate(answer.passage_ids):
        alike = [*answer.copies.get(at, ()), *members.get(same.get(name, ""), ())]
        others = tuple(dict.fromkeys(each for each in alike if each != name))
        if others:
            copies[at] = others
        if document_of:
            own = [document_of.get(each) for each in (name, *others)]
            new = tuple(dict.fromkeys(each for each in own if each and each not in seen))
            if new:
                documents[at] = new
                seen.update(new)
    return copies, documents
