"""Texts to rows of numbers by an exported model: its tokenizer and its session."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.retrieval.models.runtimes.exported import Exported
from ctxguard.retrieval.models.runtimes.openvino_session import OpenVinoSession
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.protocols import Float32Array, Progress

_BATCH = 8
"""More are slower: they no longer fit into a core's cache, and short texts are padded further."""

_CHUNK = 512

_Item = tuple[str, str | None]


class Encoder:
    """An exported model in a session. Safe to use from several threads at once.

    Args:
        exported: The model; its tokenizer and settings are used.
        session: Runs its graph.
    """

    def __init__(self, exported: Exported, session: OpenVinoSession) -> None:
        self._inputs = exported.inputs
        self._exported_tokenizer = exported.tokenizer.decode()
        self._session = session
        # Set up once: a tokenizer raises "Already borrowed" when it is changed while it is used.
        self._tokenizer: Any = require("tokenizers", "embedded").Tokenizer.from_str(
            self._exported_tokenizer
        )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if exported.inputs.max_tokens is not None:
            self._tokenizer.enable_truncation(exported.inputs.max_tokens)
        self.width: int = exported.expected.shape[1]

    @property
    def passage_window(self) -> PassageWindow | None:
        """How much of a passage the model reads; None for all."""
        tokens = self._inputs.max_tokens
        if tokens is None:
            return None
        return PassageWindow(self._exported_tokenizer, tokens, self._inputs.passage_prompt)

    def query(self, text: str) -> Float32Array:
        """The row of a query, shape (width,)."""
        return self._run([(self._inputs.query_prompt + text, None)]).reshape(-1)

    def passages(self, texts: Sequence[str], progress: Progress | None = None) -> Float32Array:
        """One row per passage, shape (n, width)."""
        prompt = self._inputs.passage_prompt
        return self._many([(prompt + text, None) for text in texts], progress)

    def pairs(self, query: str, texts: Sequence[str]) -> Float32Array:
        """One row per text together with the query, shape (n, width)."""
        return self._many([(query, text) for text in texts])

    def _many(self, items: Sequence[_Item], progress: Progress | None = None) -> Float32Array:
        """Texts of similar length share a batch, the longest first; threads share the batches.

        The batches do not depend on the number of threads, so neither do the rows.
        """
        rows = np.zeros((len(items), self.width), np.float32)
        order = sorted(range(len(items)), key=lambda at: _length(items[at]), reverse=True)

        def encode(batch: Sequence[int]) -> None:
            rows[batch] = self._run([items[at] for at in batch])

        workers = max(1, min(self._session.workers, -(-len(items) // _BATCH)))
        with ThreadPoolExecutor(workers, "ctxguard-encode") as threads:
            for start in range(0, len(order), _CHUNK):
                chunk = order[start : start + _CHUNK]
                batches = [chunk[at : at + _BATCH] for at in range(0, len(chunk), _BATCH)]
                # One worker needs no thread; map otherwise hands out every batch at once.
                for _ in map(encode, batches) if workers == 1 else threads.map(encode, batches):
                    pass
                if progress is not None:
                    progress(start + len(chunk))
        return rows

    def _run(self, items: Sequence[_Item]) -> Float32Array:
        # One by one: a batch would be tokenized on threads that a fork does not survive.
        encodings = [self._tokenizer.encode(text, pair) for text, pair in items]
        shape = (len(items), max(len(encoding) for encoding in encodings))
        columns = {
            "input_ids": np.full(shape, self._inputs.pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.full(shape, self._inputs.pad_type_id, np.int64),
        }
        for row, encoding in enumerate(encodings):
            columns["input_ids"][row, : len(encoding)] = encoding.ids
            columns["attention_mask"][row, : len(encoding)] = encoding.attention_mask
            columns["token_type_ids"][row, : len(encoding)] = encoding.type_ids
        return self._session.run([columns[name] for name in self._inputs.names])


def _length(item: _Item) -> int:
    return len(item[0]) + len(item[1] or "")
