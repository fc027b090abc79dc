"""From the text of a question to its context: ctxguard beside what people would put together.

    python -m benchmarks.question_to_context --sizes 5k 100k --folder DIR --check

All hold the same passages and vectors, in one process on one thread, and answer the same questions
in turns; encoding the question is part of it, by the same model's weights:

- ``ctxguard``: the guard as installed (encoder, hybrid search, all signals, the first 10 kept);
- ``no signals``: the same without the signals that its ranker reads;
- ``by hand, our encoder``: our encoder, bm25s and faiss, reciprocal ranks, the first 10 joined;
- ``by hand``: the same with sentence-transformers;
- ``txtai``: a hybrid database whose vectors come from sentence-transformers, if it is installed.

``search`` is ctxguard's share without encoding, with the question's states given. No question is
asked twice in a round, so that no cache of questions helps. Figures are milliseconds of the
processor at the median. Passages of ``--sizes`` are generated, and their vectors have no meaning
for the questions; in a BEIR folder all is real, and nDCG@10 stands beside the time.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import faiss
import numpy as np

from benchmarks._collection import all_splits, unseen_ranker
from benchmarks._search_data import QUERIES, prepare
from benchmarks._search_peers.embedded import (
    DirectDense,
    DirectLexical,
    GivenVectors,
    passages_of,
)
from benchmarks._timing import environment
from benchmarks.search import size_of
from calibration.data.readers import read_corpus
from ctxguard import ContextGuard, Mode, RatioPolicy
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import bundled_model, kept
from ctxguard.retrieval.protocols import Embedder, Float32Array, QueryStates

SUMMARY = "Time the way from a question's text to its context, encoding included."
K = 10
SIGNALS_BARS = ((100_000, 1.5), (0, 1.9))
"""At this number of passages and more, with signals, against by hand with our encoder."""
PLAIN_BAR = 1.2
_PACKAGES = (
    *("ctxguard-rag", "txtai", "sentence-transformers", "torch", "onnxruntime"),
    *("bm25s", "faiss-cpu"),
)
_WARM_UP = 10

Answer = Callable[[str], Sequence[str]]
"""Makes the text of a context; gives the ids of its passages, best first."""


class RealQuestions(GivenVectors):
    """Given vectors and generated pieces of the passages, and the model's own of a question."""

    def __init__(self, vectors: Float32Array) -> None:
        super().__init__(vectors)
        self.model = SentenceTransformerEmbedder(remembered=0)

    def encode_query(self, text: str) -> Float32Array:
        return self.query(text).vector

    def query(self, text: str) -> QueryStates:
        return self.model.query(text)


class KeptVectors(SentenceTransformerEmbedder):
    """The model, and its vectors of the passages, which were computed before."""

    kept: Mapping[str, Float32Array]

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        return np.array([self.kept[text] for text in texts])


class Questions(NamedTuple):
    """What all systems are asked, and about what; grades by question and passage if known."""

    passages: Sequence[Passage]
    embedder: Embedder
    vectors: Float32Array
    asked: Sequence[str]
    qrels: Mapping[str, Mapping[str, int]] | None = None
    name: str = ""


def generated(n_passages: int, folder: Path, n_questions: int) -> Questions:
    """Make a corpus, or read it from the folder where it was made before."""
    corpus = prepare(n_passages, folder, n_queries=n_questions)
    vectors = np.array(corpus.vectors)
    return Questions(passages_of(corpus), RealQuestions(vectors), vectors, corpus.queries)


def real(folder: Path, cache: Path, n_questions: int) -> Questions:
    """Read a BEIR folder; its vectors are kept in the cache."""
    # In the order in which an index encodes them.
    passages = sorted(read_corpus(folder), key=attrgetter("passage_id"))
    dataset = all_splits(folder)
    texts = [searchable_text(passage) for passage in passages]
    embedder = KeptVectors(remembered=0)
    key = f"{folder.resolve().name}-{len(texts)}-{embedder.fingerprint()[:16]}"
    encode = super(KeptVectors, embedder).encode_passages
    vectors = kept(cache, key, lambda: {"vectors": encode(texts)})["vectors"]
    embedder.kept = dict(zip(texts, vectors, strict=True))
    own = {query.text: dict(dataset.qrels.get(query.query_id, {})) for query in dataset.queries}
    judged = {text: grades for text, grades in own.items() if any(grades.values())}
    asked = list(judged)[:n_questions]
    return Questions(passages, embedder, vectors, asked, judged, folder.resolve().name)


