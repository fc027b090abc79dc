"""Turns texts into rows of numbers with a model's tokenizer and its session."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.retrieval.models.runtimes.exported import Exported
from ctxguard.retrieval.models.runtimes.tracing import Traceable
from ctxguard.retrieval.models.sentences import (
    as_int8,
    sentence_lengths,
    sentence_vectors,
    unit_states,
)
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.protocols import (
    Float32Array,
    Int8Array,
    Progress,
    QueryTokens,
    Sentences,
)

_CHUNK = 512

_MAX_WINDOWS = 8
"""A passage's sentences are read up to this multiple of the length that its vector covers."""

_TABLE_BATCH = 256
"""Single word pieces are short: many fit into a core's cache."""

_Item = tuple[str, str | None]


class Session(Protocol):
    """Computes a model's outputs. Safe to call from several threads at once."""

    @property
    def batch(self) -> int:
        """Number of texts to pass at once."""
        ...

    @property
    def workers(self) -> int:
        """Number of calls that run concurrently."""
        ...

    @property
    def n_outputs(self) -> int:
        """Number of the model's outputs: one row per text, and perhaps the states of its tokens."""
        ...

    def run(self, inputs: Sequence[NDArray[np.int64]], n_outputs: int = 1) -> list[Float32Array]:
        """Compute the model's first outputs for a batch; inputs of shape (n, tokens)."""
        ...


