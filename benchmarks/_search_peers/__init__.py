"""Hybrid search as it is built today: one small adapter for each system that is compared.

Every system gets the same texts and vectors, answers a query of text and vector with its own best
10 after its own fusion, and takes the 100 best of each leg where that can be set. Each runs in a
process of its own, so nothing here is imported before it is asked for; ``ImportError`` where a
system is not installed.
"""

from benchmarks._search_peers.base import SearchPeer
from ctxguard.retrieval.index.lexical import LexicalEngine

PEERS = ("ctxguard", "ctxguard-none", "ctxguard-rank-bm25", "direct", "txtai")
"""Every system, by the name that the command knows it by: the search that a new user gets, with all
signals; the same without signals over either lexical engine; bm25s and faiss put together by hand;
and the nearest embedded peer."""

OURS = ("ctxguard", "ctxguard-none", "ctxguard-rank-bm25")


def open_peer(name: str) -> SearchPeer:
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
        case "txtai":
            from benchmarks._search_peers.txtai import Txtai

            return Txtai()
        case _:
            raise ValueError(f"unknown system {name!r}; one of {', '.join(PEERS)}")
