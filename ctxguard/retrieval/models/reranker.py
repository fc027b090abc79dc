"""Reranking with a sentence-transformers CrossEncoder, its activation pinned to raw logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.files import model_name, portable_name
from ctxguard.retrieval.models.graph import PROBES, GraphModel


class CrossEncoderReranker(GraphModel):
    """Any CrossEncoder with one output, by folder or hub name; see `SentenceTransformerEmbedder`.

    A model's configuration may apply a sigmoid to its output or not; here the activation is
    always the identity, so that the score is a logit.

    Args:
        name_or_path: A folder, or a name on the model hub.
        runtime: As for an embedder; OpenVINO computes in 32 bits, since logits have no fixed scale
            on which bfloat16's error could be called small.
        cache: As for an embedder.

    Raises:
        ConfigurationError: an unknown runtime.
    """

    _output = "scores"
    _probes = tuple((PROBES[0], probe) for probe in PROBES)
    _precisions = ("f32",)

    def __init__(
        self, name_or_path: str | Path, *, runtime: str | None = None, cache: Path | None = None
    ) -> None:
        super().__init__(model_name(name_or_path), runtime=runtime, cache=cache)

    @property
    def fingerprint(self) -> str:
        """Name, digest of the weights, and activation; the same on every runtime."""
        return f"{portable_name(self.name)} {self.weights} identity"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Compute one logit per text, shape (n,), higher is better."""
        if not texts:
            return np.zeros(0)
        return self.graph.rows([(query, text) for text in texts]).reshape(-1).astype(np.float64)

    def _load(self, folder: Path, device: str | None) -> Any:
        identity = require("torch", "embedded").nn.Identity()
        library = require("sentence_transformers", "embedded")
        model = library.CrossEncoder(str(folder), activation_fn=identity, device=device)
        if model.num_labels != 1:
            raise ConfigurationError(
                f"the cross-encoder in {folder} has {model.num_labels} outputs; a reranker needs "
                "one"
            )
        return model
