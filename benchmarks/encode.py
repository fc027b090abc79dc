"""Encoding and reranking on every runtime, with what each costs in fidelity and in quality.

    python -m benchmarks.encode --threads 1 --scifact DIR --json encode.json

A query, passages a second, and 50 passages reranked, each runtime in turns; then, over a whole BEIR
folder, the cosine of every vector with torch's and nDCG@10 of the dense leg and of the hybrid
search. That second part encodes the corpus once per runtime, which takes minutes; --no-quality
leaves it out. Without --cross-encoder the one that is timed has the bundled model's body and an
untrained head: its time is that of any other of the size, its logits are narrow.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks._collection import all_splits
from benchmarks._timing import Timing, environment, interleaved
from calibration.data.dataset import Dataset
from calibration.data.readers import read_corpus
from ctxguard.core.metrics import ndcg
from ctxguard.core.types import Passage, Route
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import bundled_model
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.models.runtimes import Runtime
from ctxguard.retrieval.models.runtimes.torch_model import quiet_loading
from ctxguard.retrieval.protocols import Float32Array

RUNTIMES = (Runtime.TORCH, Runtime.OPENVINO, Runtime.OPENVINO_BF16)
PASSAGES = 64
RERANKED = 50
CUTOFF = 10
QUERY_BAR_MILLISECONDS = 5.0
PASSAGES_BAR = 3.0
NDCG_BAR = 0.005
_PACKAGES = (
    *("sentence-transformers", "transformers", "tokenizers", "torch"),
    *("openvino", "numpy"),
)

Model = TypeVar("Model", SentenceTransformerEmbedder, CrossEncoderReranker)
Embedders = Mapping[Runtime, SentenceTransformerEmbedder]


def on_every_runtime(make: Callable[[Runtime], Model]) -> tuple[dict[Runtime, Model], list[str]]:
    """The models that can be had, loaded, and why the others cannot."""
    models, absent = {}, []
    for runtime in RUNTIMES:
        try:
            model = make(runtime)
            if model.runtime is runtime:
                models[runtime] = model
        except (ConfigurationError, MissingExtraError) as error:
            absent.append(f"{runtime}: {error}")
    return models, absent


def untrained_cross_encoder(folder: Path) -> Path:
    """The bundled model's body under a head of one output, saved."""
    import torch
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    with quiet_loading():
        CrossEncoder(str(bundled_model()), num_labels=1, device="cpu").save_pretrained(str(folder))
    return folder


def time_queries(models: Embedders, queries: Sequence[str], rounds: int) -> dict[str, Timing]:
    """One query after another, from one client."""

    def case(embedder: SentenceTransformerEmbedder) -> Callable[[], object]:
        texts = cycle(queries)
        return lambda: embedder.encode_query(next(texts))

    cases = {runtime.value: case(embedder) for runtime, embedder in models.items()}
    return interleaved(cases, rounds=rounds, calls=len(queries), seconds=4.0)


def time_passages(models: Embedders, texts: Sequence[str], rounds: int) -> dict[str, Timing]:
    """The same passages, encoded together."""

    def case(embedder: SentenceTransformerEmbedder) -> Callable[[], object]:
        return lambda: embedder.encode_passages(texts)

    cases = {runtime.value: case(embedder) for runtime, embedder in models.items()}
    return interleaved(cases, rounds=rounds, calls=1, seconds=1.0)


def time_reranking(
    models: Mapping[Runtime, CrossEncoderReranker],
    queries: Sequence[str],
    texts: Sequence[str],
    rounds: int,
) -> dict[str, Timing]:
    """One query with its candidates after another."""

    def case(reranker: CrossEncoderReranker) -> Callable[[], object]:
        asked = cycle(queries)
        return lambda: reranker.score(next(asked), texts)

    cases = {runtime.value: case(reranker) for runtime, reranker in models.items()}
    return interleaved(cases, rounds=rounds, calls=1, seconds=1.0)


def rerank_fidelity(
    models: Mapping[Runtime, CrossEncoderReranker], queries: Sequence[str], texts: Sequence[str]
) -> dict[str, dict[str, float]]:
    """How far logits lie from torch's: the largest difference, and the correlation."""
    logits = {
        runtime: np.concatenate([reranker.score(query, texts) for query in queries])
        for runtime, reranker in models.items()
    }
    reference = logits[Runtime.TORCH]
    return {
        runtime.value: {
            "largest_difference": float(np.abs(found - reference).max()),
            "correlation": float(np.corrcoef(found, reference)[0, 1]),
        }
        for runtime, found in logits.items()
    }


def quality(models: Embedders, folder: Path) -> dict[str, dict[str, float]]:
    """Over every passage and labelled query: the least cosine with torch's vector, and nDCG@10."""
    passages, dataset = list(read_corpus(folder)), all_splits(folder)
    results: dict[str, dict[str, float]] = {}
    reference: dict[str, Float32Array] = {}
    for runtime, embedder in models.items():
        keeping = _Keeping(embedder)
        retriever = HybridRetriever.build(passages, embedder=keeping)
        vectors = {query.text: embedder.encode_query(query.text) for query in dataset.queries}
        queries = np.stack([vectors[query.text] for query in dataset.queries])
        reference = reference or {"passages": keeping.vectors, "queries": queries}
        results[runtime.value] = {
            "least_cosine_of_passages": _least_cosine(reference["passages"], keeping.vectors),
            "least_cosine_of_queries": _least_cosine(reference["queries"], queries),
            **{
                f"ndcg_{route.value}": _mean_ndcg(retriever.on_route(route), dataset, vectors)
                for route in (Route.DENSE, Route.HYBRID)
            },
        }
        sys.stdout.write(f"  {runtime.value:18}{json.dumps(results[runtime.value])}\n")
        sys.stdout.flush()
    return results


