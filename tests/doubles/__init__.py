"""Fakes, and the contracts of what has one kind of implementation here: judges, lexical indexes."""

from tests.doubles.fake_retriever import FakeRetriever
from tests.doubles.faults import Fault, FaultyEmbedder, FaultyReranker, FaultyRetriever
from tests.doubles.judge_contract import JudgeContract
from tests.doubles.lexical_contract import LexicalContract
from tests.doubles.word_hash_embedder import WordHashEmbedder, WordTokenEmbedder

__all__ = [
    "FakeRetriever",
    "Fault",
    "FaultyEmbedder",
    "FaultyReranker",
    "FaultyRetriever",
    "JudgeContract",
    "LexicalContract",
    "WordHashEmbedder",
    "WordTokenEmbedder",
]
