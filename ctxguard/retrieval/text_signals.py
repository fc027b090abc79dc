"""Computes signals of passages outside ctxguard's indexes, from their texts and vectors.

Texts are read when they are first seen, which takes 5 to 46 ms for 100 of them, and kept, as
many as fit; threads share them. Calls the analyser, the embedder and its tokenizer; no other I/O.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Hit, Leg, Passage, ScoreKind
from ctxguard.retrieval.analysers import as_analyser
from ctxguard.retrieval.index.dense import unit_rows
from ctxguard.retrieval.index.lexical import SparseRows, idf, length_norms, unit_weights
from ctxguard.retrieval.index.passages import searchable_text, without_surrogates
from ctxguard.retrieval.index.pieces import MOST_PIECES
from ctxguard.retrieval.protocols import (
    Analyser,
    Embedder,
    Float32Array,
    QueryStates,
    TokenEncoder,
    token_encoder_of,
)
from ctxguard.retrieval.signals import CandidateFeatures, QueryPieces, Ranker, signals

MAX_WORDS = 2_000_000
"""How many words and word pieces are kept, at 4 to 8 bytes each."""

MOST_TERMS = 2_048
"""How many terms of a passage are read, from its beginning."""

_31_BITS = 2**31 - 1


class _Text(NamedTuple):
    """A passage's text: its distinct terms and their counts, its word pieces and its vector."""

    terms: NDArray[np.int32]
    counts: NDArray[np.int64]
    pieces: NDArray[np.int32]
    vector: Float32Array | None

    @property
    def size(self) -> int:
        """How many words the text counts as, including the data kept with them."""
        vector = 0 if self.vector is None else self.vector.size
        return self.terms.size + self.pieces.size + vector // 2 + 32


class Read(NamedTuple):
    """Some passages as signals read them, with the counts that BM25 requires."""

    features: CandidateFeatures
    numbers: NDArray[np.int32]
    """The hash of each term, ascending, shape (n_terms,)."""
    weights: FloatArray
    """BM25's weight of each entry of the passages' terms."""

    def bm25(self, terms: Sequence[str]) -> FloatArray:
        """Compute Lucene's BM25 of the passages for the terms of a query, shape (n,)."""
        times = (self.numbers[:, np.newaxis] == _hashes(terms)).sum(axis=1, dtype=np.float64)
        rows, n = self.features.terms, self.features.lengths.size
        scores = np.bincount(rows.row_of_each, self.weights * times[rows.numbers], n)
        return scores.astype(np.float64, copy=False)


class TextReader:
    """Reads and keeps passages' texts. Safe to use from several threads at once.

    Without an encoder there are no word pieces, without an embedder only the vectors given.
    """

    # By a hash of the text, those used last at the end.
    _kept = OfProcess[OrderedDict[int, _Text]](OrderedDict)
    _size = OfProcess(int)
    _lock = OfProcess(Lock)

    def __init__(
        self, analyser: Analyser, encoder: TokenEncoder | None, embedder: Embedder | None = None
    ) -> None:
        self._analyser, self.encoder, self._embedder = analyser, encoder, embedder

    def read(self, passages: Sequence[Passage | Hit], vectors: Float32Array | None = None) -> Read:
        """Read passages, at least one, and count in them how rare each term is.

        Their unit vectors are those given, or of the embedder, if there is one.
        """
        texts = self._texts(passages)
        entries = np.concatenate([text.terms for text in texts])
        numbers, inverse = np.unique(entries, return_inverse=True)
        rows = SparseRows(
            inverse.astype(np.int32),
            np.concatenate([text.counts for text in texts]).astype(np.uint16),
            np.cumsum([0, *[text.terms.size for text in texts]]),
        )
        lengths = np.array([text.counts.sum() for text in texts], np.float64)
        rarity = idf(np.bincount(inverse, minlength=numbers.size), len(texts))
        parts = rows.counts / (rows.counts + length_norms(lengths)[rows.row_of_each])
        weights = rarity[rows.numbers] * parts
        own = [text.vector for text in texts if text.vector is not None]
        pieces = SparseRows.of([text.pieces for text in texts])
        return Read(
            CandidateFeatures(
                lengths,
                rows,
                unit_weights(rows, weights),
                np.stack(own) if len(own) == len(texts) else vectors,
                pieces if pieces.numbers.size else None,
            ),
            numbers,
            weights,
        )

    def query_pieces(self, states: QueryStates | None, read: Read) -> QueryPieces | None:
        """Weigh a query's word pieces by how rare they are among the candidates."""
        encoder, pieces = self.encoder, read.features.pieces
        if states is None or encoder is None or pieces is None:
            return None
        table, own = encoder.piece_table, states.piece_ids
        found = np.bincount(pieces.numbers, minlength=len(table))[own]
        rarity = np.zeros(len(table))
        rarity[own] = idf(found, pieces.starts.size - 1)
        return QueryPieces.of(states, rarity, table)

    def _texts(self, passages: Sequence[Passage | Hit]) -> list[_Text]:
        """Return the passages' kept data, and read passages that are not kept yet."""
        texts = [without_surrogates(searchable_text(passage)) for passage in passages]
        hashes = list(map(hash, texts))
        with self._lock:
            found = {each: self._kept[each] for each in hashes if each in self._kept}
            for each in found:
                self._kept.move_to_end(each)
        new = {each: text for each, text in zip(hashes, texts, strict=True) if each not in found}
        read = dict(zip(new, self._split(list(new.values())), strict=True))
        with self._lock:
            for each, text in read.items():
                old = self._kept.pop(each, None)
                self._kept[each] = text
                self._size += text.size - (0 if old is None else old.size)
            while self._size > MAX_WORDS:
                _, gone = self._kept.popitem(last=False)
                self._size -= gone.size
        found |= read
        return [found[each] for each in hashes]

    def _split(self, texts: list[str]) -> list[_Text]:
        encoder, embedder = self.encoder, self._embedder
        vectors: Sequence[Float32Array | None] = [None] * len(texts)
        if embedder is not None and texts:
            vectors = list(unit_rows(embedder.encode_passages(texts), texts))
        none = np.zeros(0, np.int32)
        pieces = [none] * len(texts) if encoder is None else encoder.pieces(texts)
        return [
            _Text(
                *np.unique(_hashes(self._analyser.analyse(text)[:MOST_TERMS]), return_counts=True),
                np.unique(np.asarray(own[:MOST_PIECES], np.int32)),
                vector,
            )
            for text, own, vector in zip(texts, pieces, vectors, strict=True)
        ]


