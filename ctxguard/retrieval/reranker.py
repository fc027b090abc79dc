"""Reranking with a sentence-transformers CrossEncoder, its activation pinned to raw logits.

It runs on the fastest runtime that is installed and gives torch's own logits.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.embedder import (
    model_folder,
    model_name,
    portable_name,
    quiet_loading,
    weights_digest,
)
from ctxguard.retrieval.protocols import Float32Array
from ctxguard.retrieval.runtimes import (
    RERANKING,
    Encoder,
    Model,
    Runtime,
    Served,
)
from ctxguard.retrieval.runtimes.by_torch import TorchModel, torch
from ctxguard.retrieval.runtimes.tracing import (
    PROBE_QUERY,
    PROBES,
    Traceable,
    traceable_cross_encoder,
)
from ctxguard.types import FloatArray

MOST_LOGIT_LOST = 1e-3
"""A runtime whose logits lie further from torch's is not taken for it."""

_BATCH = 32


class CrossEncoderReranker:
    """Any CrossEncoder with one output, by folder or hub name.

    A model's configuration may put a sigmoid over its output or not; here the activation is
    always the identity, so that the score is a logit.

    The passages are spread over all processors, or as many as the environment's `OMP_NUM_THREADS`
    says. Only torch uses a GPU: ask for it where there is one.

    A forked child scores as its parent did, on threads of its own; under torch on one thread, if
    the parent had loaded a model in it.

    Args:
        name_or_path: A folder, or a name on the model hub.
        runtime: What computes the logits; None for the fastest that is installed and whose
            logits are torch's, said in the log.
        cache: Where exported models are kept; None for ``ctxguard/models`` in the user's cache
            folder.

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
        self._served = Served(self._described, runtime, RERANKING, cache)
        self._torch = TorchModel(self._load)

    @property
    def runtime(self) -> Runtime:
        """What computes the logits; loads the model."""
        return self._served.runtime

    @property
    def fingerprint(self) -> str:
        """Name, digest of the weights, and activation; a lossy runtime where one was asked for."""
        known = f"{portable_name(self.name)} {self._weights} identity"
        lossy = self._served.lossy
        return known if lossy is None else f"{known} {lossy}"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """One logit per text, shape (n,), higher is better."""
        if not texts:
            return np.zeros(0)
        encoder = self._served.encoder
        if encoder is not None:
            return encoder.pairs(query, texts)[:, 0].astype(np.float64)
        with self._torch.held() as model:
            logits = model.predict(
                [(query, text) for text in texts], batch_size=_BATCH, show_progress_bar=False
            )
        return np.asarray(logits, dtype=np.float64)

    @cached_property
    def _weights(self) -> str:
        return weights_digest(self._folder)

    @cached_property
    def _folder(self) -> Path:
        return model_folder(self.name)

    def _described(self) -> Model:
        return Model(
            name=self.name,
            weights=self._weights,
            folder=self._folder,
            trace=self._trace,
            ask=_ask,
            deviation=_logit_lost,
            most=MOST_LOGIT_LOST,
        )

    def _trace(self) -> Traceable:
        return traceable_cross_encoder(self._load(device="cpu"))

    def _load(self, device: str | None = None) -> Any:
        library = require("sentence_transformers", "embedded")
        identity = torch().nn.Identity()
        with quiet_loading():
            model = library.CrossEncoder(str(self._folder), activation_fn=identity, device=device)
        if model.num_labels != 1:
            raise ConfigurationError(
                f"the cross-encoder {self.name!r} has {model.num_labels} outputs; a reranker "
                "needs one"
            )
        return model


def _ask(encoder: Encoder) -> Float32Array:
    return encoder.pairs(PROBE_QUERY, PROBES)


def _logit_lost(expected: Float32Array, answered: Float32Array) -> float:
    return float(np.abs(expected - answered).max())
