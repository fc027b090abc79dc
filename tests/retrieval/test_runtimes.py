"""Which runtime computes a model, and the cache of what was exported for it."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ctxguard._support.extras import install_line
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.retrieval.models import embedder, export, files, loading
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder as Encoder
from ctxguard.retrieval.models.files import ModelFiles

pytestmark = pytest.mark.model
in_onnxruntime = pytest.mark.usefixtures("small")


def kept(cache: Path, value: int, key: str = "pieces-1") -> set[int]:
    """The values kept under a key; if none are, this one, which is kept."""
    return set(files.kept(cache, key, lambda: {"table": np.full(9000, value)})["table"].tolist())


def ways(encoder: Encoder) -> dict[str, tuple[str, str]]:
    """The runtime and form in which an encoder computes."""
    models = {each: encoder._model(each) for each in ("queries", "passages")}
    return {each: (model.runtime, model.form) for each, model in models.items()}


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
    assert "is damaged and will be made again" in caplog.text


def test_another_models_archive_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, 0)
    (tmp_path / "pieces-1.npz").rename(tmp_path / "pieces-2.npz")
    assert kept(tmp_path, 1, "pieces-2") == {1}


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    keys = set()
    for mode in ("mean", "max"):
        (tmp_path / "pooling.json").write_text(mode)
        keys.add(ModelFiles("mine", tmp_path, "the same weights").key("int8"))
    assert len(keys) == 2


def test_unwritable_cache_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path / "file" / "models", 1) == {1}
    assert "every start will make it again" in caplog.text


@in_onnxruntime
def test_export_unlike_torch_is_unused(
    tiny: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The archive is undamaged, but this processor does not compute what torch did.

    Queries that are wrong in eight bits are computed in 32, and in torch if those are wrong too.
    """
    library = pytest.importorskip("onnxruntime")
    forms = ["int8", "float32"]
    for n_wrong, way in enumerate([("onnxruntime", "float32"), ("torch", "float32")], start=1):
        own = tmp_path / str(n_wrong)
        for number, form in enumerate(forms):
            key = ModelFiles.find(tiny).key(f"{form}-{library.__version__}")
            right = files.kept(cache, key, partial(export.exported, tiny, form))
            sign = -1 if number < n_wrong else 1
            files.kept(own, key, lambda: {**right, "expected": sign * right["expected"]})  # noqa: B023
        with caplog.at_level(logging.WARNING):
            assert ways(Encoder(tiny, cache=own))["queries"] == way
        assert (
            "does not compute queries in int8 (its vectors differ from sentence-transformers'"
            in caplog.text
        )


@pytest.fixture(params=["onnxruntime", "onnx"])
def absent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of the extra that is not installed."""
    monkeypatch.setitem(sys.modules, request.param, None)
    return str(request.param)


def test_without_the_extra_torch_is_used(
    absent: str, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once for each purpose what to install, and a requested runtime is an error."""
    with caplog.at_level(logging.INFO):
        assert ways(Encoder(tiny, cache=tmp_path))["queries"] == ("torch", "float32")
    assert caplog.text.count("does not compute queries") == 1
    assert f"the extra fast: {install_line('fast')}" in caplog.text
    requested = Encoder(tiny, runtime="onnxruntime", cache=tmp_path)
    for purpose in ("queries", "passages"):
        with pytest.raises(MissingExtraError, match="fast"):
            requested._model(purpose)


