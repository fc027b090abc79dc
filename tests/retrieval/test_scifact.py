"""The lexical leg on real claims and abstracts is as good as BM25 is known to be there."""

import json
from math import log2
from pathlib import Path

import pytest

from ctxguard.retrieval.index.lexical import Bm25sIndex


@pytest.mark.shared
def test_bm25_reaches_its_known_ndcg_on_the_claims_that_have_evidence(shared_data: Path) -> None:
    folder = shared_data / "scifact"
    corpus, queries = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("corpus.jsonl", "queries.jsonl")
    )
    grades: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query_id, passage_id, grade = line.split("\t")
        if int(grade) > 0:
            grades.setdefault(query_id, {})[passage_id] = int(grade)
    index = Bm25sIndex.build([record["text"] for record in corpus])
    ndcg = []
    for query in queries:
        relevant = grades.get(query["_id"])
        if relevant is None:
            continue
        rows = index.search(query["text"], 10).rows.tolist()
        found = [relevant.get(corpus[row]["_id"], 0) for row in rows]
        best = sorted(relevant.values(), reverse=True)[:10]
        dcg, ideal = (
            sum(grade / log2(rank + 1) for rank, grade in enumerate(gains, start=1))
            for gains in (found, best)
        )
        ndcg.append(dcg / ideal)
    assert len(ndcg) == 188
    assert sum(ndcg) / len(ndcg) > 0.81
