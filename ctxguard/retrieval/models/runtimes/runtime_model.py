"""A model on the fastest installed runtime that gives torch's own results.

Whenever an exported model is opened, it computes a few probe texts on this processor and with these
libraries. If the results differ from torch's, the next runtime is tried, and torch last.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models.files import model_folder, weights_digest
from ctxguard.retrieval.models.runtimes.encoder import Encoder
from ctxguard.retrieval.models.runtimes.exported import (
    Exported,
    cache_key,
    default_cache,
    read,
    write,
)
from ctxguard.retrieval.models.runtimes.openvino_session import OpenVinoSession, has_bf16, openvino
from ctxguard.retrieval.models.runtimes.torch_model import TorchModel, TorchSession
from ctxguard.retrieval.models.runtimes.tracing import (
    Traceable,
    UntraceableModelError,
    to_openvino,
)
from ctxguard.retrieval.protocols import Float32Array

_log = logging.getLogger(__name__)


class Runtime(StrEnum):
    """The library that computes a model, and its precision; 32 bits unless one is named."""

    OPENVINO_BF16 = "openvino-bf16"
    OPENVINO = "openvino"
    TORCH = "torch"


class UnfaithfulError(Exception):
    """A runtime's results differ from torch's; the message gives the deviation."""


class UnfitProcessorError(Exception):
    """This processor lacks a feature that a runtime needs; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelTask:
    """The computation of one kind of model, and its accepted deviation from torch.

    Attributes:
        runtimes: Runtimes to try, in order, unless one is requested; torch follows them.
        load: Loads the model from its folder in torch, on a device such as ``cpu``; None for the
            one that sentence-transformers chooses.
        trace: Prepares a loaded model for the converter.
        run_probes: Computes the probes, in the order of ``Traceable.expected``.
        deviation: Distance of results from torch's, called with (expected, computed); 0 if they
            are equal.
        max_deviation: The largest accepted difference from torch.
    """

    runtimes: tuple[Runtime, ...]
    load: Callable[[Path, str | None], Any]
    trace: Callable[[Any], Traceable]
    run_probes: Callable[[Encoder], Float32Array]
    deviation: Callable[[Float32Array, Float32Array], float]
    max_deviation: float


