"""Reranking with a sentence-transformers CrossEncoder, its activation pinned to raw logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.files import model_name, portable_name
from ctxguard.retrieval.models.runtimes import Encoder, ModelTask, Runtime, RuntimeModel
from ctxguard.retrieval.models.runtimes.torch_model import quiet_loading, torch
from ctxguard.retrieval.models.runtimes.tracing import (
    PROBE_QUERY,
    PROBES,
    traceable_cross_encoder,
)
from ctxguard.retrieval.protocols import Float32Array

_BATCH = 32


class CrossEncoderReranker:
    """Any CrossEncoder with one output, by folder or hub name.

    A model's configuration may apply a sigmoid to its output or not; here the activation is
    always the identity, so that the score is a logit.

    The passages are spread over all processors, or as many as the environment's `OMP_NUM_THREADS`
    allows. Only torch uses a GPU: request torch if there is one.

    A forked child scores as its parent did, on its own threads; under torch on one thread, if
    the parent had loaded a model in it.

    Args:
        name_or_path: A folder, or a name on the model hub.
        runtime: The runtime of the model: ``openvino-bf16``, ``openvino`` or ``torch``. None for
            ``openvino`` if it is installed and gives torch's logits, else ``torch``; the log
            names it.
        cache: As for `SentenceTransformerEmbedder`.

    Raises:
        ConfigurationError: an unknown runtime.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        runtime: str | None = None,
        cache: Path | None = None,
    ) -> None:
        self.name = model_name(name_or_path)
        self._model = RuntimeModel(self.name, RERANKING, runtime=runtime, cache=cache)

    @property
    def runtime(self) -> Runtime:
        """The runtime that computes the logits; loads the model."""
        return self._model.runtime

    @property
    def fingerprint(self) -> str:
        """Name, digest of the weights, and activation; the same on every runtime."""
        return f"{portable_name(self.name)} {self._model.weights} identity"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Compute one logit per text, shape (n,), higher is better."""
        if not texts:
            return np.zeros(0)
        encoder = self._model.encoder
        if encoder is not None:
            return encoder.pairs(query, texts)[:, 0].astype(np.float64)
        with self._model.torch.held() as model:
            logits = model.predict(
                [(query, text) for text in texts], batch_size=_BATCH, show_progress_bar=False
            )
        return np.asarray(logits, dtype=np.float64)


def _load(folder: Path, device: str | None) -> Any:
    library = require("sentence_transformers", "embedded")
    identity = torch().nn.Identity()
    with quiet_loading():
        model = library.CrossEncoder(str(folder), activation_fn=identity, device=device)
    if model.num_labels != 1:
        raise ConfigurationError(
            f"the cross-encoder in {folder} has {model.num_labels} outputs; a reranker needs one"
        )
    return model


def _run_probes(encoder: Encoder) -> Float32Array:
    return encoder.pairs(PROBE_QUERY, PROBES)


def _largest_difference(expected: Float32Array, computed: Float32Array) -> float:
    return float(np.abs(expected - computed).max())


RERANKING = ModelTask(
    runtimes=(Runtime.OPENVINO,),
    load=_load,
    trace=traceable_cross_encoder,
    run_probes=_run_probes,
    deviation=_largest_difference,
    max_deviation=1e-3,
)
"""The logits' task. They have no fixed scale on which bfloat16's error could be called small, so
that precision is used only on request."""
