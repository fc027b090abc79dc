"""LanceDB: a table on disk with full-text search, with and without an index of its vectors."""

from collections.abc import Iterator
from time import perf_counter
from typing import ClassVar

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.rerankers import RRFReranker

from benchmarks._search_data import DIMENSION, Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings

_BATCH = 20_000


class LanceDB(SearchPeer):
    """Hybrid queries with its reciprocal rank reranker."""

    packages: ClassVar = ("lancedb", "pyarrow")

    def __init__(self, *, indexed: bool) -> None:
        self._indexed = indexed
        self.setting = "IVF_HNSW_SQ and full text" if indexed else "no vector index, full text"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        vector = pa.list_(pa.float32(), DIMENSION)
        schema = pa.schema([("row", pa.int64()), ("text", pa.string()), ("vector", vector)])
        texts = corpus.texts()

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, len(texts), _BATCH):
                end = min(start + _BATCH, len(texts))
                numbers = pa.array(np.array(corpus.vectors[start:end]).reshape(-1))
                yield pa.record_batch(
                    [
                        pa.array(range(start, end), pa.int64()),
                        pa.array(texts[start:end]),
                        pa.FixedSizeListArray.from_arrays(numbers, DIMENSION),
                    ],
                    schema=schema,
                )

        started = perf_counter()
        rows = pa.RecordBatchReader.from_batches(schema, batches())
        database = lancedb.connect(str(around.folder / "lance"))
        self._table = database.create_table("passages", data=rows, schema=schema)
        written = perf_counter()
        self._table.create_fts_index("text")
        full_text = perf_counter()
        if self._indexed:
            self._table.create_index(
                metric="dot", vector_column_name="vector", index_type="IVF_HNSW_SQ"
            )
        self._reranker = RRFReranker()
        self._queries, self._vectors = corpus.queries, corpus.query_vectors
        return {
            "write": written - started,
            "full_text": full_text - written,
            "vectors": perf_counter() - full_text,
        }

    def search(self, at: int) -> list[int]:
        found = (
            self._table.search(query_type="hybrid")
            .vector(self._vectors[at])
            .text(self._queries[at])
            .distance_type("dot")
            .select(["row", "text"])
            .rerank(self._reranker)
            .limit(DEPTH)
            .to_arrow()
        )
        rows: list[int] = found["row"].to_pylist()[:K]
        return rows

    def legs(self, at: int) -> Legs:
        lexical = self._table.search(self._queries[at], query_type="fts")
        dense = self._table.search(self._vectors[at], query_type="vector").distance_type("dot")
        found = [leg.select(["row"]).limit(DEPTH).to_arrow() for leg in (lexical, dense)]
        return found[0]["row"].to_pylist(), found[1]["row"].to_pylist()