class RuntimeModel:
    """A model on the runtime chosen for it, loaded on first use. Safe to use from many threads.

    Args:
        name: A folder, or a name on the model hub.
        task: The computation.
        runtime: The only runtime to use; None for the task's first that works.
        cache: As for `SentenceTransformerEmbedder`.
        folder: Folder of its files; None to find them by name, on first use.

    Attributes:
        torch: The model in torch, for use if ``encoder`` is None.

    Raises:
        ConfigurationError: an unknown runtime.
    """

    _lock = OfProcess(Lock)

    def __init__(
        self,
        name: str,
        task: ModelTask,
        *,
        runtime: str | None,
        cache: Path | None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.torch = TorchModel(lambda: task.load(self.folder, None))
        self._task = task
        self._requested = None if runtime is None else _known(runtime)
        self._cache = default_cache() if cache is None else cache
        self._given_folder = folder
        self._opened: tuple[Runtime, Encoder | None] | None = None
        self._table: Float32Array | None = None

    @cached_property
    def folder(self) -> Path:
        """The folder of the model's files; downloads them if necessary.

        Raises:
            ConfigurationError: no such model.
        """
        return self._given_folder or model_folder(self.name)

    @cached_property
    def weights(self) -> str:
        """The digest of the weights, see `weights_digest`."""
        return weights_digest(self.folder)

    @property
    def runtime(self) -> Runtime:
        """The runtime that computes the model; loads it."""
        return self._open_once()[0]

    @property
    def encoder(self) -> Encoder | None:
        """The model on a runtime other than torch; None if torch computes it.

        Raises:
            MissingExtraError: the requested runtime is not installed.
            ConfigurationError: it cannot compute this model as torch does.
        """
        return self._open_once()[1]

    def token_encoder(self) -> Encoder | None:
        """Return the model on its runtime, torch included; None if it gives no states of tokens.

        Raises:
            MissingExtraError, ConfigurationError: as for ``encoder``.
        """
        encoder = self.encoder or self._torch_encoder
        return encoder if encoder is not None and encoder.gives_tokens else None

    @cached_property
    def _torch_encoder(self) -> Encoder | None:
        try:
            with self.torch.held() as model:
                traceable = self._task.trace(model)
        except UntraceableModelError:
            return None
        return Encoder(traceable, TorchSession(self.torch, traceable), self._kept_table)

    def _kept_table(self, make: Callable[[], Float32Array]) -> Float32Array:
        """Return the states of single word pieces, from the cache if it has them."""
        with self._lock:
            if self._table is None:
                key = cache_key(self.weights, self.folder, "table")
                kept = read(self._cache, key)
                self._table = make() if kept is None else kept["table"]
                if kept is None:
                    write(self._cache, key, {"table": self._table})
            return self._table

    def _open_once(self) -> tuple[Runtime, Encoder | None]:
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    self._opened = self._choose()
        return self._opened

    def _choose(self) -> tuple[Runtime, Encoder | None]:
        requested, missing = self._requested, ""
        for runtime in self._task.runtimes if requested is None else (requested,):
            if runtime is Runtime.TORCH:
                break
            try:
                encoder = self._open(runtime)
            except MissingExtraError as error:
                if requested is not None:
                    raise
                missing = f"; {error}"
            except Exception as error:
                # Runtimes fail in ways of their own; whatever happened, torch can be used.
                reason = _error_summary(error)
                if requested is not None:
                    raise ConfigurationError(
                        f"{self.name} cannot run on {runtime} ({reason}); leave the runtime out, "
                        "or use torch"
                    ) from error
                if isinstance(error, UntraceableModelError):
                    _log.warning("%s cannot be exported from torch (%s)", self.name, reason)
                    break
                if not isinstance(error, UnfitProcessorError):
                    _log.warning("%s does not run on %s (%s)", self.name, runtime, reason)
            else:
                _log.info("%s runs on %s", self.name, runtime)
                return runtime, encoder
        _log.info("%s runs on torch%s", self.name, missing)
        return Runtime.TORCH, None

    def _open(self, runtime: Runtime) -> Encoder:
        """Open the export in the cache, or export the model if that one cannot be used."""
        openvino()
        if runtime is Runtime.OPENVINO_BF16 and not has_bf16():
            raise UnfitProcessorError("this processor has no bfloat16")
        key = cache_key(self.weights, self.folder)
        cached = read(self._cache, key)
        if cached is not None:
            try:
                return self._checked(runtime, Exported.of(cached))
            except Exception as error:
                if runtime is Runtime.OPENVINO_BF16:
                    # Precision or file may be at fault: 32 bits, tried next, tell which.
                    raise
                reason = _error_summary(error)
                _log.warning("%s is exported again (%s)", self.name, reason)
        exported = self._export()
        encoder = self._checked(runtime, exported)
        write(self._cache, key, exported.arrays())
        return encoder

    def _export(self) -> Exported:
        try:
            return to_openvino(self._task.trace(self._task.load(self.folder, "cpu")))
        except (MissingExtraError, ConfigurationError, UntraceableModelError):
            raise
        except Exception as error:
            # Exporters fail in ways of their own.
            raise UntraceableModelError(_error_summary(error)) from error

    def _checked(self, runtime: Runtime, exported: Exported) -> Encoder:
        """Open the exported model and compare its results for the probes with torch's."""
        precision = "bf16" if runtime is Runtime.OPENVINO_BF16 else "f32"
        encoder = Encoder(exported, OpenVinoSession(exported, precision), self._kept_table)
        expected, computed = exported.expected, self._task.run_probes(encoder)
        if computed.shape != expected.shape or not np.isfinite(computed).all():
            raise UnfaithfulError(
                f"its results have shape {computed.shape} and are not all finite; torch's have "
                f"shape {expected.shape}"
            )
        deviation = self._task.deviation(expected, computed)
        if not deviation <= self._task.max_deviation:
            raise UnfaithfulError(f"its results differ from torch's by {deviation:.2g}")
        return encoder


def _known(name: str) -> Runtime:
    try:
        return Runtime(name)
    except ValueError:
        raise ConfigurationError(
            f"the runtime {name!r} is unknown; use one of {', '.join(Runtime)}"
        ) from None


def _error_summary(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
