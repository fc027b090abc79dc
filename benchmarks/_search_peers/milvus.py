"""Milvus Lite: the Milvus API over a file, with its BM25 function and reciprocal rank fusion."""

from time import perf_counter
from typing import ClassVar

from pymilvus import (
    AnnSearchRequest,
    DataType,
    Function,
    FunctionType,
    MilvusClient,
    RRFRanker,
)

from benchmarks._search_data import DIMENSION, Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings

_BATCH = 2_000
_COLLECTION = "passages"
_BY_WORDS = {"metric_type": "BM25"}
_BY_VECTOR = {"metric_type": "IP"}


class MilvusLite(SearchPeer):
    """One collection with a sparse and a dense field, indexed as it does by default."""

    packages: ClassVar = ("milvus-lite", "pymilvus")
    setting = "SPARSE_INVERTED_INDEX with BM25, AUTOINDEX, RRFRanker"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        self._client = MilvusClient(str(around.folder / "milvus.db"))
        schema = self._client.create_schema()
        schema.add_field("row", DataType.INT64, is_primary=True)
        schema.add_field("text", DataType.VARCHAR, max_length=8_000, enable_analyzer=True)
        schema.add_field("words", DataType.SPARSE_FLOAT_VECTOR)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIMENSION)
        schema.add_function(
            Function(
                name="bm25",
                input_field_names=["text"],
                output_field_names=["words"],
                function_type=FunctionType.BM25,
            )
        )
        indexes = self._client.prepare_index_params()
        indexes.add_index("words", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
        indexes.add_index("vector", index_type="AUTOINDEX", metric_type="IP")
        self._client.create_collection(_COLLECTION, schema=schema, index_params=indexes)
        texts = corpus.texts()
        started = perf_counter()
        for start in range(0, len(texts), _BATCH):
            vectors = corpus.vectors[start : start + _BATCH].tolist()
            self._client.insert(
                _COLLECTION,
                [
                    {"row": start + at, "text": text, "vector": vectors[at]}
                    for at, text in enumerate(texts[start : start + _BATCH])
                ],
            )
        inserted = perf_counter()
        self._client.flush(_COLLECTION)
        self._client.load_collection(_COLLECTION)
        self._queries = corpus.queries
        self._vectors = corpus.query_vectors.tolist()
        return {"insert": inserted - started, "flush": perf_counter() - inserted}

    def search(self, at: int) -> list[int]:
        (found,) = self._client.hybrid_search(
            _COLLECTION,
            [
                AnnSearchRequest([self._queries[at]], "words", _BY_WORDS, DEPTH),
                AnnSearchRequest([self._vectors[at]], "vector", _BY_VECTOR, DEPTH),
            ],
            RRFRanker(60),
            limit=K,
            output_fields=["text"],
        )
        return [hit["row"] for hit in found]

    def legs(self, at: int) -> Legs:
        lexical = self._leg("words", self._queries[at], _BY_WORDS)
        return lexical, self._leg("vector", self._vectors[at], _BY_VECTOR)

    def _leg(self, field: str, query: str | list[float], how: dict[str, str]) -> list[int]:
        (found,) = self._client.search(
            _COLLECTION, [query], anns_field=field, limit=DEPTH, search_params=how
        )
        return [hit["row"] for hit in found]

    def close(self) -> None:
        self._client.close()
