"""A model exported from torch, and its file.

The file is an archive of plain arrays in the user's cache folder, named after the sources of the
export. It is read as a whole, and used only if its digest is right.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.cache_folder import cache_folder
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.protocols import Float32Array

_log = logging.getLogger(__name__)

_FORMAT = 2
_SETTINGS = ("*.json", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The conversion of texts to the inputs of a graph.

    Attributes:
        names: The graph's inputs, in its order: some of ``input_ids``, ``attention_mask`` and
            ``token_type_ids``.
        max_tokens: Longer texts are cut; None disables it.
        pad_id: The token that pads short texts of a batch.
        pad_type_id: The type of that token.
        query_prompt: Text put before a query.
        passage_prompt: Text put before a passage.
    """

    names: tuple[str, ...]
    max_tokens: int | None
    pad_id: int
    pad_type_id: int
    query_prompt: str = ""
    passage_prompt: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that no longer needs torch.

    Attributes:
        graph: OpenVINO's description of the graph, XML.
        weights: The graph's constants.
        tokenizer: The content of a ``tokenizer.json``.
        inputs: The conversion of texts to arrays.
        expected: torch's results for the probes, shape (n_probes, width).
    """

    graph: bytes
    weights: bytes
    tokenizer: bytes
    inputs: Inputs
    expected: Float32Array

    @classmethod
    def of(cls, arrays: dict[str, Any]) -> Self:
        """Take a model from its arrays, as `arrays` gave them."""
        inputs = json.loads(arrays["inputs"].tobytes())
        return cls(
            graph=arrays["graph"].tobytes(),
            weights=arrays["weights"].tobytes(),
            tokenizer=arrays["tokenizer"].tobytes(),
            inputs=Inputs(**{**inputs, "names": tuple(inputs["names"])}),
            expected=np.asarray(arrays["expected"], np.float32),
        )

    def arrays(self) -> dict[str, Any]:
        """Return the model as arrays, to be kept."""
        inputs = json.dumps(asdict(self.inputs)).encode()
        contents = (self.graph, self.weights, self.tokenizer, inputs)
        names = ("graph", "weights", "tokenizer", "inputs")
        parts = {n: np.frombuffer(each, np.uint8) for n, each in zip(names, contents, strict=True)}
        return {"expected": self.expected, **parts}


def default_cache() -> Path | None:
    """Return ``models`` in the user's cache folder; None if the user has no home folder."""
    try:
        return cache_folder() / "models"
    except ConfigurationError:
        return None


def cache_key(weights: str, folder: Path, kind: str = "openvino") -> str:
    """Hash the sources of an export: the weights, and the model's other files.

    Args:
        weights: The digest of the weights.
        folder: The model's folder; the same weights under another pooling are another model.
        kind: Content of the file: ``openvino`` for an export, ``pieces`` for its token table.
    """
    digest = hashlib.sha256(f"{_FORMAT}\0{kind}\0{weights}".encode())
    for file in sorted({file for pattern in _SETTINGS for file in folder.rglob(pattern)}):
        digest.update(f"\0{file.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{kind}-{digest.hexdigest()[:32]}"


def read(cache: Path | None, key: str) -> dict[str, Any] | None:
    """Read the arrays stored under a key; None if there are none, or their file is damaged.

    Args:
        cache: The folder; None for none.
        key: From `cache_key`.
    """
    if cache is None:
        return None
    file = cache / f"{key}.npz"
    try:
        # Opened here, since a damaged archive would leave numpy's own handle open.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            parts = {name: arrays[name] for name in arrays.files}
        if parts.pop("digest").tobytes() != _digest(key, parts):
            raise ValueError("its digest is wrong")
        return parts
    except FileNotFoundError:
        return None
    except Exception as error:
        # A damaged archive may raise anything.
        _log.warning(
            "%s is damaged or was not made for this model (%s); it is made again",
            file,
            type(error).__name__,
        )
        return None


def write(cache: Path | None, key: str, parts: dict[str, Any]) -> None:
    """Store arrays under a key, replacing any that are there; arguments as for `read`.

    If that fails, a warning is logged; the next start makes them again.
    """
    if cache is None:
        return
    digest = np.frombuffer(_digest(key, parts), np.uint8)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(cache / f"{key}.npz") as stream:
            np.savez(stream, allow_pickle=False, digest=digest, **parts)
    except OSError as error:
        _log.warning(
            "%s could not be kept in %s (%s); every start will make it again",
            "the token table" if "table" in parts else "the exported model",
            cache,
            error.strerror or type(error).__name__,
        )


def _digest(key: str, parts: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(key.encode())
    for name, array in sorted(parts.items()):
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
