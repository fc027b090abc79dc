"""Reads off a model of sentence-transformers what other runtimes need to compute it."""

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.loading import load, quiet_loading, torch
from ctxguard.retrieval.protocols import Float32Array

PROBES = ["a", "Naïve façades – 東京, and 3.14 % of user_names [sic]; (see §4.2)!", "Long. " * 600]
"""Texts whose vectors tell whether a runtime computes a model rightly."""


def expected(library: Any) -> Float32Array:
    """Compute the vectors of the probes with sentence-transformers alone."""
    options = {"prompt": "", "normalize_embeddings": True, "show_progress_bar": False}
    vectors: Float32Array = library.encode(PROBES, **options)
    return vectors


def text_settings(library: Any) -> tuple[Any, int, list[str]]:
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


def tensor_module(library: Any) -> Any:
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


def exported(folder: Path, form: str) -> dict[str, NDArray[Any]]:
    """Export a model, pooling included, with what its texts need and its vectors of the probes.

    Args:
        folder: Where the model lies.
        form: ``float32``, or ``int8`` for rounded weights, see `_rounded`.
    """
    require("onnx", "fast")
    # Attention as torch writes it out makes a graph of fewer steps than its own kernel's.
    plain = {"attn_implementation": "eager"}
    library = load("SentenceTransformer", folder, device="cpu", model_kwargs=plain)
    tokenizer, *others = text_settings(library)
    inputs, outputs = ["ids", "mask"], ["vectors", "states"]
    sizes = {name: {0: "texts", 1: "tokens"} for name in [*inputs, "states"]}
    stream = io.BytesIO()
    with warnings.catch_warnings(), quiet_loading(), torch().no_grad():
        warnings.simplefilter("ignore")
        torch().onnx.export(
            tensor_module(library),
            (torch().ones((2, 8), dtype=torch().int64),) * 2,
            stream,
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={**sizes, "vectors": {0: "texts"}},
            opset_version=17,
            # The newer exporter needs two packages more and ten times as long.
            dynamo=False,
        )
    graph = _rounded(stream.getvalue()) if form == "int8" else stream.getvalue()
    settings = json.dumps([tokenizer.to_str(), *others]).encode()
    parts = {"graph": graph, "settings": settings}
    arrays = {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
    return {**arrays, "expected": expected(library)}


def _rounded(graph: bytes) -> bytes:
    """Round weights to eight bits, each column by its own scale; other inputs when it runs.

    onnxruntime's own tool does the same in ten times as long, and sets up the root logger.
    """
    onnx = require("onnx", "fast")
    model = onnx.load_model_from_string(graph)
    floats = {each.name: each for each in model.graph.initializer if len(each.dims) == 2}
    made = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and (name := node.input[1]) in floats:
            weight = onnx.numpy_helper.to_array(floats[name])
            scale = np.maximum(np.abs(weight).max(axis=0), 1e-12) / 127
            made[f"{name}.int8"] = np.rint(weight / scale).astype(np.int8)
            made[f"{name}.scale"] = scale.astype(np.float32)
            node.op_type, node.domain = "DynamicQuantizeMatMul", "com.microsoft"
            node.input[1:] = [f"{name}.int8", f"{name}.scale"]
    read = {name for node in model.graph.node for name in node.input}
    for name in floats.keys() - read:
        model.graph.initializer.remove(floats[name])
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in made.items()
    )
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    content: bytes = model.SerializeToString()
    return content
