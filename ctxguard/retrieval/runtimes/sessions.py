"""Exported models at work, in OpenVINO or ONNX Runtime: any number of calls at once, a thread each.

No call spreads over threads, so what it answers does not depend on how many there are, clients do
not wait for one another, and batches are spread over the processors by whoever has several.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxguard._extras import require
from ctxguard.forks import start_afresh_in_children
from ctxguard.retrieval.protocols import Float32Array
from ctxguard.retrieval.runtimes.exported import Exported

IntArray = NDArray[np.int64]


class Session(Protocol):
    """Runs a graph. Safe to call from several threads at once, and after a fork."""

    @property
    def workers(self) -> int:
        """How many calls run side by side."""
        ...

    def run(self, inputs: Sequence[IntArray]) -> Float32Array:
        """What the graph answers to a batch, shape (n, width); inputs of shape (n, tokens)."""
        ...


class OpenVinoSession:
    """A graph in OpenVINO, on the processor.

    Args:
        exported: With a graph of OpenVINO's.
        precision: ``f32`` or ``bf16``, in which the graph is computed.

    Raises:
        MissingExtraError: OpenVINO is not installed.
    """

    def __init__(self, exported: Exported, precision: str) -> None:
        self._precision = precision
        self._model = openvino().Core().read_model(exported.graph, exported.weights)
        self._compiled: Any = None
        self._idle: deque[Any] = deque()
        self._lock = Lock()
        start_afresh_in_children(self)

    @property
    def workers(self) -> int:
        """As many as there are processors, or as `OMP_NUM_THREADS` allows."""
        return int(self._ready().get_property("NUM_STREAMS"))

    def run(self, inputs: Sequence[IntArray]) -> Float32Array:
        """What the graph answers to a batch, shape (n, width); inputs of shape (n, tokens)."""
        compiled = self._ready()
        try:
            request = self._idle.pop()
        except IndexError:
            request = compiled.create_infer_request()
        request.infer(list(inputs), share_inputs=True)
        answer = np.array(request.get_output_tensor(0).data, np.float32)
        self._idle.append(request)
        return answer

    def start_afresh(self) -> None:
        """In a forked child, which has none of the threads: compile anew when next called."""
        _leave_alive(self._compiled, *self._idle)
        self._compiled, self._idle, self._lock = None, deque(), Lock()

    def _ready(self) -> Any:
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> Any:
        threads = processors()
        return (
            openvino()
            .Core()
            .compile_model(
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
        )


class OnnxSession:
    """A graph in ONNX Runtime, on the processor.

    Its calls survive a fork, but once it is imported no forked child can end by itself: the
    library waits at exit for a thread that the child has not got. `multiprocessing` ends its
    children in another way, and is safe.

    Args:
        exported: With an ONNX graph.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
    """

    def __init__(self, exported: Exported) -> None:
        library = require("onnxruntime", "onnx")
        options = library.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._names = exported.inputs.names
        self._session = library.InferenceSession(
            exported.graph, options, providers=["CPUExecutionProvider"]
        )

    @property
    def workers(self) -> int:
        """As many as there are processors, or as `OMP_NUM_THREADS` allows."""
        return processors()

    def run(self, inputs: Sequence[IntArray]) -> Float32Array:
        """What the graph answers to a batch, shape (n, width); inputs of shape (n, tokens)."""
        answers = self._session.run(None, dict(zip(self._names, inputs, strict=True)))
        return np.asarray(answers[0], np.float32)


def openvino() -> Any:
    """The library, imported without its telemetry, which reports every import to its makers.

    Raises:
        MissingExtraError: it is not installed.
    """
    with _without("openvino_telemetry"):
        return require("openvino", "fast")


def has_bf16() -> bool:
    """Whether this processor computes in bfloat16."""
    return "BF16" in openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def processors() -> int:
    """How many threads to use: a processor each, or fewer where `OMP_NUM_THREADS` says so."""
    available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(limit)) if limit.isdecimal() and int(limit) else available


@contextmanager
def _without(module: str) -> Iterator[None]:
    """With a module that cannot be imported; OpenVINO then does without its telemetry."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def _leave_alive(*things: object) -> None:
    """Have things never be destroyed: their destructors wait for threads that are not there."""
    for thing in things:
        if thing is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