@in_onnxruntime
@pytest.mark.parametrize(
    ("bfloat16", "passages"), [(True, ("torch", "bfloat16")), (False, ("onnxruntime", "float32"))]
)
def test_the_fastest_way_is_the_default(
    *,
    bfloat16: bool,
    passages: tuple[str, str],
    tiny: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names it: it depends on the processor, which a requested runtime does not."""
    monkeypatch.setattr(embedder, "is_faster_in_bfloat16", lambda: bfloat16)
    with caplog.at_level(logging.INFO):
        found = ways(Encoder(tiny, cache=cache))
    assert found == {"queries": ("onnxruntime", "int8"), "passages": passages}
    assert f"{tiny}: passages in {', '.join(passages)}" in caplog.text
    requested = Encoder(tiny, runtime="onnxruntime", cache=cache)
    assert ways(requested)["passages"] == ("onnxruntime", "float32")


@pytest.mark.parametrize(
    ("about", "is_faster"),
    [
        ("vendor_id: GenuineIntel\nflags: avx512f avx512_bf16", False),
        ("vendor_id: GenuineIntel\nflags: avx512_bf16 amx_bf16", True),
        ("vendor_id: AuthenticAMD\nflags: avx512f avx512_bf16", True),
        ("vendor_id: AuthenticAMD\nflags: avx2", False),
        ("Features: fp asimd bf16", False),
    ],
)
def test_bfloat16_is_used_where_faster(
    about: str, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: about)
    assert loading.is_faster_in_bfloat16() == is_faster


@in_onnxruntime
def test_unexportable_model_stays_on_torch(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> object:
        raise RuntimeError("an operation is not known")

    monkeypatch.setattr(export, "exported", refuse)
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(tiny, cache=tmp_path)
        assert ways(encoder)["queries"] == ("torch", "float32")
    assert "an operation is not known" in caplog.text
    assert encoder.query("a question").vector.shape == (32,)


def test_rounded_weights_leave_others_alone() -> None:
    """A weight that something else reads too stays; a column of zeros stays zeros."""
    onnx = pytest.importorskip("onnx")
    library = pytest.importorskip("onnxruntime")
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(4, 3)).astype(np.float32) * [[1.0, 1000.0, 0.0]],
        "tied": random.normal(size=(4, 4)),
        "single": random.normal(size=4),
        "batched": random.normal(size=(1, 4, 2)),
    }
    nodes = [node("MatMul", ["x", name], [f"by {name}"]) for name in weights]
    weights |= {"wide": random.normal(size=(4, 64)), "narrow": random.normal(size=(64, 4))}
    others = [
        node("MatMul", ["x", "w"], ["again"]),
        node("Add", ["x", "tied"], ["sum"]),
        node("MatMul", ["x", "wide"], ["inside"]),
        node("MatMul", ["inside", "narrow"], ["both"]),
    ]
    rounded = {"by w", "again", "by tied", "both"}
    outputs = [
        *(f"by {name}" for name in ("w", "tied", "single", "batched")),
        "again",
        "sum",
        "both",
    ]
    graph = onnx.helper.make_graph(
        [*nodes, *others],
        "products",
        [info("x", 1, [4, 4])],
        [info(name, 1, None) for name in outputs],
        [
            onnx.numpy_helper.from_array(np.asarray(each, np.float32), name)
            for name, each in weights.items()
        ],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    content = model.SerializeToString()
    x = random.normal(size=(4, 4)).astype(np.float32)

    def computed(graph: bytes) -> list[np.ndarray]:
        session = library.InferenceSession(graph, providers=["CPUExecutionProvider"])
        found: list[np.ndarray] = session.run(None, {"x": x})
        return found

    found = computed(export._rounded(content, [{"x": x}]))
    for name, own, right in zip(outputs, found, computed(content), strict=True):
        largest = np.abs(right).max(axis=0) + 1e-9
        bound = 0.05 if name in rounded else 1e-6
        assert (np.abs(own - right) / largest).max() < bound, name
    graph = onnx.load_model_from_string(export._rounded(content, [{"x": x}])).graph
    kinds = [each.op_type for each in graph.node]
    assert kinds.count("DynamicQuantizeMatMul") == 4  # of three weights, one of them used twice
    assert kinds.count("MatMulNBits") == 1  # where fewer channels come out


def test_torch_holds_one_model_for_both(tiny: Path) -> None:
    encoder = Encoder(tiny, runtime="torch")
    assert encoder._model("queries") is encoder._model("passages")


def test_model_not_of_texts_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Images:
        tokenizer = None

    monkeypatch.setattr(embedder, "load", lambda kind, folder: Images())
    with pytest.raises(ConfigurationError, match="the model does not accept tokenized text"):
        Encoder(tiny, runtime="torch").query("a question")


def test_unknown_runtime_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match="'cuda' is unknown; use onnxruntime or torch"):
        Encoder(runtime="cuda")
