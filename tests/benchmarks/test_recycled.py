"""A collection made larger keeps its own passages first, and whole sentences in all of them."""

from pathlib import Path

import numpy as np

from benchmarks._recycled import recycled
from ctxguard.core.types import Passage
from ctxguard.retrieval import HybridRetriever
from tests.doubles import WordTokenEmbedder

TEXTS = ["One fish swims far away. Two birds sing in trees.", "Red apples fall early. Pears stay."]


def test_a_recycled_collection_is_made_of_the_sentences_of_its_own(tmp_path: Path) -> None:
    embedder = WordTokenEmbedder()
    own = HybridRetriever.build(
        [Passage(f"p{n}", text) for n, text in enumerate(TEXTS)], embedder=embedder, signals="full"
    )

    made = recycled(own, embedder, 20, tmp_path)

    assert len(made) == 20
    sentences = {part.strip(". ") for text in TEXTS for part in text.split(". ")}
    for passage_id in made.passage_ids:
        assert {part.strip(". ") for part in made.passage(passage_id).text.split(". ")} <= sentences
    stored, of_own = made.generation.sentences, own.generation.sentences
    assert stored is not None
    assert of_own is not None
    vectors = {bytes(each) for each in of_own.taken(np.arange(2)).vectors}
    assert {bytes(each) for each in stored.taken(np.arange(20)).vectors} <= vectors
    assert recycled(own, embedder, 20, tmp_path).generation.corpus_digest == (
        made.generation.corpus_digest
    )