class _Pieces(NamedTuple):
    """A text's own word pieces in one window: without the model's marks and its prompt.

    Attributes:
        ids: Numbers of the pieces, shape (n,).
        starts: The position of each piece's first character, shape (n,).
        states: States of the pieces, shape (n, d).
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    states: Float32Array

    @classmethod
    def of(cls, encoding: Any, states: Float32Array, n_prompt: int) -> "_Pieces":
        """Take the pieces of a window after a prompt of ``n_prompt`` characters."""
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_mark = np.array(encoding.special_tokens_mask, np.bool_)
        own = np.flatnonzero(~is_mark & ((n_prompt == 0) | (offsets[:, 1] > n_prompt)))
        return cls(np.array(encoding.ids, np.int64)[own], offsets[own, 0], states[own])


class Encoder:
    """A model in a session. Safe to use from several threads at once.

    Args:
        model: The model, for its tokenizer and settings.
        session: Computes the model.
    """

    def __init__(self, model: Exported | Traceable, session: Session) -> None:
        self._inputs = model.inputs
        self._model_tokenizer = model.tokenizer.decode()
        self._session = session
        # Set up once: a tokenizer raises "Already borrowed" if changed while it is used.
        self._tokenizer: Any = require("tokenizers", "embedded").Tokenizer.from_str(
            self._model_tokenizer
        )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if model.inputs.max_tokens is not None:
            self._tokenizer.enable_truncation(model.inputs.max_tokens)
        self.width: int = model.expected.shape[1]

    @property
    def gives_tokens(self) -> bool:
        """Whether the model also gives the states of tokens."""
        return self._session.n_outputs > 1

    @cached_property
    def n_pieces(self) -> int:
        """Number of word pieces in the model's vocabulary."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return max(vocabulary.values()) + 1

    @property
    def passage_window(self) -> PassageWindow | None:
        """The part of a passage that the model reads; None for the whole passage."""
        tokens = self._inputs.max_tokens
        if tokens is None:
            return None
        return PassageWindow(self._model_tokenizer, tokens, self._inputs.passage_prompt)

    def query(self, text: str) -> Float32Array:
        """Compute the row of a query, shape (width,)."""
        return self._run([(self._inputs.query_prompt + text, None)]).reshape(-1)

    def passages(self, texts: Sequence[str], progress: Progress | None = None) -> Float32Array:
        """Compute one row per passage, shape (n, width)."""
        prompt = self._inputs.passage_prompt
        return self._many([(prompt + text, None) for text in texts], progress)

    def pairs(self, query: str, texts: Sequence[str]) -> Float32Array:
        """Compute one row per text together with the query, shape (n, width)."""
        return self._many([(query, text) for text in texts])

    def query_tokens(self, text: str) -> QueryTokens:
        """Compute a query's row and its word pieces; for a model that gives tokens."""
        encoding = self._tokenizer.encode(self._inputs.query_prompt + text)
        (vector,), (states,) = self._infer([encoding], 2)
        pieces = _Pieces.of(encoding, states, len(self._inputs.query_prompt))
        return QueryTokens(vector, unit_states(pieces.states), pieces.ids)

    def passages_with_sentences(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> tuple[Float32Array, Sentences]:
        """Compute one row per passage and its sentences; for a model that gives tokens.

        A text longer than the window is read in up to 8 windows; its row is that of the first.
        """
        if not texts:
            rows, (vectors, lengths, pieces, starts) = self.passages_with_sentences([""])
            return rows[:0], Sentences(vectors[:0], lengths[:0], pieces[:0], starts[:1])
        prompt = self._inputs.passage_prompt
        rows = np.zeros((len(texts), self.width), np.float32)
        sentences: list[Any] = [None] * len(texts)

        def encode(batch: Sequence[int]) -> None:
            rows[batch], found = self._with_sentences([prompt + texts[at] for at in batch])
            for at, each in zip(batch, found, strict=True):
                sentences[at] = each

        self._spread(_longest_first(list(map(len, texts))), self._session.batch, encode, progress)
        return rows, Sentences.of(sentences)

    def token_table(self) -> Int8Array:
        """Compute each word piece's state between the model's own marks, as `as_int8` gives it."""
        frame = self._tokenizer.encode("a")
        content = [at for at, mark in enumerate(frame.special_tokens_mask) if not mark]
        before, after = frame.ids[: content[0]], frame.ids[content[-1] + 1 :]
        states = self._infer([frame], 2)[1]
        table = np.zeros((self.n_pieces, states.shape[-1]), np.int8)

        def encode(pieces: Sequence[int]) -> None:
            ids = np.array([[*before, piece, *after] for piece in pieces], np.int64)
            columns = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.full_like(ids, frame.type_ids[0]),
            }
            states = self._session.run([columns[name] for name in self._inputs.names], 2)[1]
            table[pieces] = as_int8(states[:, len(before)])

        self._spread(range(self.n_pieces), _TABLE_BATCH, encode, None)
        return table

    def _many(self, items: Sequence[_Item], progress: Progress | None = None) -> Float32Array:
        rows = np.zeros((len(items), self.width), np.float32)

        def encode(batch: Sequence[int]) -> None:
            rows[batch] = self._run([items[at] for at in batch])

        lengths = [len(text) + len(pair or "") for text, pair in items]
        self._spread(_longest_first(lengths), self._session.batch, encode, progress)
        return rows

    def _spread(
        self,
        order: Sequence[int],
        size: int,
        encode: Callable[[Sequence[int]], None],
        progress: Progress | None,
    ) -> None:
        """Call ``encode`` with batches of this many items, which threads share.

        The batches do not depend on the number of threads, so neither do the rows.
        """
        workers = max(1, min(self._session.workers, -(-len(order) // size)))
        with ThreadPoolExecutor(workers, "ctxguard-encode") as threads:
            for start in range(0, len(order), _CHUNK):
                chunk = order[start : start + _CHUNK]
                batches = [chunk[at : at + size] for at in range(0, len(chunk), size)]
                # One worker needs no thread; map otherwise hands out every batch at once.
                for _ in map(encode, batches) if workers == 1 else threads.map(encode, batches):
                    pass
                if progress is not None:
                    progress(start + len(chunk))

    def _with_sentences(self, texts: Sequence[str]) -> tuple[Float32Array, list[Sentences]]:
        """Compute a batch's rows and each text's sentences; the texts begin with the prompt."""
        n_prompt = len(self._inputs.passage_prompt)
        encodings = [self._tokenizer.encode(text) for text in texts]
        vectors, states = self._infer(encodings, 2)
        windows = [
            [_Pieces.of(encoding, of_text, n_prompt)]
            for encoding, of_text in zip(encodings, states, strict=True)
        ]
        further = [
            (row, window)
            for row, encoding in enumerate(encodings)
            for window in encoding.overflowing[: _MAX_WINDOWS - 1]
        ]
        for start in range(0, len(further), self._session.batch):
            batch = further[start : start + self._session.batch]
            states = self._infer([window for _, window in batch], 2)[1]
            for (row, window), of_window in zip(batch, states, strict=True):
                windows[row].append(_Pieces.of(window, of_window, n_prompt))
        return vectors, [self._sentences(*each) for each in zip(texts, windows, strict=True)]

    def _sentences(self, text: str, windows: Sequence[_Pieces]) -> Sentences:
        """Combine a text's windows into its sentences."""
        pieces = _Pieces(*map(np.concatenate, zip(*windows, strict=True)))
        lengths = sentence_lengths(text, pieces.starts)
        return Sentences(
            sentence_vectors(pieces.states, lengths),
            lengths,
            pieces.ids.astype(np.uint16) if self.n_pieces <= 2**16 else pieces.ids.astype(np.int32),
            np.array([[0, 0], [lengths.size, pieces.ids.size]], np.int64),
        )

    def _run(self, items: Sequence[_Item]) -> Float32Array:
        # One by one: a batch would be tokenized on threads that a fork does not survive.
        return self._infer([self._tokenizer.encode(text, pair) for text, pair in items], 1)[0]

    def _infer(self, encodings: Sequence[Any], n_outputs: int) -> list[Float32Array]:
        shape = (len(encodings), max(len(encoding) for encoding in encodings))
        columns = {
            "input_ids": np.full(shape, self._inputs.pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.full(shape, self._inputs.pad_type_id, np.int64),
        }
        for row, encoding in enumerate(encodings):
            columns["input_ids"][row, : len(encoding)] = encoding.ids
            columns["attention_mask"][row, : len(encoding)] = encoding.attention_mask
            columns["token_type_ids"][row, : len(encoding)] = encoding.type_ids
        return self._session.run([columns[name] for name in self._inputs.names], n_outputs)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Order texts so that similar lengths share a batch and a lack of memory shows at once."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
