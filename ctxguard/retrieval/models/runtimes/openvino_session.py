"""Exported models in OpenVINO: any number of calls at once, each on one thread.

No call is spread over threads. Its results then do not depend on their number, clients do not
wait for one another, and a caller with several batches spreads them over the processors itself.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.retrieval.models.runtimes.exported import Exported
from ctxguard.retrieval.protocols import Float32Array

IntArray = NDArray[np.int64]


def _never_destroy(*objects: object) -> None:
    """Keep objects alive: their destructors would wait for threads that a child does not have."""
    for each in objects:
        if each is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


class OpenVinoSession:
    """A graph in OpenVINO, on the processor. Safe to call from several threads at once.

    Args:
        exported: The model.
        precision: Precision of the computation, ``f32`` or ``bf16``.

    Raises:
        MissingExtraError: OpenVINO is not installed.
    """

    batch = 8
    """Larger batches are slower: they outgrow a core's cache, and short texts are padded."""

    # A forked child, which has none of the threads, compiles again at its next call.
    _compiled = OfProcess[Any](lambda: None, _never_destroy)
    _idle = OfProcess[deque[Any]](deque, lambda idle: _never_destroy(*idle))
    _lock = OfProcess(Lock)

    def __init__(self, exported: Exported, precision: str) -> None:
        self._precision = precision
        self._model = _CORE.get().read_model(exported.graph, exported.weights)

    @property
    def workers(self) -> int:
        """Number of concurrent calls: one per processor, or as many as `OMP_NUM_THREADS` allows."""
        return int(self._ready().get_property("NUM_STREAMS"))

    @property
    def n_outputs(self) -> int:
        """Number of the graph's outputs."""
        return len(self._model.outputs)

    def run(self, inputs: Sequence[IntArray], n_outputs: int = 1) -> list[Float32Array]:
        """Compute the graph's first outputs for a batch; inputs of shape (n, tokens)."""
        compiled = self._ready()
        try:
            request = self._idle.pop()
        except IndexError:
            request = compiled.create_infer_request()
        request.infer(list(inputs), share_inputs=True)
        outputs = [
            np.array(request.get_output_tensor(at).data, np.float32) for at in range(n_outputs)
        ]
        self._idle.append(request)
        return outputs

    def _ready(self) -> Any:
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> Any:
        threads = processors()
        return _CORE.get().compile_model(
            self._model,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": self._precision,
                "NUM_STREAMS": threads,
                "INFERENCE_NUM_THREADS": threads,
                # Pinned threads would share a core with those of another process.
                "ENABLE_CPU_PINNING": False,
            },
        )


def openvino() -> Any:
    """Import OpenVINO without its telemetry, which reports every import to its makers.

    Raises:
        MissingExtraError: it is not installed.
    """
    with _without("openvino_telemetry"):
        return require("openvino", "fast")


def has_bf16() -> bool:
    """Tell whether this processor computes in bfloat16."""
    return "BF16" in _CORE.get().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def processors() -> int:
    """Return the number of threads to use: one per processor, or fewer by `OMP_NUM_THREADS`."""
    available = os.cpu_count() or 1
    if sys.platform == "linux":
        available = len(os.sched_getaffinity(0))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(limit)) if limit.isdecimal() and int(limit) else available


class _SharedCore:
    """OpenVINO's entry point, one for the process and never destroyed.

    The thread that makes one gets an alternate signal stack. Destroying it on another thread
    frees that stack while the first thread still has it, whose next signal then ends the process.
    """

    # A forked child, which has none of its threads, makes another at its next call.
    _core = OfProcess[Any](lambda: None, _never_destroy)
    _lock = OfProcess(Lock)

    def get(self) -> Any:
        """Return the `openvino.Core`.

        Raises:
            MissingExtraError: OpenVINO is not installed.
        """
        with self._lock:
            if self._core is None:
                self._core = openvino().Core()
            return self._core


_CORE = _SharedCore()


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Make a module impossible to import; OpenVINO then works without its telemetry."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
