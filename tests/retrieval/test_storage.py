"""The saved folder: complete or refused, and a good one is never lost."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxguard.core.types import Passage, Route
from ctxguard.errors import ConfigurationError, DataError, IndexFolderError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from tests.doubles import WordHashEmbedder

QUERY = "deserialize a JSON string"
OURS = {"format": "ctxguard index", "schema_version": storage.SCHEMA_VERSION}


@pytest.fixture
def saved(retriever: HybridRetriever, tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    retriever.save(folder)
    return folder


def data_file(folder: Path, name: str) -> Path:
    (file,) = folder.glob(f"generation-*/{name}")
    return file


def load(folder: Path, **options: Any) -> HybridRetriever:
    return HybridRetriever.load(folder, embedder=WordHashEmbedder(), **options)


def many(n: int) -> list[Passage]:
    return [Passage(f"p{row}", f"passage number {row} of {n % (row + 1)}") for row in range(n)]


@pytest.mark.parametrize("lexical", ["bm25s", "rank-bm25"])
@pytest.mark.parametrize("exact_limit", [1, 2000])
def test_loaded_index_answers_the_same(
    corpus: list[Passage],
    embedder: WordHashEmbedder,
    tmp_path: Path,
    lexical: str,
    exact_limit: int,
) -> None:
    built = HybridRetriever.build(
        [*corpus, *many(1000)], embedder=embedder, lexical=lexical, exact_limit=exact_limit
    )
    built.save(tmp_path / "index")
    loaded = load(tmp_path / "index")
    for route in (Route.HYBRID, Route.LEXICAL, Route.DENSE):
        before, after = (
            built.on_route(route).retrieve(QUERY),
            loaded.on_route(route).retrieve(QUERY),
        )
        assert after.passage_ids == before.passage_ids
        assert after.scores == pytest.approx(before.scores)
    assert (loaded.fingerprint(), loaded.report) == (built.fingerprint(), built.report)
    assert loaded.passage("json.loads") == built.passage("json.loads")


def test_the_folder_holds_plain_formats_only(saved: Path) -> None:
    suffixes = {file.suffix for file in saved.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".jsonl", ".npy"}
    lines = data_file(saved, "passages.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [json.loads(line)["_id"] for line in lines]
    assert ids == sorted(ids)


def change(file: Path, changed: Callable[[bytes], bytes]) -> None:
    file.write_bytes(changed(file.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda folder: (folder / "manifest.json").unlink(), r"no manifest\.json"),
        *[
            (lambda folder, name=name: data_file(folder, name).unlink(), f"{name} is missing")
            for name in (
                "passages.jsonl",
                "vectors.npy",
                "weights.scores.npy",
                "passages.ids.json",
            )
        ],
        (
            lambda folder: change(data_file(folder, "vectors.npy"), lambda whole: whole[:-10]),
            r"vectors\.npy has \d+ bytes instead of \d+",
        ),
        (
            lambda folder: change(
                data_file(folder, "vectors.npy"), lambda whole: whole[:-1] + bytes([whole[-1] ^ 1])
            ),
            r"vectors\.npy has been changed",
        ),
        (
            lambda folder: data_file(folder, "vectors.npy").with_suffix(".codes").write_bytes(b"x"),
            r"vectors\.codes is not in manifest\.json",
        ),
        *[
            (lambda folder, text=text: (folder / "manifest.json").write_text(text), message)
            for text, message in (
                ("not json", "cannot be read"),
                ("[" * 100_000, "cannot be read"),
                ('{"a":' * 100_000, "cannot be read"),
                ("[]", "not written by ctxguard"),
                ('{"format": "other"}', "not written by ctxguard"),
                ('{"format": "ctxguard index", "schema_version": 99}', "schema version 99"),
                (json.dumps(OURS), "manifest.json is damaged"),
                (json.dumps(OURS | {"generation": "../x", "files": {}}), "manifest.json is damag"),
            )
        ],
    ],
)
def test_damaged_folder_names_the_fault(
    saved: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(saved)
    with pytest.raises(IndexFolderError, match=message):
        load(saved)


def put(saved: Path, file: Path, content: bytes) -> None:
    """Write a file, and let the manifest name its size and digest."""
    file.write_bytes(content)
    manifest = json.loads((saved / "manifest.json").read_text(encoding="utf-8"))
    listed = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][file.name] = listed
    (saved / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def zip_bytes() -> bytes:
    archive = io.BytesIO()
    np.savez(archive, a=np.zeros(1))
    return archive.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", zip_bytes(), b"[" * 100_000, b"[1e999]", b"\x93NUMPY\x01\x00\xff\xff"],
    ids=["empty", "zip", "deep JSON", "a number", "half a header"],
)
def test_foreign_file_under_digest_is_refused(saved: Path, content: bytes) -> None:
    for file in saved.glob("generation-*/*"):
        before = file.read_bytes()
        put(saved, file, content)
        with pytest.raises(IndexFolderError):
            load(saved)
        put(saved, file, before)


@pytest.mark.parametrize(
    ("name", "message"),
    [("thesis.txt", r"thesis\.txt"), ("manifest.json", "not written by ctxguard")],
)
def test_foreign_files_are_not_overwritten(
    retriever: HybridRetriever, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).write_text('{"name": "a web application"}')
    with pytest.raises(IndexFolderError, match=message):
        retriever.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_failed_save_keeps_the_good_index(
    retriever: HybridRetriever, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(index: HybridIndex, folder: Path) -> None:
        (folder / "passages.jsonl").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    retriever.update([Passage("new", "another text")])
    monkeypatch.setattr(HybridIndex, "_write", full_disk)
    with pytest.raises(IndexFolderError, match="No space left"):
        retriever.save(saved)
    assert load(saved).retrieve(QUERY).passage_ids
    assert len(list(saved.iterdir())) == 2


def test_interrupted_first_save_can_repeat(retriever: HybridRetriever, tmp_path: Path) -> None:
    (tmp_path / "generation-00000000").mkdir()
    (tmp_path / "generation-00000000" / "vectors.npy").write_bytes(b"half")
    retriever.save(tmp_path)
    load(tmp_path)
    assert not (tmp_path / "generation-00000000").exists()


def test_other_embedder_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match="was built with the embedder 'word-hash'"):
        HybridRetriever.load(saved, embedder=WordHashEmbedder(salt="another model"))


@pytest.mark.parametrize("metadata", [{1: "a", "1": "b"}, {"in": [{True: 1, "true": 2}]}])
def test_colliding_metadata_keys_are_refused(metadata: dict[str, object]) -> None:
    with pytest.raises(DataError, match="'p' cannot be kept as JSON: two of its keys"):
        HybridRetriever.build([Passage("p", "x", metadata=metadata)], embedder=WordHashEmbedder())


def _changed(array: np.ndarray, how: str) -> np.ndarray:
    changed = array.copy()
    if how == "shorter":
        return array[:-1]
    if how == "longer":
        return np.concatenate([array, array[-1:]])
    if how == "not rising":
        changed[1:-1] = changed[1:-1][::-1]
    else:
        # A count by term would take 16 GB for the largest number.
        changed.flat[-2] = {"below": -1, "beyond": 2**31 - 1}[how]
    return changed


OFFSETS = ("passages.offsets", "lexical.starts", "weights.starts")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *[(name, how) for name in OFFSETS for how in ("shorter", "longer", "beyond", "not rising")],
        *[("weights.rows", how) for how in ("shorter", "below", "beyond")],
        *[("lexical.numbers", how) for how in ("shorter", "below", "beyond")],
        *[
            (name, "shorter")
            for name in ("lexical.counts", "weights.scores", "weights.unit", "vectors")
        ],
        *[("lexical.lengths", how) for how in ("longer", "below")],
        ("passages.digests", "longer"),
    ],
)
def test_mismatched_arrays_are_refused(saved: Path, name: str, how: str) -> None:
    """Each under its own digest, as another program may have written it."""
    file = data_file(saved, f"{name}.npy")
    stream = io.BytesIO()
    np.save(stream, _changed(np.load(file), how))
    put(saved, file, stream.getvalue())
    with pytest.raises(IndexFolderError, match="is not a usable index"):
        load(saved)


@pytest.mark.parametrize("change", [lambda ids: ids[::-1], lambda ids: [*ids[:-1], 7]])
def test_ids_out_of_order_are_refused(saved: Path, change: Callable[[list[str]], object]) -> None:
    file = data_file(saved, "passages.ids.json")
    put(saved, file, json.dumps(change(json.loads(file.read_text()))).encode())
    with pytest.raises(IndexFolderError, match="ids that are not strings in order"):
        load(saved)
