"""Labels of whole documents, over an index of their chunks."""

import numpy as np
import pytest

from calibration.data.dataset import Dataset, Query, unknown_passages
from calibration.pools import label
from calibration.replay import replay
from ctxguard.core.types import Passage, Route
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import CHUNK_OF
from tests.doubles import WordHashEmbedder

QUERY = Query("q", "red fox")


def chunk(document: str, number: int, text: str) -> Passage:
    return Passage(f"{document}#{number}", text, metadata={CHUNK_OF: document})


PASSAGES = (
    chunk("fox", 1, "a brown dog and a red barn and a road"),
    chunk("fox", 2, "red fox"),
    chunk("fox", 3, "a red fox crosses"),
    chunk("dog", 1, "red dog on the road to town"),
    Passage("short", "fox in town"),
    Passage("song#4", "red song that is no chunk of anything at all, and long enough"),
)


@pytest.fixture
def retriever() -> HybridRetriever:
    built = HybridRetriever.build(PASSAGES, embedder=WordHashEmbedder())
    return built.on_route(Route.LEXICAL)


def dataset(**grades: int) -> Dataset:
    qrels = {name.replace("_", "#"): grade for name, grade in grades.items()}
    return Dataset("documents", (QUERY,), {"q": qrels})


@pytest.mark.parametrize(
    ("labels", "relevant"),
    [
        # A document's label is that of its best chunk.
        ({"fox": 2, "dog": 1, "short": 1}, {"fox#2": 2, "dog#1": 1, "short": 1}),
        # A chunk's own label comes first.
        ({"fox_2": 1, "fox_3": 1}, {"fox#2": 1, "fox#3": 1}),
        # What only looks like the id of a chunk is none.
        ({"song": 1, "fox": 1}, {"fox#2": 1}),
    ],
)
def test_documents_label_is_best_chunks(
    retriever: HybridRetriever, labels: dict[str, int], relevant: dict[str, int]
) -> None:
    pools = replay(retriever, [QUERY], depth=10)
    assert pools.passage_ids[0][0] == "fox#2"
    grades = label(pools, dataset(**labels)).grades[0].tolist()
    found = dict(zip(pools.passage_ids[0], grades, strict=False))
    assert {each: grade for each, grade in found.items() if grade} == relevant


def test_recall_counts_a_document_once(retriever: HybridRetriever) -> None:
    labels = label(replay(retriever, [QUERY], depth=10), dataset(fox=1, short=1))
    assert labels.n_relevant.tolist() == [2]
    assert np.count_nonzero(labels.at_stake) == 2


def test_what_is_judged_follows(retriever: HybridRetriever) -> None:
    pools, labels = replay(retriever, [QUERY], depth=10), dataset(fox=1)
    judged = dict(zip(pools.passage_ids[0], label(pools, labels).judged[0], strict=False))
    assert judged["fox#2"]
    assert not judged["fox#3"]


def test_parts_of_pools_are_labelled_alike(retriever: HybridRetriever) -> None:
    pools = replay(retriever, [QUERY], depth=10)
    assert pools.documents
    assert pools.subset(["q"]).documents == pools.documents


def test_documents_are_known_to_the_index(retriever: HybridRetriever) -> None:
    assert unknown_passages(dataset(fox=1, short=1, cat=1), retriever.labelled_ids) == ("cat",)
    assert retriever.labelled_ids == {*retriever.passage_ids, "fox", "dog"}


def test_chunkless_pools_are_unchanged() -> None:
    retriever = HybridRetriever.build([Passage("a", "red")], embedder=WordHashEmbedder())
    assert replay(retriever, [QUERY], depth=3).documents == ()
