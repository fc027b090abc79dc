"""Turns texts into rows of numbers with a model's tokenizer and its session."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.retrieval.models.runtimes.exported import Exported
from ctxguard.retrieval.models.runtimes.tracing import Traceable
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.protocols import (
    Float32Array,
    Progress,
    QueryStates,
)

_CHUNK = 512

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


class Encoder:
    """A model in a session. Safe to use from several threads at once.

    A `TokenEncoder` if the model gives tokens.

    Args:
        model: The model, for its tokenizer and settings.
        session: Computes the model.
        kept: Returns the result of a function that makes the table of pieces, which it may keep.
    """

    def __init__(
        self,
        model: Exported | Traceable,
        session: Session,
        kept: Callable[[Callable[[], Float32Array]], Float32Array] = lambda make: make(),
    ) -> None:
        self._kept = kept
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

    @cached_property
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

    def query_vector(self, text: str) -> Float32Array:
        """Compute the row of a query, shape (width,)."""
        encoding = self._tokenizer.encode(self._inputs.query_prompt + text)
        return self._infer([encoding], 1)[0].reshape(-1)

    def passages(self, texts: Sequence[str], progress: Progress | None = None) -> Float32Array:
        """Compute one row per passage, shape (n, width)."""
        prompt = self._inputs.passage_prompt
        return self._many([(prompt + text, None) for text in texts], progress)

    def pairs(self, query: str, texts: Sequence[str]) -> Float32Array:
        """Compute one row per text together with the query, shape (n, width)."""
        return self._many([(query, text) for text in texts])

    def query(self, text: str) -> QueryStates:
        """Compute a query's row and its word pieces; for a model that gives tokens."""
        prompt = self._inputs.query_prompt
        encoding = self._tokenizer.encode(prompt + text)
        (vector,), (states,) = self._infer([encoding], 2)
        at = _own_pieces(encoding, len(prompt))
        return QueryStates(vector, np.array(encoding.ids, np.int64)[at], _unit(states[at]))

    def pieces(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the numbers of each text's word pieces, in and behind the model's window."""
        found = []
        for text in texts:
            encoding = self._tokenizer.encode(text)
            windows = [encoding, *encoding.overflowing]
            own = [np.array(each.ids, np.int64)[_own_pieces(each, 0)] for each in windows]
            found.append(np.concatenate(own))
        return found

    @property
    def piece_table(self) -> Float32Array:
        """The state of each word piece between the model's own marks, shape (n_pieces, d)."""
        return self._kept(self._make_piece_table)

    def _make_piece_table(self) -> Float32Array:
        frame = self._tokenizer.encode("a")
        content = [at for at, mark in enumerate(frame.special_tokens_mask) if not mark]
        before, after = frame.ids[: content[0]], frame.ids[content[-1] + 1 :]
        states = self._infer([frame], 2)[1]
        table = np.zeros((self.n_pieces, states.shape[-1]), np.float32)

        def encode(pieces: Sequence[int]) -> None:
            ids = np.array([[*before, piece, *after] for piece in pieces], np.int64)
            columns = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.full_like(ids, frame.type_ids[0]),
            }
            states = self._session.run([columns[name] for name in self._inputs.names], 2)[1]
            table[pieces] = _unit(states[:, len(before)])

        self._share(encode, range(self.n_pieces), _TABLE_BATCH)
        return table

    def _many(self, items: Sequence[_Item], progress: Progress | None = None) -> Float32Array:
        rows = np.zeros((len(items), self.width), np.float32)
        for chunk in _chunks([len(text) + len(pair or "") for text, pair in items], progress):
            encodings = self._tokenized([items[at] for at in chunk])

            def take(at: int, row: Float32Array, chunk: Sequence[int] = chunk) -> None:
                rows[chunk[at]] = row

            self._compute(encodings, 1, take)
        return rows

    def _tokenized(self, items: Sequence[_Item]) -> list[Any]:
        encodings: list[Any] = [None] * len(items)

        def read(batch: Sequence[int]) -> None:
            # One by one: a batch would be tokenized on threads that a fork does not survive.
            for at in batch:
                encodings[at] = self._tokenizer.encode(*items[at])

        self._share(read, range(len(items)), self._session.batch)
        return encodings

    def _compute(self, encodings: Sequence[Any], n_outputs: int, take: Callable[..., None]) -> None:
        """Compute encodings with others of about their length.

        Args:
            encodings: From the tokenizer.
            n_outputs: Number of the model's outputs.
            take: Called with the position of each encoding and its outputs, on any thread.
        """

        def compute(batch: Sequence[int]) -> None:
            outputs = self._infer([encodings[at] for at in batch], n_outputs)
            for at, *of_one in zip(batch, *outputs, strict=True):
                take(at, *of_one)

        order = _longest_first([len(encoding) for encoding in encodings])
        self._share(compute, order, self._session.batch)

    def _share(
        self, work: Callable[[Sequence[int]], None], order: Sequence[int], size: int
    ) -> None:
        """Call ``work`` with batches of this many items, which threads share.

        The batches do not depend on the number of threads, so neither do the results.
        """
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        workers = max(1, min(self._session.workers, len(batches)))
        if workers == 1:
            for batch in batches:
                work(batch)
            return
        with ThreadPoolExecutor(workers, "ctxguard-encode") as threads:
            for _ in threads.map(work, batches):
                pass

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


def _own_pieces(encoding: Any, n_prompt: int) -> NDArray[np.int64]:
    """Return the positions of a text's own word pieces, behind a prompt of so many characters."""
    ends = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
    is_mark = np.array(encoding.special_tokens_mask, np.bool_)
    return np.flatnonzero(~is_mark & ((n_prompt == 0) | (ends > n_prompt)))


def _unit(states: Float32Array) -> Float32Array:
    """Bring states to unit length, same shape; a zero one stays zero."""
    lengths = np.linalg.norm(states, axis=-1, keepdims=True)
    unit: Float32Array = states / np.where(lengths > 0.0, lengths, np.float32(1.0))
    return unit


def _chunks(lengths: Sequence[int], progress: Progress | None) -> Iterator[list[int]]:
    """Divide texts of such lengths, the longest first, so that a lack of memory shows at once."""
    order = _longest_first(lengths)
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        yield chunk
        if progress is not None:
            progress(start + len(chunk))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
