"""Turns texts into rows of numbers with a model's tokenizer and its session."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.retrieval.models.runtimes.exported import Exported
from ctxguard.retrieval.models.runtimes.tracing import Traceable
from ctxguard.retrieval.models.sentences import (
    sentence_lengths,
    sentences_of,
    unit_states,
)
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.nibbles import packed, row_bytes
from ctxguard.retrieval.protocols import (
    Float32Array,
    NibbleArray,
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


class _Read(NamedTuple):
    """A text as the tokenizer reads it.

    Attributes:
        windows: The parts that the model computes, each by itself.
        own: Positions of the text's own word pieces in each window: without the model's marks and
            its prompt.
        pieces: Number of each own piece, over all windows.
        lengths: Own pieces of each sentence, over all windows.
    """

    windows: Sequence[Any]
    own: Sequence[NDArray[np.int64]]
    pieces: NDArray[np.int64]
    lengths: NDArray[np.uint8]

    @classmethod
    def of(cls, text: str, encoding: Any, n_prompt: int) -> "_Read":
        """Divide a text that begins with a prompt of ``n_prompt`` characters."""
        windows = (encoding, *encoding.overflowing[: _MAX_WINDOWS - 1])
        own, starts, pieces = [], [], []
        for window in windows:
            at = _own_pieces(window, n_prompt)
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


class Encoder:
    """A model in a session. Safe to use from several threads at once.

    A `TokenEncoder` if the model gives tokens.

    Args:
        model: The model, for its tokenizer and settings.
        session: Computes the model.
        kept: Returns the result of a function that makes the token table, which it may keep.
    """

    def __init__(
        self,
        model: Exported | Traceable,
        session: Session,
        kept: Callable[[Callable[[], NibbleArray]], NibbleArray] = lambda make: make(),
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

    def query(self, text: str) -> Float32Array:
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

    def encode_query(self, text: str) -> QueryTokens:
        """Compute a query's row and its word pieces; for a model that gives tokens."""
        prompt = self._inputs.query_prompt
        encoding = self._tokenizer.encode(prompt + text)
        (vector,), (states,) = self._infer([encoding], 2)
        at = _own_pieces(encoding, len(prompt))
        return QueryTokens(vector, unit_states(states[at]), np.array(encoding.ids, np.int64)[at])

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> tuple[Float32Array, Sentences]:
        """Compute one row per passage and its sentences; for a model that gives tokens.

        A text longer than the window is read in up to 8 windows; its row is that of the first.
        """
        if not texts:
            rows, sentences = self.encode_passages([""])
            return rows[:0], sentences.at(np.zeros(0, np.int64))
        prompt = self._inputs.passage_prompt
        rows, found, order = np.zeros((len(texts), self.width), np.float32), [], []
        for chunk in _chunks(list(map(len, texts)), progress):
            of_chunk, sentences = self._with_sentences([prompt + texts[at] for at in chunk])
            rows[chunk] = of_chunk
            found.append(sentences)
            order.extend(chunk)
        return rows, Sentences.of(found).at(np.argsort(order))

    def token_table(self) -> NibbleArray:
        """Return the states of single word pieces; see `make_token_table`."""
        return self._kept(self.make_token_table)

    def make_token_table(self) -> NibbleArray:
        """Compute each word piece's state between the model's own marks, as `packed` gives it."""
        frame = self._tokenizer.encode("a")
        content = [at for at, mark in enumerate(frame.special_tokens_mask) if not mark]
        before, after = frame.ids[: content[0]], frame.ids[content[-1] + 1 :]
        states = self._infer([frame], 2)[1]
        table = np.zeros((self.n_pieces, row_bytes(states.shape[-1])), np.uint8)

        def encode(pieces: Sequence[int]) -> None:
            ids = np.array([[*before, piece, *after] for piece in pieces], np.int64)
            columns = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.full_like(ids, frame.type_ids[0]),
            }
            states = self._session.run([columns[name] for name in self._inputs.names], 2)[1]
            table[pieces] = packed(unit_states(states[:, len(before)]))

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

    def _with_sentences(self, texts: Sequence[str]) -> tuple[Float32Array, Sentences]:
        """Compute the rows and the sentences of texts, which begin with the prompt."""
        n_prompt = len(self._inputs.passage_prompt)
        encodings = self._tokenized([(text, None) for text in texts])
        read = [
            _Read.of(text, encoding, n_prompt)
            for text, encoding in zip(texts, encodings, strict=True)
        ]
        windows = [(at, n) for at, each in enumerate(read) for n in range(len(each.windows))]
        rows = np.zeros((len(texts), self.width), np.float32)
        parts: list[Any] = [None] * len(windows)

        def take(which: int, row: Float32Array, states: Float32Array) -> None:
            at, n = windows[which]
            if n == 0:
                rows[at] = row
            # The states of all windows would take hundreds of megabytes.
            of_pieces = read[at].sentences(n)
            firsts = np.flatnonzero(np.diff(of_pieces, prepend=-1))
            own = states[read[at].own[n]]
            sums = np.add.reduceat(own, firsts, axis=0) if firsts.size else own
            parts[which] = of_pieces[firsts], sums

        self._compute([read[at].windows[n] for at, n in windows], 2, take)
        lengths = [each.lengths for each in read]
        first = np.cumsum([0, *map(len, lengths)])
        sums = np.zeros((first[-1], parts[0][1].shape[1]), np.float32)
        for (at, _), (sentences, part) in zip(windows, parts, strict=True):
            sums[first[at] + sentences] += part
        pieces = np.concatenate([each.pieces for each in read])
        return rows, sentences_of(sums, lengths, pieces, self.n_pieces)

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
