"""Public fakes and contract suites, for the tests of ctxguard and of code built on it."""

from ctxguard.testing.fake_retriever import FakeRetriever
from ctxguard.testing.faults import (
    Fault,
    FaultyEmbedder,
    FaultyReranker,
    FaultyRetriever,
)
from ctxguard.testing.judge_contract import JudgeContract
from ctxguard.testing.lexical_contract import LexicalContract
from ctxguard.testing.retriever_contract import RetrieverContract
from ctxguard.testing.word_hash_embedder import WordHashEmbedder, WordTokenEmbedder

__all__ = [
    "FakeRetriever",
    "Fault",
    "FaultyEmbedder",
    "FaultyReranker",
    "FaultyRetriever",
    "JudgeContract",
    "LexicalContract",
    "RetrieverContract",
    "WordHashEmbedder",
    "WordTokenEmbedder",
]
