"""The lexical leg on real claims and abstracts is as good as BM25 is known to be there."""

from pathlib import Path

import pytest
from ir_measures import nDCG

from calibration.data.readers import read_beir, read_corpus
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index.lexical import Bm25sIndex


@pytest.mark.shared
def test_bm25_reaches_its_known_ndcg(shared_data: Path) -> None:
    folder = shared_data / "scifact"
    corpus, dataset = list(read_corpus(folder / "corpus.jsonl")), read_beir(folder)
    index = Bm25sIndex.build([passage.text for passage in corpus], ENGLISH)
    runs = {}
    for query in dataset.queries:
        rows = index.search(query.text, 10).rows.tolist()
        runs[query.query_id] = {
            corpus[row].passage_id: -float(rank) for rank, row in enumerate(rows)
        }
    qrels = {name: grades for name, grades in dataset.qrels.items() if any(grades.values())}
    assert len(qrels) == 188
    assert (nDCG @ 10).calc_aggregate(qrels, runs) > 0.81
