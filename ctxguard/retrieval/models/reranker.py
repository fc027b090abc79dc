"""Reranks with cross-encoders of sentence-transformers, computed by torch.

Reads the model's files, and downloads from the hub a model that is not here.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.files import ModelFiles, portable_name
from ctxguard.retrieval.models.loading import load, torch


class CrossEncoderReranker:
    """Any CrossEncoder with one output. Threads take turns; a forked child computes on one thread.

    A model's configuration may apply a sigmoid to its output or not; here the activation is
    always the identity, so that the score is a logit. The model, by its folder or its name on the
    hub, is loaded on first use.

    Raises:
        ConfigurationError: the model does not exist.
    """

    _lock = OfProcess(Lock)

    def __init__(self, name_or_path: str | Path) -> None:
        self.files = ModelFiles.find(name_or_path)
        self._model: Any = None

    @property
    def fingerprint(self) -> str:
        """The name, the digest of the weights, and the activation."""
        return f"{portable_name(self.files.name)} {self.files.weights} identity"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Compute one logit per text, shape (n,), higher is better."""
        if not texts:
            return np.zeros(0)
        with self._lock:
            if self._model is None:
                self._model = self._open()
            pairs = [(query, text) for text in texts]
            logits = self._model.predict(pairs, show_progress_bar=False)
        return np.asarray(logits, np.float64)

    def _open(self) -> Any:
        identity = torch().nn.Identity()
        model = load("CrossEncoder", self.files.folder, activation_fn=identity)
        if model.num_labels != 1:
            raise ConfigurationError(
                f"the cross-encoder in {self.files.folder} has {model.num_labels} outputs; a "
                "reranker needs one"
            )
        return model
