"""A small corpus and a retriever over it, without a model."""

import pytest

from ctxguard.core.types import Passage
from ctxguard.retrieval import HybridRetriever
from ctxguard.testing import WordHashEmbedder

TEXTS = {
    "json.load": "Deserialize a file object that holds a JSON document.",
    "json.loads": "Deserialize a string that holds a JSON document.",
    "queue.Queue": "A first in, first out queue for threads.",
    "asyncio.Queue": "A first in, first out queue for coroutines.",
    "asyncio.wait": "Run awaitables concurrently and block until some are done.",
    "asyncio.wait_for": "Wait for one awaitable to complete, with a timeout.",
    "time.sleep": "Suspend the calling thread for some seconds.",
    "os.getcwd": "The current working directory.",
}


@pytest.fixture
def embedder() -> WordHashEmbedder:
    return WordHashEmbedder()


@pytest.fixture
def corpus() -> list[Passage]:
    return [Passage(passage_id, text, title=passage_id) for passage_id, text in TEXTS.items()]


@pytest.fixture
def retriever(corpus: list[Passage], embedder: WordHashEmbedder) -> HybridRetriever:
    return HybridRetriever.build(corpus, embedder=embedder)