class TextSignals:
    """The signals of passages that are given with each query. Safe for several threads.

    These are `ctxguard.retrieval.signals.NAMES`, without an embedder only those that need no
    vectors. ``bm25``, of the texts' stems, and with an embedder ``cosine`` are added; the ranker
    reads them as the scores of its legs. Rare words and long passages are told by those given, so
    that a passage's signals depend on the others.

    Args:
        analyser: Splits passages and queries: a language code, or an analyser.
        embedder: Encodes passages, when they are first seen, and queries; None for no vectors.
        ranker: The weights; None for those of the package.

    Raises:
        ConfigurationError: an unknown language.
        MissingExtraError: a library that it needs is not installed.
    """

    def __init__(
        self,
        analyser: Analyser | str = "en",
        *,
        embedder: Embedder | None = None,
        ranker: Ranker | None = None,
    ) -> None:
        self._analyser, self._embedder = as_analyser(analyser), embedder
        self._ranker = Ranker.default() if ranker is None else ranker
        encoder = None if embedder is None else token_encoder_of(embedder)
        self._reader = TextReader(self._analyser, encoder, embedder)

    @property
    def fingerprint(self) -> str:
        """The analyser, the embedder and the ranker."""
        model = "no vectors" if self._embedder is None else self._embedder.fingerprint()
        return f"{self._analyser.fingerprint}, {model}, {self._ranker.digest()}"

    def signals(self, query: str, passages: Sequence[Passage | Hit]) -> dict[str, FloatArray]:
        """Compute the signals of some passages by name, shape (n,) each."""
        if not passages:
            return {}
        read = self._reader.read(passages)
        legs = {"lexical": Leg(read.bm25(self._analyser.analyse(query)), ScoreKind.RATIO)}
        own, states = {"bm25": np.log1p(legs["lexical"].scores)}, None
        vectors = read.features.vectors
        if self._embedder is not None and vectors is not None:
            encoder = self._reader.encoder
            states = None if encoder is None else encoder.query(query)
            vector = self._embedder.encode_query(query) if states is None else states.vector
            own["cosine"] = np.einsum("nd,d->n", vectors, vector).astype(np.float64)
            legs["dense"] = Leg(own["cosine"], ScoreKind.COSINE)
        pieces = self._reader.query_pieces(states, read)
        fused = fuse(legs, Fusion())
        return own | signals(read.features, legs, fused, pieces, self._ranker)


def _hashes(terms: Iterable[str]) -> NDArray[np.int32]:
    """Hash terms to numbers of 31 bits."""
    # Lone surrogates occur in texts of a user's own retriever.
    found = [crc32(term.encode("utf-8", "surrogatepass")) & _31_BITS for term in terms]
    return np.array(found, np.int32)