class _Keeping:
    """An embedder that keeps the passages' vectors."""

    def __init__(self, embedder: SentenceTransformerEmbedder) -> None:
        self._embedder = embedder
        self.name = embedder.name
        self.dimension = embedder.dimension
        self.encode_query = embedder.encode_query
        self.fingerprint = embedder.fingerprint
        self.vectors = np.zeros((0, embedder.dimension), np.float32)

    def encode_passages(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> Float32Array:
        self.vectors = self._embedder.encode_passages(texts, progress)
        return self.vectors


def _least_cosine(reference: Float32Array, found: Float32Array) -> float:
    return float((reference * found).sum(axis=1).min())


def _mean_ndcg(
    retriever: HybridRetriever, dataset: Dataset, vectors: Mapping[str, Float32Array]
) -> float:
    found = []
    for query in dataset.queries:
        grades = dataset.qrels.get(query.query_id, {})
        ranking = retriever.retrieve(query.text, query_vector=vectors[query.text])
        top = [grades.get(passage_id, 0) for passage_id in ranking.passage_ids[:CUTOFF]]
        gained = ndcg(top, list(grades.values()), CUTOFF)
        if gained is not None:
            found.append(gained)
    return statistics.fmean(found)


def show(title: str, timings: Mapping[str, Timing], per_call: int, unit: str) -> None:
    """A table of timings, against torch."""
    sys.stdout.write(f"\n{title}\n")
    base = timings.get(Runtime.TORCH.value)
    for name, timing in timings.items():
        faster = "" if base is None else f"{base.p50 / timing.p50:7.1f}x"
        rate = "" if per_call == 1 else f"{per_call / timing.p50 * 1e6:8.1f} {unit}/s"
        sys.stdout.write(
            f"  {name:18} p50 {timing.p50 / 1e3:9.2f} ms ({timing.lowest_p50 / 1e3:.2f} to "
            f"{timing.highest_p50 / 1e3:.2f})   p99 {timing.p99 / 1e3:9.2f} ms {faster} {rate}\n"
        )


def bars(report: Mapping[str, Any], default: str) -> dict[str, bool]:
    """Whether the default runtime is as fast and as good as it is meant to be."""
    torch, query, passages = Runtime.TORCH.value, report["query"], report["passages"]
    met = {
        f"a query within {QUERY_BAR_MILLISECONDS:g} ms at p50": query[default]["p50"] / 1e3
        <= QUERY_BAR_MILLISECONDS,
        f"passages at {PASSAGES_BAR:g} times torch's rate": passages[torch]["p50"]
        >= PASSAGES_BAR * passages[default]["p50"],
    }
    if "quality" in report:
        lost = [
            report["quality"][torch][name] - report["quality"][default][name]
            for name in ("ndcg_dense", "ndcg_hybrid")
        ]
        met[f"nDCG@{CUTOFF} within {NDCG_BAR:g} of torch's"] = max(map(abs, lost)) <= NDCG_BAR
    return met


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Encoding and reranking on every runtime.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scifact", type=Path, default=Path("../shared/data/scifact"))
    parser.add_argument("--cross-encoder", type=Path, help="a folder; see above")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-quality", action="store_true", help="leave the long part out")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    # Read by every runtime when it opens a model, and by torch when it is imported.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        cross_encoder = arguments.cross_encoder or untrained_cross_encoder(Path(folder))
        report = measure(arguments, cross_encoder)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(arguments: argparse.Namespace, cross_encoder: Path) -> dict[str, Any]:
    """Every figure, printed as it is found."""
    default = SentenceTransformerEmbedder().runtime.value
    report: dict[str, Any] = {
        "environment": environment(_PACKAGES, arguments.threads),
        "default": default,
    }
    sys.stdout.write(json.dumps(report["environment"], indent=2) + f"\ndefault: {default}\n")
    passages = _first_passages(arguments.scifact)
    texts = [searchable_text(passage) for passage in passages]
    queries = [query.text for query in all_splits(arguments.scifact).queries[:200]]
    embedders, absent = on_every_runtime(lambda name: SentenceTransformerEmbedder(runtime=name))
    rerankers, _ = on_every_runtime(lambda name: CrossEncoderReranker(cross_encoder, runtime=name))
    report["not_available"] = absent
    sys.stdout.write("".join([f"not available: {reason}\n" for reason in absent]))
    rounds, candidates = arguments.rounds, texts[:RERANKED]
    for name, title, per_call, timings in (
        ("query", "one query", 1, time_queries(embedders, queries, rounds)),
        ("passages", f"{PASSAGES} passages", PASSAGES, time_passages(embedders, texts, rounds)),
        (
            "reranking",
            f"reranking {RERANKED} passages",
            RERANKED,
            time_reranking(rerankers, queries, candidates, rounds),
        ),
    ):
        report[name] = {runtime: asdict(timing) for runtime, timing in timings.items()}
        show(title, timings, per_call, "passages")
    report["reranking_fidelity"] = rerank_fidelity(rerankers, queries[:3], candidates)
    sys.stdout.write(f"\nlogits against torch's: {json.dumps(report['reranking_fidelity'])}\n")
    if not arguments.no_quality:
        sys.stdout.write(f"\nquality on {arguments.scifact.name}\n")
        report["quality"] = quality(embedders, arguments.scifact)
    report["bars"] = bars(report, default)
    for bar, met in report["bars"].items():
        sys.stdout.write(f"{'met   ' if met else 'MISSED'} {bar}\n")
    return report


def _first_passages(folder: Path) -> list[Passage]:
    return [passage for passage, _ in zip(read_corpus(folder), range(PASSAGES), strict=False)]


if __name__ == "__main__":
    main()
