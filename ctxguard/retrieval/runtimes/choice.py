"""Which runtime serves a model: the fastest of those installed whose answers are torch's own.

An exported model answers a few probes whenever it is opened, on this processor and with these
libraries; where that is not what torch answered, the next runtime is tried, and torch at last.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Lock

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.forks import start_afresh_in_children
from ctxguard.retrieval.protocols import Float32Array
from ctxguard.retrieval.runtimes.encoder import Encoder
from ctxguard.retrieval.runtimes.exported import (
    Exported,
    cache_key,
    default_cache,
    read,
    write,
)
from ctxguard.retrieval.runtimes.sessions import (
    OnnxSession,
    OpenVinoSession,
    Session,
    has_bf16,
    openvino,
)
from ctxguard.retrieval.runtimes.tracing import Traceable, to_onnx, to_openvino

_log = logging.getLogger(__name__)


class Runtime(StrEnum):
    """What computes a model, and in which precision; 32 bits where none is named."""

    OPENVINO_BF16 = "openvino-bf16"
    OPENVINO = "openvino"
    ONNXRUNTIME = "onnxruntime"
    ONNXRUNTIME_INT8 = "onnxruntime-int8"
    TORCH = "torch"

    @property
    def is_lossy(self) -> bool:
        """Whether its answers are not torch's: another model, to indexes and profiles."""
        return self is Runtime.ONNXRUNTIME_INT8


EMBEDDING = (Runtime.OPENVINO_BF16, Runtime.OPENVINO)
"""Tried in this order for vectors, before torch. ONNX Runtime is no faster than OpenVINO and keeps
forked children from ending (`OnnxSession`), so it serves only where it is asked for."""

RERANKING = (Runtime.OPENVINO,)
"""Tried for logits, before torch. A logit has no fixed scale against which bfloat16's error could
be called small, so it serves only where it is asked for."""

_FORMS = {
    Runtime.OPENVINO_BF16: "openvino",
    Runtime.OPENVINO: "openvino",
    Runtime.ONNXRUNTIME: "onnx",
    Runtime.ONNXRUNTIME_INT8: "onnx-int8",
}


class UnfaithfulError(Exception):
    """A runtime whose answers are not torch's; says by how much."""


class NotExportedError(Exception):
    """A model that no other runtime than torch can be given; says why."""


class UnfitProcessorError(Exception):
    """A runtime that this processor is not made for; says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be served.

    Attributes:
        name: For the log.
        weights: Their digest.
        folder: Where its files are.
        trace: Loads it in torch, for exporting.
        ask: Has an encoder answer the probes, as torch did for ``Traceable.expected``.
        deviation: How far answers are from torch's (expected, answered); 0 where they agree.
        most: The largest deviation that counts as none.
    """

    name: str
    weights: str
    folder: Path
    trace: Callable[[], Traceable]
    ask: Callable[[Encoder], Float32Array]
    deviation: Callable[[Float32Array, Float32Array], float]
    most: float


