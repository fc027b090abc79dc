"""Computes a transformer: in OpenVINO, exported once with torch, or in torch itself.

OpenVINO's own converter traces the whole model, with its pooling: packages made for the purpose lag
behind sentence-transformers. Whenever an export is opened, it computes probes on this processor,
and is used only if its results are torch's.
"""

import ctypes
import json
import logging
import os
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models import files
from ctxguard.retrieval.protocols import Float32Array, Progress

_log = logging.getLogger(__name__)

PROBES = ("a", "Naïve façades – 東京, and 3.14 % of user_names [sic]; (see §4.2)!", "Long. " * 600)
_LARGEST_ERROR = 0.03
"""Norm of an export's error on the probes, relative to the norm of torch's results."""
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_CHUNK = 512
_MOST_TOKENS = 1_000_000

Inputs = list[NDArray[np.int64]]
Tokens = tuple[Sequence[int], Sequence[int]]
"""The ids and the types of a text's tokens."""


class GraphSettings(NamedTuple):
    """How texts become a model's inputs: ``names`` are some of ``_INPUTS``, in its order."""

    tokenizer: str
    names: Sequence[str]
    pad_id: int
    query_prompt: str
    passage_prompt: str

    @classmethod
    def of(cls, model: Any) -> "GraphSettings":
        """Read those of a model of sentence-transformers.

        Raises:
            ConfigurationError: it takes something else than texts.
        """
        names = list(getattr(model.tokenizer, "model_input_names", ()))
        backend = getattr(model.tokenizer, "backend_tokenizer", None)
        if backend is None or not set(_INPUTS[:2]) <= set(names) <= set(_INPUTS):
            raise ConfigurationError(
                f"the model takes {', '.join(names) or 'no tokens'} instead of tokenized text; use "
                "another, or implement `Embedder` or `Reranker` for this one"
            )
        tokenizer = type(backend).from_str(backend.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if (limit := model.tokenizer.model_max_length or _MOST_TOKENS) < _MOST_TOKENS:
            tokenizer.enable_truncation(limit)
        prompts, pad_id = getattr(model, "prompts", {}), int(model.tokenizer.pad_token_id or 0)
        passage = next((name for name in ("document", "passage", "corpus") if name in prompts), "")
        texts = [prompts.get(name) or "" for name in ("query", passage)]
        return cls(tokenizer.to_str(), names, pad_id, *texts)


class Graph:
    """A model that computes tokens. Safe to use from several threads at once.

    Args:
        settings: How texts become its inputs.
        run: Computes its outputs for inputs of shape (n, tokens).
    """

    def __init__(self, settings: GraphSettings, run: "_Torch | _OpenVino") -> None:
        self.settings = settings
        self.run: Any = run
        # Never changed from here on: a thread that uses it would raise "Already borrowed".
        library = require("tokenizers", "embedded")
        self.tokenizer: Any = library.Tokenizer.from_str(settings.tokenizer)

    def inputs(self, tokens: Sequence[Tokens]) -> Inputs:
        """Pad texts of several lengths to the model's inputs."""
        arrays = np.zeros((3, len(tokens), max(len(ids) for ids, _ in tokens)), np.int64)
        arrays[0] = self.settings.pad_id
        for row, (ids, types) in enumerate(tokens):
            n = len(ids)
            arrays[0, row, :n], arrays[1, row, :n], arrays[2, row, :n] = ids, 1, types
        return [dict(zip(_INPUTS, arrays, strict=True))[name] for name in self.settings.names]

    def outputs(self, tokens: Sequence[Tokens]) -> list[Float32Array]:
        """Compute one row per text and, of an encoder, its tokens' states, (n, tokens, d)."""
        outputs: list[Float32Array] = self.run(self.inputs(tokens))
        return outputs

    def rows(
        self, items: Sequence[tuple[str, ...]], progress: Progress | None = None
    ) -> Float32Array:
        """Compute one row per text or pair of texts, at least one; shape (n, width).

        The longest first, so that a lack of memory shows at once, with others of their length.
        """
        rows: list[Any] = [None] * len(items)
        order = sorted(range(len(items)), key=lambda at: -sum(map(len, items[at])))
        for start in range(0, len(order), _CHUNK):
            # One by one: a batch would be tokenized on threads that a fork does not survive.
            read = [(at, self.tokenizer.encode(*items[at])) for at in order[start : start + _CHUNK]]
            read.sort(key=lambda each: -len(each[1]))
            batches = self.share([(each.ids, each.type_ids) for _, each in read], self.run.batch)
            found = [row for outputs in batches for row in outputs[0]]
            for (at, _), row in zip(read, found, strict=True):
                rows[at] = row
            if progress is not None:
                progress(start + len(read))
        return np.array(rows, np.float32)

    def share(self, tokens: Sequence[Tokens], batch: int) -> Iterator[list[Float32Array]]:
        """Compute batches of texts, which threads share; yield their outputs in order.

        The batches do not depend on the number of threads, so neither do the results.
        """
        batches = [tokens[at : at + batch] for at in range(0, len(tokens), batch)]
        if min(self.run.workers, len(batches)) < 2:
            yield from map(self.outputs, batches)
            return
        with ThreadPoolExecutor(self.run.workers, "ctxguard-encode") as threads:
            yield from threads.map(self.outputs, batches)


class GraphModel(ABC):
    """A model on the fastest runtime that gives torch's results, opened on first use.

    Args:
        name: A folder, or a name on the model hub.
        runtime: ``openvino`` or ``torch``; None for OpenVINO if it is installed and right.
        cache: Folder for exports; None for ``ctxguard/models`` in the user's cache folder.

    Raises:
        ConfigurationError: an unknown runtime.
    """

    _lock = OfProcess(Lock)
    _output: ClassVar[str]
    _probes: ClassVar[Sequence[tuple[str, ...]]]
    _precisions: ClassVar[Sequence[str]]

    def __init__(self, name: str, *, runtime: str | None, cache: Path | None) -> None:
        if runtime not in (None, "openvino", "torch"):
            raise ConfigurationError(f"the runtime {runtime!r} is unknown; use openvino or torch")
        self.name, self._requested, self._cache = name, runtime, cache
        self._graph: Graph | None = None

    @abstractmethod
    def _load(self, folder: Path, device: str | None) -> Any:
        """Load the model with sentence-transformers; without a device on the best one."""

    @cached_property
    def folder(self) -> Path:
        """The folder of its files; downloads them if necessary."""
        return files.model_folder(self.name)

    @cached_property
    def weights(self) -> str:
        """The digest of its weights, the same on every runtime."""
        return files.weights_digest(self.folder)

    @property
    def runtime(self) -> str:
        """The library that computes it, ``openvino`` or ``torch``; opens the model."""
        return str(self.graph.run.name)

    @property
    def graph(self) -> Graph:
        """The model, opened."""
        if self._graph is None:
            with self._lock:
                self._graph = self._graph or self._opened()
        return self._graph

    def _opened(self) -> Graph:
        if self._requested != "torch":
            try:
                return self._in_openvino()
            except ConfigurationError:
                raise
            except Exception as error:
                # Exporters fail in ways of their own; whatever happened, torch can be used.
                if self._requested is not None:
                    raise
                # Only the probes were computed, so that no message quotes a request.
                reason = str(error)[:300]
                if isinstance(error, MissingExtraError):
                    _log.info("%s does not run on openvino (%s)", self.name, reason)
                else:
                    _log.warning("%s does not run on openvino (%s)", self.name, reason)
        graph = self._in_torch(None)
        _log.info("%s runs on torch", self.name)
        return graph

    def _in_torch(self, device: str | None) -> Graph:
        torch()
        with quiet_loading():
            model = self._load(self.folder, device)
        settings = GraphSettings.of(model)
        return Graph(settings, _Torch(model, settings.names, self._output))

    def _in_openvino(self) -> Graph:
        """Open the export in the first precision whose results for the probes are torch's."""
        key = files.cache_key(f"openvino-{openvino().__version__}", self.weights, self.folder)
        export = files.kept(self._cache, key, self._export)
        settings = GraphSettings(*json.loads(export["settings"].tobytes()))
        expected = export["expected"]
        for precision in self._precisions:
            run = _OpenVino(export["graph"].tobytes(), export["weights"].tobytes(), precision)
            graph = Graph(settings, run)
            error = np.linalg.norm(graph.rows(self._probes) - expected) / np.linalg.norm(expected)
            if error <= _LARGEST_ERROR:
                break
        else:
            raise ValueError(f"its results differ from torch's by {error:.2g}")
        _log.info("%s runs on openvino in %s", self.name, run.precision)
        return graph

    def _export(self) -> dict[str, NDArray[Any]]:
        """Convert the model from torch, with torch's results for the probes."""
        library, converter, graph = torch(), openvino(), self._in_torch("cpu")
        read = [graph.tokenizer.encode(probe) for probe in PROBES[:2]]
        example = graph.inputs([(each.ids, each.type_ids) for each in read])
        with (
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(),
            quiet_loading(),
            library.no_grad(),
        ):
            warnings.simplefilter("ignore")
            tensors = tuple([library.from_numpy(each) for each in example])
            model = converter.convert_model(graph.run.module, example_input=tensors)
            file = Path(folder) / "model.xml"
            converter.save_model(model, file, compress_to_fp16=False)
            parts = {"graph": file.read_bytes(), "weights": file.with_suffix(".bin").read_bytes()}
        parts["settings"] = json.dumps(graph.settings).encode()
        arrays = {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
        return {**arrays, "expected": graph.rows(self._probes)}


class _Torch:
    """A model in torch: one call at a time, on all its threads."""

    name, batch, workers = "torch", 32, 1
    _lock = OfProcess(Lock)

    def __init__(self, model: Any, names: Sequence[str], output: str) -> None:
        library = torch()

        class Whole(library.nn.Module):  # type: ignore[misc, name-defined]
            """The model as a function of tensors."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *inputs: Any) -> Any:
                found = self.model(dict(zip(names, inputs, strict=True)))
                if output != "sentence_embedding":
                    return (found[output],)
                unit_rows = library.nn.functional.normalize(found[output], dim=-1)
                return unit_rows, found["token_embeddings"]

        self.module = Whole().eval()

    def __call__(self, inputs: Inputs) -> list[Float32Array]:
        library, device = torch(), self.module.model.device
        with self._lock, library.inference_mode():
            outputs = self.module(*[library.from_numpy(each).to(device) for each in inputs])
            return [each.float().cpu().numpy() for each in outputs]


def _never_destroy(thing: object) -> None:
    """Keep an object whose destructor would wait for threads that a forked child does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _OpenVino:
    """An exported model in OpenVINO: any number of calls at once, each on one thread.

    Its results then do not depend on the number of threads, and clients do not wait for each other.
    """

    name, batch = "openvino", 8  # more texts at once outgrow a core's cache
    _lock = OfProcess(Lock)
    # A forked child, which has none of the threads, compiles again at its next call.
    _compiled = OfProcess[Any](lambda: None, _never_destroy)

    def __init__(self, graph: bytes, weights: bytes, precision: str) -> None:
        self._model = _core(os.getpid()).read_model(graph, weights)
        self.workers = processors()
        self._settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "NUM_STREAMS": self.workers,
            "INFERENCE_NUM_THREADS": self.workers,
            # Pinned threads would share a core with those of another process.
            "ENABLE_CPU_PINNING": False,
        }

    @property
    def precision(self) -> str:
        """The precision in which it computes: the one asked for, if the processor has it."""
        return str(self._ready().get_property("INFERENCE_PRECISION_HINT").to_string())

    def _ready(self) -> Any:
        with self._lock:
            if self._compiled is None:
                core = _core(os.getpid())
                self._compiled = core.compile_model(self._model, "CPU", self._settings)
            return self._compiled

    def __call__(self, inputs: Inputs) -> list[Float32Array]:
        request = self._ready().create_infer_request()
        request.infer(inputs, share_inputs=True)
        return [np.array(each.data, np.float32) for each in request.output_tensors]


@cache
def _core(_process: int) -> Any:
    """Make OpenVINO's entry point, one for each process, which is never destroyed.

    The thread that makes one gets an alternate signal stack. Destroying it on another thread
    frees that stack, and the first thread's next signal then ends the process.
    """
    core = openvino().Core()
    _never_destroy(core)
    return core


def openvino() -> Any:
    """Import OpenVINO without its telemetry, which reports every import to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return require("openvino", "fast")


def processors() -> int:
    """Return the number of threads to use: one per processor, or fewer by `OMP_NUM_THREADS`."""
    if sys.platform == "linux":
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(limit)) if limit.isdecimal() and int(limit) else available


@cache
def torch() -> Any:
    """Import torch, and make it compute on one thread in processes forked from now on.

    The threads of its pool stay in the parent; a child would wait for them for ever.
    """
    library = require("torch", "embedded")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(library.set_num_threads, 1))
    return library


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bar and the remarks that transformers writes to standard error."""
    library = require("transformers.utils.logging", "embedded")
    level, had_bar = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if had_bar:
            library.enable_progress_bar()
