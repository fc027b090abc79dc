"""Gives an encoder the methods of an embedder, and the vectors of passages' sentences."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.retrieval.models.encoder import Encoder, own_pieces
from ctxguard.retrieval.models.sentences import sentence_lengths, sentences_of
from ctxguard.retrieval.nibbles import packed
from ctxguard.retrieval.protocols import (
    Float32Array,
    NibbleArray,
    Progress,
    QueryTokens,
    Sentences,
    TokenEncoder,
)

_CHUNK = 512
_BATCH = 8
_MAX_WINDOWS = 8


class SentenceTransformerEmbedder(Encoder):
    """An encoder as an `Embedder`."""

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        return self.query(text).vector

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode each text as a unit vector, shape (n, dimension)."""
        return self.encode(texts, progress)

    def token_encoder(self) -> TokenEncoder | None:
        """Return the encoder of word pieces' states."""
        return self._sentences

    @cached_property
    def _sentences(self) -> "SentenceEncoder":
        return SentenceEncoder(self)


def named_embedder(name: str) -> SentenceTransformerEmbedder:
    """Return the embedder that a saved index names."""
    return SentenceTransformerEmbedder.of_index(name)


class SentenceEncoder:
    """A `TokenEncoder` over an encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode_query(self, text: str) -> QueryTokens:
        """Compute a query's vector and its word pieces."""
        found = self._encoder.query(text)
        return QueryTokens(found.vector, found.states, found.piece_ids.astype(np.int64))

    def token_table(self) -> NibbleArray:
        """Return the states of single word pieces, packed."""
        return self._table

    @cached_property
    def _table(self) -> NibbleArray:
        return packed(self._encoder.piece_table)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> tuple[Float32Array, Sentences]:
        """Compute one vector per passage and its sentences.

        A text longer than the window is read in up to 8 windows; its vector is that of the first.
        """
        if not texts:
            vectors, sentences = self.encode_passages([""])
            return vectors[:0], sentences.at(np.zeros(0, np.int64))
        vectors = np.zeros((len(texts), self._encoder.dimension), np.float32)
        found, order = [], sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        for start in range(0, len(order), _CHUNK):
            chunk = order[start : start + _CHUNK]
            vectors[chunk], sentences = self._with_sentences([texts[at] for at in chunk])
            found.append(sentences)
            if progress is not None:
                progress(start + len(chunk))
        return vectors, Sentences.of(found).at(np.argsort(order))

    def _with_sentences(self, texts: Sequence[str]) -> tuple[Float32Array, Sentences]:
        graph = self._encoder.graph
        prompt = graph.settings.passage_prompt
        read = [
            _Read.of(prompt + text, graph.tokenizer.encode(prompt + text), len(prompt))
            for text in texts
        ]
        windows = [(at, n) for at, each in enumerate(read) for n in range(len(each.windows))]
        windows.sort(key=lambda each: -len(read[each[0]].windows[each[1]]))
        tokens = [(w.ids, w.type_ids) for w in (read[at].windows[n] for at, n in windows)]
        rows = np.zeros((len(texts), self._encoder.dimension), np.float32)
        parts, at_window = [], iter(windows)
        for outputs in graph.share(tokens, _BATCH):
            for row, states in zip(*outputs, strict=True):
                at, n = next(at_window)
                if n == 0:
                    rows[at] = row
                of_pieces, own = read[at].sentences(n), states[read[at].own[n]]
                firsts = np.flatnonzero(np.diff(of_pieces, prepend=-1))
                sums = np.add.reduceat(own, firsts, axis=0) if firsts.size else own
                parts.append((at, of_pieces[firsts], sums))
        lengths = [each.lengths for each in read]
        first = np.cumsum([0, *map(len, lengths)])
        sums = np.zeros((first[-1], parts[0][2].shape[1]), np.float32)
        for at, sentences, part in parts:
            sums[first[at] + sentences] += part
        pieces = np.concatenate([each.pieces for each in read])
        n_pieces = max(graph.tokenizer.get_vocab().values()) + 1
        return rows, sentences_of(sums, lengths, pieces, n_pieces)


class _Read(NamedTuple):
    """A text as the tokenizer reads it."""

    windows: Sequence[Any]
    own: Sequence[NDArray[np.int64]]
    pieces: NDArray[np.int64]
    lengths: NDArray[np.uint8]

    @classmethod
    def of(cls, text: str, encoding: Any, n_prompt: int) -> "_Read":
        windows = (encoding, *encoding.overflowing[: _MAX_WINDOWS - 1])
        own, starts, pieces = [], [], []
        for window in windows:
            at = own_pieces(window, n_prompt)
            own.append(at)
            starts.append(np.array(window.offsets, np.int64).reshape(-1, 2)[at, 0])
            pieces.append(np.array(window.ids, np.int64)[at])
        lengths = sentence_lengths(text, np.concatenate(starts))
        return cls(windows, own, np.concatenate(pieces), lengths)

    def sentences(self, window: int) -> NDArray[np.int64]:
        """Return the sentence of each own piece of a window, ascending."""
        first = sum(own.size for own in self.own[:window])
        of_pieces = np.repeat(np.arange(self.lengths.size), self.lengths)
        return of_pieces[first : first + self.own[window].size]
