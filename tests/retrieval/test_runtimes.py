"""Which runtime computes a model, and the cache of what was exported for it."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ctxguard._support.extras import install_line
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models import embedder, files
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder as Encoder
from ctxguard.retrieval.models.files import ModelFiles

pytestmark = pytest.mark.model
in_openvino = pytest.mark.usefixtures("small")


def kept(cache: Path, value: int, key: str = "pieces-1") -> set[int]:
    """The values kept under a key; if none are, this one, which is kept."""
    return set(files.kept(cache, key, lambda: {"table": np.full(9000, value)})["table"].tolist())


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
    assert kept(tmp_path, 0) == kept(tmp_path, 1) == {0}
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path, 2) == kept(tmp_path, 3) == {2}
    assert "is damaged and made again" in caplog.text


def test_the_archive_of_another_model_under_this_ones_name_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, 0)
    (tmp_path / "pieces-1.npz").rename(tmp_path / "pieces-2.npz")
    assert kept(tmp_path, 1, "pieces-2") == {1}


def test_a_table_is_kept_unless_it_is_damaged(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def states(encoder: Encoder) -> dict[str, np.ndarray]:
        made.append(1)
        return {"table": np.full((900, 20), len(made), np.float16)}

    monkeypatch.setattr(Encoder, "_states", states)

    def opened() -> list[float]:
        """The table as a program that starts now has it."""
        table = Encoder(tiny, cache=tmp_path).piece_table
        assert (table.shape, table.dtype) == ((900, 20), np.float32)
        return np.unique(table).tolist()

    assert opened() == opened() == [1.0]
    (file,) = tmp_path.iterdir()
    file.write_bytes(_flip(file.read_bytes(), file.stat().st_size // 2))
    assert opened() == opened() == [2.0]
    assert len(made) == 2


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    keys = set()
    for mode in ("mean", "max"):
        (tmp_path / "pooling.json").write_text(mode)
        keys.add(ModelFiles("mine", tmp_path, "the same weights").key("openvino"))
    assert len(keys) == 2


def test_a_cache_that_cannot_be_written_gives_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path / "file" / "models", 1) == {1}
    assert "every start will make it again" in caplog.text


@in_openvino
def test_an_export_whose_results_are_not_torchs_is_not_used(
    tiny: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The archive is undamaged, but this processor does not compute what torch did."""
    key = ModelFiles.find(tiny).key(f"openvino-{embedder._openvino().__version__}")
    honest = files.kept(cache, key, dict)
    files.kept(tmp_path, key, lambda: {**honest, "expected": -honest["expected"]})
    with caplog.at_level(logging.WARNING):
        assert Encoder(tiny, cache=tmp_path)._model.runtime == "torch"
    assert "does not run on openvino (its vectors differ from sentence-transformers'" in caplog.text


@pytest.fixture
def without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> object:
        raise MissingExtraError("openvino", "fast", install_line("fast"))

    monkeypatch.setattr(embedder, "_openvino", absent)


@pytest.mark.usefixtures("without_openvino")
def test_without_openvino_torch_is_used_and_the_log_says_what_to_install(
    tiny: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert Encoder(tiny, cache=cache)._model.runtime == "torch"
    assert "runs on torch" in caplog.text
    assert f"the extra fast: {install_line('fast')}" in caplog.text


@pytest.mark.usefixtures("without_openvino")
def test_a_requested_runtime_that_is_not_installed_is_an_error(tiny: Path, cache: Path) -> None:
    with pytest.raises(MissingExtraError, match="fast"):
        Encoder(tiny, runtime="openvino", cache=cache).query("a question")


@in_openvino
def test_openvino_is_the_default_and_named_in_the_log(
    tiny: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert Encoder(tiny, cache=cache)._model.runtime == "openvino"
    assert f"{tiny} runs on openvino" in caplog.text


@in_openvino
def test_a_model_that_cannot_be_exported_stays_on_torch(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(model: object) -> object:
        raise RuntimeError("an operation is not known")

    monkeypatch.setattr(Encoder, "_export", refuse)
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(tiny, cache=tmp_path)
        assert encoder._model.runtime == "torch"
    assert "an operation is not known" in caplog.text
    assert encoder.query("a question").vector.shape == (32,)


def test_a_model_of_something_else_than_texts_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Images:
        tokenizer = None

    monkeypatch.setattr(embedder, "load", lambda kind, folder: Images())
    with pytest.raises(ConfigurationError, match="the model takes no tokenized text"):
        Encoder(tiny, runtime="torch").query("a question")


def test_an_unknown_runtime_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'cuda' is unknown; use openvino or torch"):
        Encoder(runtime="cuda")
