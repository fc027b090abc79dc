"""Converts a sentence-transformers model in torch to a graph for OpenVINO.

The whole model is traced, with its pooling and normalisation, by OpenVINO's own converter: packages
made for the purpose lag behind sentence-transformers.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.retrieval.models.runtimes.exported import Exported, Inputs
from ctxguard.retrieval.models.runtimes.openvino_session import openvino
from ctxguard.retrieval.protocols import Float32Array

PROBE_QUERY = "How long may a request wait before it is answered?"
PROBES = (
    "a",
    PROBE_QUERY,
    "Naïve façades – 東京, Ελλάδα, and 3.14159 % of user_names [sic]; (see §4.2)!",
    "The longest probe is cut, so that it shows how a model's limit is kept. " * 60,
)
"""Texts of several lengths, on which an exported model's results are compared with torch's."""

_KNOWN_INPUTS = frozenset(("input_ids", "attention_mask", "token_type_ids"))
_MOST_TOKENS = 1_000_000


class UntraceableModelError(Exception):
    """Only torch can run this model; the message says why."""


@dataclass(frozen=True, slots=True)
class Traceable:
    """A model in torch, with its results for the probes.

    Attributes:
        module: Takes the inputs in the order of their names and returns a tensor (n, width),
            followed by the tokens' states (n, tokens, d) if the model gives them.
        tokenizer: The content of a ``tokenizer.json``.
        inputs: The conversion of texts to arrays.
        expected: torch's results for the probes, shape (n_probes, width).
        n_outputs: Number of tensors that the module returns.
    """

    module: Any
    tokenizer: bytes
    inputs: Inputs
    expected: Float32Array
    n_outputs: int


def traceable_embedder(model: Any) -> Traceable:
    """Prepare a ``SentenceTransformer``; its results are unit vectors.

    Raises:
        UntraceableModelError: it takes inputs other than tokenized texts.
    """
    prompts = model.prompts
    passage = next((name for name in ("document", "passage", "corpus") if name in prompts), None)
    inputs = replace(
        _inputs(model),
        query_prompt=prompts.get("query") or "",
        passage_prompt=(prompts.get(passage) or "") if passage else "",
    )
    settings = {"normalize_embeddings": True, "show_progress_bar": False}
    expected = np.concatenate(
        [
            np.asarray(model.encode_query(list(PROBES), **settings), np.float32),
            np.asarray(model.encode_document(list(PROBES), **settings), np.float32),
        ]
    )
    return _traceable(model, "sentence_embedding", inputs, expected)


def traceable_cross_encoder(model: Any) -> Traceable:
    """Prepare a ``CrossEncoder`` with one output and no activation; its results are logits.

    Raises:
        UntraceableModelError: it takes inputs other than tokenized texts.
    """
    pairs = [(PROBE_QUERY, probe) for probe in PROBES]
    expected = np.asarray(model.predict(pairs, show_progress_bar=False), np.float32)
    return _traceable(model, "scores", _inputs(model), expected.reshape(-1, 1))


def to_openvino(model: Traceable) -> Exported:
    """Convert a model for OpenVINO, in 32 bits.

    Raises:
        MissingExtraError: OpenVINO is not installed.
    """
    library = openvino()
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        graph = library.convert_model(model.module, example_input=_example(model.inputs))
        file = Path(folder) / "model.xml"
        library.save_model(graph, file, compress_to_fp16=False)
        weights = file.with_suffix(".bin").read_bytes()
        return Exported(file.read_bytes(), weights, model.tokenizer, model.inputs, model.expected)


def _inputs(model: Any) -> Inputs:
    tokenizer = model.tokenizer
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UntraceableModelError("its tokenizer is not one of the library `tokenizers`")
    names = tuple(tokenizer.model_input_names)
    if not {"input_ids", "attention_mask"} <= set(names) <= _KNOWN_INPUTS:
        raise UntraceableModelError(f"it takes the inputs {', '.join(names)}")
    limit = tokenizer.model_max_length
    return Inputs(
        names=names,
        max_tokens=int(limit) if limit is not None and limit < _MOST_TOKENS else None,
        pad_id=int(tokenizer.pad_token_id or 0),
        pad_type_id=int(getattr(tokenizer, "pad_token_type_id", 0)),
    )


def _traceable(model: Any, output: str, inputs: Inputs, expected: Float32Array) -> Traceable:
    torch: Any = require("torch", "embedded")

    class Whole(torch.nn.Module):  # type: ignore[misc]
        """The model as a function of tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Any) -> Any:
            results = self.model(dict(zip(inputs.names, tensors, strict=True)))
            if output != "sentence_embedding":
                return results[output]
            unit = torch.nn.functional.normalize(results[output], dim=-1)
            return (unit, results["token_embeddings"]) if "token_embeddings" in results else unit

    tokenizer = model.tokenizer.backend_tokenizer.to_str().encode()
    whole = Whole().eval()
    with torch.inference_mode():
        outputs = whole(*[each.to(model.device) for each in _example(inputs)])
    n_outputs = len(outputs) if isinstance(outputs, tuple) else 1
    return Traceable(whole, tokenizer, inputs, expected, n_outputs)


def _example(inputs: Inputs) -> tuple[Any, ...]:
    """Return two texts of different lengths."""
    torch = require("torch", "embedded")
    mask = torch.ones((2, 8), dtype=torch.int64)
    mask[1, 5:] = 0
    columns = {
        "input_ids": mask + inputs.pad_id * (1 - mask),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(mask),
    }
    return tuple([columns[name] for name in inputs.names])


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable gradients, and the converters' notes on constants and missing libraries."""
    torch = require("torch", "embedded")
    loggers = [logging.getLogger(name) for name in ("transformers", "root")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