class Served:
    """A model on the runtime chosen for it, opened on first use. Safe to use from many threads.

    Args:
        describe: What is to be served.
        runtime: The one that was asked for; None for the first that serves.
        order: Tried in this order where none was asked for, and torch after them.
        cache: Where exports are kept; None for the user's cache folder.

    Raises:
        ConfigurationError: an unknown runtime.
    """

    def __init__(
        self,
        describe: Callable[[], Model],
        runtime: str | None,
        order: tuple[Runtime, ...],
        cache: Path | None,
    ) -> None:
        self._describe = describe
        self._asked = None if runtime is None else _known(runtime)
        self._order = order
        self._cache = default_cache() if cache is None else cache
        self._opened: tuple[Runtime, Encoder | None] | None = None
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take a new lock: another thread may have been opening it when this process was forked."""
        self._lock = Lock()

    @property
    def lossy(self) -> Runtime | None:
        """The runtime that was asked for, where its answers are not torch's."""
        return self._asked if self._asked is not None and self._asked.is_lossy else None

    @property
    def runtime(self) -> Runtime:
        """What serves the model; opens it."""
        return self._open_once()[0]

    @property
    def encoder(self) -> Encoder | None:
        """The model; None where torch is to serve it.

        Raises:
            MissingExtraError: the runtime that was asked for is not installed.
            ConfigurationError: it cannot serve this model as torch does.
        """
        return self._open_once()[1]

    def _open_once(self) -> tuple[Runtime, Encoder | None]:
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    self._opened = self._choose(self._describe())
        return self._opened

    def _choose(self, model: Model) -> tuple[Runtime, Encoder | None]:
        if self._asked is not None and self._asked is not Runtime.TORCH:
            encoder = self._as_asked(model, self._asked)
            _log.info("%s runs on %s, as asked", model.name, self._asked)
            return self._asked, encoder
        absent = ""
        for runtime in self._order if self._asked is None else ():
            try:
                encoder = _open(model, runtime, self._cache)
            except MissingExtraError as error:
                absent = f"; {error}"
            except UnfitProcessorError:
                continue
            except NotExportedError as error:
                _log.warning("%s cannot leave torch (%s)", model.name, error)
                break
            except Exception as error:
                # Runtimes fail in ways of their own; whatever it was, torch can serve.
                _log.warning("%s does not run on %s (%s)", model.name, runtime, _said(error))
            else:
                _log.info("%s runs on %s", model.name, runtime)
                return runtime, encoder
        _log.info("%s runs on torch%s", model.name, absent)
        return Runtime.TORCH, None

    def _as_asked(self, model: Model, runtime: Runtime) -> Encoder:
        try:
            return _open(model, runtime, self._cache)
        except MissingExtraError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{model.name} cannot run on {runtime} ({_said(error)}); leave the runtime out, or "
                "take torch"
            ) from error


def _open(model: Model, runtime: Runtime, cache: Path | None) -> Encoder:
    """From the cache, or exported anew where nothing there can be used."""
    openvino() if _FORMS[runtime] == "openvino" else require("onnxruntime", "onnx")
    if runtime is Runtime.OPENVINO_BF16 and not has_bf16():
        raise UnfitProcessorError("this processor has no bfloat16; openvino computes in 32 bits")
    key = cache_key(_FORMS[runtime], model.weights, model.folder)
    kept = None if cache is None else read(cache, key)
    if kept is not None:
        try:
            return _checked(model, runtime, kept)
        except Exception as error:
            if runtime is Runtime.OPENVINO_BF16:
                # Fewer bits, or a bad file: in 32 bits it will show which.
                raise
            _log.warning("an export of %s is made anew (%s)", model.name, _said(error))
    fresh = _export(runtime, model)
    encoder = _checked(model, runtime, fresh)
    if cache is not None:
        write(cache, key, fresh)
    return encoder


def _export(runtime: Runtime, model: Model) -> Exported:
    try:
        traceable = model.trace()
        if _FORMS[runtime] == "openvino":
            return to_openvino(traceable)
        return to_onnx(traceable, int8=runtime is Runtime.ONNXRUNTIME_INT8)
    except (MissingExtraError, ConfigurationError):
        raise
    except Exception as error:
        # Exporters fail in ways of their own.
        raise NotExportedError(_said(error)) from error


def _checked(model: Model, runtime: Runtime, exported: Exported) -> Encoder:
    """The model at work, after it answered the probes as torch did."""
    encoder = Encoder(exported, _session(runtime, exported))
    answered = model.ask(encoder)
    if answered.shape != exported.expected.shape or not np.isfinite(answered).all():
        raise UnfaithfulError(
            f"its answers have shape {answered.shape} and are not all finite; torch's have "
            f"shape {exported.expected.shape}"
        )
    deviation = model.deviation(exported.expected, answered)
    if not runtime.is_lossy and not deviation <= model.most:
        raise UnfaithfulError(f"its answers differ from torch's by {deviation:.2g}")
    return encoder


def _session(runtime: Runtime, exported: Exported) -> Session:
    if _FORMS[runtime] == "openvino":
        return OpenVinoSession(exported, "bf16" if runtime is Runtime.OPENVINO_BF16 else "f32")
    return OnnxSession(exported)


def _known(name: str) -> Runtime:
    try:
        return Runtime(name)
    except ValueError:
        raise ConfigurationError(
            f"the runtime {name!r} is unknown; use one of {', '.join(Runtime)}"
        ) from None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