def systems(given: Questions) -> tuple[dict[str, Answer], Answer]:
    """Build each system; and ctxguard's search with the states of the questions given."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    passages, vectors = given.passages, given.vectors
    ids = [passage.passage_id for passage in passages]
    texts = [searchable_text(passage) for passage in passages]
    model = SentenceTransformer(str(bundled_model()), device="cpu")
    lexical, dense = DirectLexical(texts), DirectDense(vectors)
    ranker = unseen_ranker(given.name)
    retriever = HybridRetriever.build(passages, embedder=given.embedder, ranker=ranker)
    ours = SentenceTransformerEmbedder(remembered=0)
    states = {question: ours.query(question) for question in given.asked}

    def guarded(source: HybridRetriever) -> Answer:
        guard = ContextGuard(source, policy=RatioPolicy(k=K), mode=Mode.ENFORCE)

        def answer(question: str) -> Sequence[str]:
            context = guard.retrieve(question)
            assert context.text
            return [passage.passage_id for passage in context.passages]

        return answer

    def by_hand(encode: Callable[[str], Float32Array]) -> Answer:
        def answer(question: str) -> Sequence[str]:
            vector = encode(question)
            score: dict[int, float] = {}
            for rows in (lexical.search(question), dense.search(vector)):
                for rank, row in enumerate(rows, start=1):
                    score[row] = score.get(row, 0.0) + 1.0 / (60.0 + rank)
            best = sorted(score, key=score.__getitem__)[: -K - 1 : -1]
            assert "\n\n".join([texts[row] for row in best])
            return [ids[row] for row in best]

        return answer

    def search(question: str) -> Sequence[str]:
        return retriever.retrieve(question, depth=100, query_vector=states[question]).passage_ids

    found: dict[str, Answer] = {
        "ctxguard": guarded(retriever),
        "no signals": guarded(retriever.with_fusion(Fusion())),
        "by hand, our encoder": by_hand(ours.encode_query),
        "by hand": by_hand(lambda text: np.asarray(model.encode(text, show_progress_bar=False))),
    }
    if find_spec("txtai") is not None:
        found["txtai"] = txtai(ids, texts, vectors, model)
    return found, search


def txtai(ids: Sequence[str], texts: Sequence[str], vectors: Float32Array, model: Any) -> Answer:
    """Build txtai's database of the same passages."""
    from txtai import Embeddings

    rows = iter(range(len(texts)))

    def vectors_of(batch: list[str]) -> Float32Array:
        if len(batch) == 1:
            return np.asarray(model.encode(batch, show_progress_bar=False))
        return vectors[[next(rows) for _ in batch]]

    database = Embeddings(
        method="external", transform=vectors_of, hybrid=True, content=True, backend="faiss"
    )
    database.index((row, text, None) for row, text in enumerate(texts))

    def answer(question: str) -> Sequence[str]:
        found = database.search(question, K)
        assert "\n\n".join([each["text"] for each in found])
        return [ids[int(each["id"])] for each in found]

    return answer


def measure(given: Questions) -> dict[str, dict[str, float]]:
    """Time every system over the same questions, in turns.

    Returns:
        Of each system ``ms``, the median of a question; with grades ``ndcg``, the mean at 10.
    """
    peers, search = systems(given)
    asked: dict[str, Answer] = {**peers, "search": search}
    taken: dict[str, list[float]] = {name: [] for name in asked}
    gains: dict[str, list[float]] = {name: [] for name in asked}
    for number in range(_WARM_UP + len(given.asked)):
        question = given.asked[number % len(given.asked)]
        for name, answer in asked.items():
            started = time.process_time()
            found = answer(question)
            if number >= _WARM_UP:
                taken[name].append((time.process_time() - started) * 1e3)
                if given.qrels is not None:
                    gains[name].append(_ndcg(found, given.qrels[question]))
    figures = {name: {"ms": round(statistics.median(each), 3)} for name, each in taken.items()}
    for name, each in gains.items():
        if each:
            figures[name]["ndcg"] = round(statistics.fmean(each), 4)
    return figures


def _ndcg(found: Sequence[str], grades: Mapping[str, int]) -> float:
    def dcg(gains: Sequence[int]) -> float:
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:K], start=1))

    best = sorted(grades.values(), reverse=True)
    return dcg([grades.get(passage_id, 0) for passage_id in found]) / dcg(best)


def missed(n_passages: int, figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Name the bars that figures miss."""
    ms = {name: each["ms"] for name, each in figures.items()}
    base = ms["by hand, our encoder"]
    bar = next(bar for least, bar in SIGNALS_BARS if n_passages >= least)
    bars = {
        "slower than by hand": ms["ctxguard"] <= ms["by hand"],
        "slower than txtai": ms["ctxguard"] <= ms.get("txtai", math.inf),
        f"over {bar} times by hand with our encoder": ms["ctxguard"] <= bar * base,
        f"without signals over {PLAIN_BAR} times that": ms["no signals"] <= PLAIN_BAR * base,
    }
    return [name for name, met in bars.items() if not met]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a bar is missed and ``--check`` is given."""
    parser = argparse.ArgumentParser(prog="benchmarks.question_to_context", description=SUMMARY)
    parser.add_argument("--sizes", nargs="*", default=["5k", "10k", "100k"])
    parser.add_argument("--folder", type=Path, nargs="*", default=[], help="BEIR folders")
    parser.add_argument("--questions", type=int, default=QUERIES)
    parser.add_argument("--data", type=Path, default=Path("build/search"), help="kept data")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    about = environment(_PACKAGES, 1)
    sys.stdout.write(f"processor: {about['processor']}\n")
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    misses = []
    for name in [*options.sizes, *options.folder]:
        given = (
            real(name, options.data, options.questions)
            if isinstance(name, Path)
            else generated(size_of(name), options.data, options.questions)
        )
        sizes[given.name or name] = found = measure(given)
        sys.stdout.write(f"{given.name or name}: {len(given.passages):,} passages\n")
        for system, each in found.items():
            quality = f", nDCG@10 {each['ndcg']:.3f}" if "ndcg" in each else ""
            sys.stdout.write(f"  {system:21} {each['ms']:7.2f} ms{quality}\n")
        misses += [f"{given.name or name}: {bar}" for bar in missed(len(given.passages), found)]
    for miss in misses:
        sys.stdout.write(f"MISSED {miss}\n")
    if options.json is not None:
        report: dict[str, Any] = {"environment": about, "sizes": sizes}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
