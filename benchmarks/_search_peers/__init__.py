"""Hybrid search as it is built today: one small adapter for each system that is compared.

Every system gets the same texts and vectors, answers a query of text and vector with its own best
10 after its own fusion, and takes the 100 best of each leg where that can be set. Each runs in a
process of its own, so nothing here is imported before it is asked for; ``ImportError`` where a
system is not installed.
"""

from benchmarks._search_peers.base import SearchPeer
from ctxguard.retrieval.index.lexical import LexicalEngine

PEERS = (
    "ctxguard",
    "ctxguard-none",
    "ctxguard-rank-bm25",
    "direct",
    "langchain",
    "llama-index",
    "haystack",
    "txtai",
    "lancedb",
    "lancedb-flat",
    "milvus-lite",
    "qdrant",
    "postgres",
    "postgres-strict",
)
"""Every system, by the name that the command knows it by; the first four are not peers. The first
is the search that a new user gets, with all signals; the second and third are without signals."""

OURS = ("ctxguard", "ctxguard-none", "ctxguard-rank-bm25")
SERVERS = ("postgres", "postgres-strict")
"""Peers that are servers of their own, not embedded in the process that asks."""


def open_peer(name: str) -> SearchPeer:  # noqa: PLR0911  one line for each system
    """The adapter of one system.

    Raises:
        ImportError: it is not installed.
        ValueError: a name that is not in ``PEERS``.
    """
    match name:
        case "ctxguard" | "ctxguard-none" | "ctxguard-rank-bm25":
            from benchmarks._search_peers.embedded import Embedded

            engine: LexicalEngine = "rank-bm25" if name.endswith("bm25") else "bm25s"
            return Embedded(engine, "full" if name == "ctxguard" else "none")
        case "direct":
            from benchmarks._search_peers.embedded import Direct

            return Direct()
        case "langchain":
            from benchmarks._search_peers.langchain import LangChain

            return LangChain()
        case "llama-index":
            from benchmarks._search_peers.llama_index import LlamaIndex

            return LlamaIndex()
        case "haystack":
            from benchmarks._search_peers.haystack import Haystack

            return Haystack()
        case "txtai":
            from benchmarks._search_peers.txtai import Txtai

            return Txtai()
        case "lancedb" | "lancedb-flat":
            from benchmarks._search_peers.lancedb import LanceDB

            return LanceDB(indexed=name == "lancedb")
        case "milvus-lite":
            from benchmarks._search_peers.milvus import MilvusLite

            return MilvusLite()
        case "qdrant":
            from benchmarks._search_peers.qdrant import Qdrant

            return Qdrant()
        case "postgres" | "postgres-strict":
            from benchmarks._search_peers.postgres import Postgres

            return Postgres(strict=name == "postgres-strict")
        case _:
            raise ValueError(f"unknown system {name!r}; one of {', '.join(PEERS)}")
