"""Models that torch itself computes: on one thread at a time, and in forked children too."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess, reset_in_children
from ctxguard.retrieval.models.runtimes.tracing import Traceable
from ctxguard.retrieval.protocols import Float32Array


class TorchModel:
    """A model in torch, loaded on first use.

    Args:
        load: Loads the model, after a call of `torch`.
    """

    _lock = OfProcess(Lock)

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._model: Any = None

    @contextmanager
    def held(self) -> Iterator[Any]:
        """Yield the model, for this thread alone.

        Its tokenizer raises "Already borrowed" when two threads use it at once.
        """
        with self._lock:
            if self._model is None:
                self._model = self._load()
            yield self._model


class TorchSession:
    """A model in torch, computed like exported models: from tokens, with all its graph's outputs.

    It provides the states of tokens, which sentence-transformers' own methods do not give. On the
    device where the model was loaded. Safe to call from several threads.

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


def torch() -> Any:
    """Import torch, and make it compute on one thread in processes forked from now on.

    The threads of its pool stay in the parent, and a child that shared work with them would wait
    for them for ever. A program that computes in torch by itself before this call must
    call ``torch.set_num_threads(1)`` in its children.

    Raises:
        MissingExtraError: it is not installed.
    """
    library = require("torch", "embedded")
    _threads.library = library
    return library


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bar that transformers writes to standard error while reading weights."""
    bars = require("transformers.utils.logging", "embedded")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


class _Threads:
    """The threads of torch, after a call of `torch`."""

    library: Any = None

    def _reset_after_fork(self) -> None:
        """Compute on the calling thread in a forked child: it is the only one."""
        if self.library is not None:
            self.library.set_num_threads(1)


_threads = _Threads()
reset_in_children(_threads)
