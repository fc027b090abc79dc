"""A model in torch, computed like exported models: from tokens, with all its graph's outputs.

It provides the states of tokens, which sentence-transformers' own methods do not give.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.retrieval.models.runtimes.torch_model import TorchModel
from ctxguard.retrieval.models.runtimes.tracing import Traceable
from ctxguard.retrieval.protocols import Float32Array


class TorchSession:
    """A model in torch, on the device where it was loaded. Safe to call from several threads.

    Args:
        model: The model, held while it computes.
        traceable: The model prepared for tracing.
    """

    batch = 32
    workers = 1

    def __init__(self, model: TorchModel, traceable: Traceable) -> None:
        self._model = model
        self._module = traceable.module
        self.n_outputs = traceable.n_outputs

    def run(self, inputs: Sequence[NDArray[np.int64]], n_outputs: int = 1) -> list[Float32Array]:
        """Compute the model's first outputs for a batch; inputs of shape (n, tokens)."""
        torch = require("torch", "embedded")
        with self._model.held() as model, torch.inference_mode():
            outputs = self._module(*[torch.from_numpy(each).to(model.device) for each in inputs])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [each.float().cpu().numpy() for each in outputs[:n_outputs]]
