"""Reranking with a sentence-transformers CrossEncoder, its activation pinned to raw logits."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
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
from ctxguard.types import FloatArray

_BATCH = 32


class CrossEncoderReranker:
    """Any CrossEncoder with one output, by folder or hub name.

    A model's configuration may put a sigmoid over its output or not; here the activation is
    always the identity, so that the score is a logit.

    Args:
        name_or_path: A folder, or a name on the model hub.
    """

    def __init__(self, name_or_path: str | Path) -> None:
        self.name = model_name(name_or_path)
        # The tokenizer raises "Already borrowed" when two threads use it at once.
        self._lock = Lock()

    @property
    def fingerprint(self) -> str:
        """Name, digest of the weights, and activation."""
        return f"{portable_name(self.name)} {self._weights} identity"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """One logit per text, shape (n,), higher is better."""
        if not texts:
            return np.zeros(0)
        with self._lock:
            logits = self._model.predict(
                [(query, text) for text in texts], batch_size=_BATCH, show_progress_bar=False
            )
        return np.asarray(logits, dtype=np.float64)

    @cached_property
    def _weights(self) -> str:
        return weights_digest(self._folder)

    @cached_property
    def _folder(self) -> Path:
        return model_folder(self.name)

    @cached_property
    def _model(self) -> Any:
        library = require("sentence_transformers", "embedded")
        identity = require("torch", "embedded").nn.Identity()
        with quiet_loading():
            model = library.CrossEncoder(str(self._folder), activation_fn=identity)
        if model.num_labels != 1:
            raise ConfigurationError(
                f"the cross-encoder {self.name!r} has {model.num_labels} outputs; a reranker "
                "needs one"
            )
        return model
