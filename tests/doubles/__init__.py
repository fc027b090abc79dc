"""Fakes, and the contract of judges, which have one kind of implementation here."""

from tests.doubles.fake_retriever import FakeRetriever
from tests.doubles.faults import Fault, FaultyEmbedder, FaultyReranker, FaultyRetriever
from tests.doubles.judge_contract import JudgeContract
from tests.doubles.scores import LengthScores
from tests.doubles.word_hash_embedder import (
    CountedEmbedder,
    WordHashEmbedder,
    WordTokenEmbedder,
)

__all__ = [
    "CountedEmbedder",
    "FakeRetriever",
    "Fault",
    "FaultyEmbedder",
    "FaultyReranker",
    "FaultyRetriever",
    "JudgeContract",
    "LengthScores",
    "WordHashEmbedder",
    "WordTokenEmbedder",
]
