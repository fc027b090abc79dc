"""The lexical leg on real claims and abstracts is as good as BM25 is known to be there."""

from pathlib import Path

import pytest

from calibration.data.readers import read_beir, read_corpus
from ctxguard.core.metrics.relevance import ndcg
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index.lexical import Bm25sIndex


@pytest.mark.shared
def test_bm25_reaches_its_known_ndcg_on_the_claims_that_have_evidence(shared_data: Path) -> None:
    folder = shared_data / "scifact"
    corpus, dataset = list(read_corpus(folder / "corpus.jsonl")), read_beir(folder)
    index = Bm25sIndex.build([passage.text for passage in corpus], ENGLISH)
    values = []
    for query in dataset.queries:
        grades = dataset.qrels[query.query_id]
        rows = index.search(query.text, 10).rows.tolist()
        found = [grades.get(corpus[row].passage_id, 0) for row in rows]
        values.append(ndcg(found, list(grades.values()), 10))
    known = [value for value in values if value is not None]
    assert len(known) == 188
    assert sum(known) / len(known) > 0.81
