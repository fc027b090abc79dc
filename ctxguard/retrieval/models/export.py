"""Exports a sentence-transformers model, so that other runtimes can compute it.

Reads the model's files; writes nothing. Needs torch, and the extra `fast`.
"""

import io
import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models.loading import load, quiet_loading, torch
from ctxguard.retrieval.protocols import Float32Array

PROBES = ["a", "Naïve façades – 東京, and 3.14 % of user_names [sic]; (see §4.2)!", "Long. " * 600]
"""Texts whose vectors show whether a runtime computes a model correctly."""

_SAMPLES = [
    "a",
    PROBES[1],
    "How do vaccines train the immune system?",
    "Which medicines lower blood pressure in adults, and what are their side effects?",
    "Who wrote the novel that the film of 1994 was made after",
    "error: connection refused 10.0.0.1:5432 (SQLSTATE 08006)",
]
"""Questions that show which of a model's channels have large values."""


def expected(library: Any) -> Float32Array:
    """Compute the vectors of the probes with only sentence-transformers."""
    options = {"prompt": "", "normalize_embeddings": True, "show_progress_bar": False}
    vectors: Float32Array = library.encode(PROBES, **options)
    return vectors


def text_settings(library: Any) -> tuple[Any, int, list[str]]:
    """Return the tokenizer as sentence-transformers configures it, the padding id and the prompts.

    Raises:
        ConfigurationError: the model's input is not text.
    """
    backend = getattr(library.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigurationError(
            "the model does not accept tokenized text; use another, or implement `Embedder` for "
            "this one"
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
    """Build a torch module that computes unit vectors and token states from ids and mask."""

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
    """Export a model with its pooling, text settings and probe vectors.

    In ``float32``, or with weights rounded to ``int8``, see `_rounded`.
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
    graph = stream.getvalue()
    if form == "int8":
        read = [np.array([tokenizer.encode(text).ids]) for text in _SAMPLES]
        graph = _rounded(graph, [{"ids": ids, "mask": np.ones_like(ids)} for ids in read])
    settings = json.dumps([tokenizer.to_str(), *others]).encode()
    parts = {"graph": graph, "settings": settings}
    arrays = {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
    return {**arrays, "expected": expected(library)}


def _rounded(graph: bytes, samples: Sequence[Mapping[str, NDArray[Any]]]) -> bytes:
    """Round the weights of a graph's products to eight bits; inputs are rounded at run time.

    A product's inputs have one scale, which a few large channels would set: those are made smaller
    and their weights larger, by what they are in the samples (Xiao and others, SmoothQuant, ICML
    2023, equation 4, α = ½). Where more channels come in than go out, after an activation, other
    tokens have other large ones; inputs and weights then have a scale for each block of channels.
    """
    onnx = require("onnx", "fast")
    model = onnx.load_model_from_string(graph)
    floats = {each.name: each for each in model.graph.initializer if len(each.dims) == 2}
    chosen = [
        node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in floats
    ]
    largest = _largest(graph, [node.input[0] for node in chosen], samples)
    tensors: dict[str, NDArray[Any]] = {}
    nodes = []
    for node in model.graph.node:
        if node in chosen:
            (given, name), made = node.input, node.output[0]
            weight = onnx.numpy_helper.to_array(floats[name])
            n_in, n_out = weight.shape
            block = math.gcd(n_in, 128)
            if n_in > n_out and block >= 32:
                size = {"K": n_in, "N": n_out, "bits": 8, "block_size": block}
                kind, options = "MatMulNBits", {**size, "accuracy_level": 4}
                whole, scale = _whole(weight.T.reshape(n_out, n_in // block, block))
                tensors |= {f"{made}.int8": (whole + 128).astype(np.uint8)}
            else:
                kind, options = "DynamicQuantizeMatMul", {}
                inputs, weights = largest[given], np.abs(weight).max(axis=1)
                rise = np.sqrt(_floored(inputs) / _floored(weights)).astype(np.float32)
                tensors[f"{made}.fall"], given = 1 / rise, f"{made}.given"
                nodes.append(onnx.helper.make_node("Mul", [node.input[0], f"{made}.fall"], [given]))
                whole, scale = _whole((weight * rise[:, np.newaxis]).T)
                tensors |= {f"{made}.int8": whole.T.astype(np.int8)}
            tensors[f"{made}.scale"] = scale.reshape(-1)
            inputs_of = [given, f"{made}.int8", f"{made}.scale"]
            node = onnx.helper.make_node(  # noqa: PLW2901
                kind, inputs_of, [made], domain="com.microsoft", **options
            )
        nodes.append(node)
    read = {name for node in nodes for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in read]
    kept += [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()]
    rounded = onnx.helper.make_graph(
        nodes, model.graph.name, model.graph.input, model.graph.output, kept
    )
    versions = [*model.opset_import, onnx.helper.make_opsetid("com.microsoft", 1)]
    made_of = onnx.helper.make_model(rounded, opset_imports=versions, ir_version=model.ir_version)
    content: bytes = made_of.SerializeToString()
    return content


def _largest(
    graph: bytes, names: Sequence[str], samples: Sequence[Mapping[str, NDArray[Any]]]
) -> dict[str, Float32Array]:
    """Compute, inside a graph, the largest magnitude in each channel of some values."""
    onnx = require("onnx", "fast")
    library = require("onnxruntime", "fast")
    model = onnx.load_model_from_string(graph)
    inside = sorted({*names} - {each.name for each in model.graph.input})
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in inside
    )
    session = library.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: dict[str, Float32Array] = {}
    for sample in samples:
        computed = dict(zip(inside, session.run(inside, dict(sample)), strict=False))
        for name in names:
            value = computed[name] if name in computed else sample[name]
            own = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            found[name] = np.maximum(found.get(name, own), own)
    return found


def _floored(magnitudes: Float32Array) -> Float32Array:
    """Raise the magnitudes of channels that are near zero in all samples to a small value."""
    floored: Float32Array = np.maximum(magnitudes, max(0.01 * magnitudes.max(), 1e-6))
    return floored


def _whole(weight: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Round to whole numbers of at most 127; also returns the scale along the last axis."""
    scale = np.maximum(np.abs(weight).max(axis=-1), 1e-12) / 127
    return np.rint(weight / scale[..., np.newaxis]), scale.astype(np.float32)
