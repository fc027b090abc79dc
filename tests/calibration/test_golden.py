"""Golden sets that are frozen by digest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.data.dataset import Dataset, Query
from calibration.data.golden import changes, freeze, read_snapshot
from calibration.data.readers import read_beir
from ctxguard.errors import ConfigurationError, DataError
from tests.documents import write_lines

QUERIES = (Query("q2", "Who?", {"topic": "t"}), Query("q1", "Why?"), Query("q3", "When?"))
GOLDEN = Dataset("golden", QUERIES, {"q2": {"p": 1}, "q1": {"p": 0}}, {"q1": {"x": "distractor"}})


class TestFrozenSets:
    def test_digest_is_of_labels(self, tmp_path: Path) -> None:
        first = freeze(GOLDEN, tmp_path / "first")
        backwards = replace(GOLDEN, queries=QUERIES[::-1], qrels=dict(sorted(GOLDEN.qrels.items())))
        assert freeze(backwards, tmp_path / "second").digest == first.digest
        other = replace(GOLDEN, qrels={**GOLDEN.qrels, "q2": {"p": 2}})
        assert freeze(other, tmp_path / "third").digest != first.digest

    def test_what_was_changed_is_named(self, tmp_path: Path) -> None:
        folder = tmp_path / "frozen"
        freeze(GOLDEN, folder)
        assert changes(folder) == ()
        qrels = folder / "qrels" / "train.tsv"
        qrels.write_text(qrels.read_text().replace("q2\tp\t1", "q2\tp\t0"))
        (folder / "distractors.tsv").unlink()
        write_lines(folder / "pools.jsonl", "{}")
        file = folder / "snapshot.json"
        file.write_text(file.read_text().replace('"split": "train"', '"split": "dev"'))
        assert changes(folder) == (
            "distractors.tsv is gone",
            "pools.jsonl was added",
            "qrels/train.tsv was changed",
            "snapshot.json has been changed: its digest does not match its content",
        )

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            (None, "there is no such file"),
            ("{", "not the snapshot of a golden set .*Invalid JSON"),
            ("[]", "not the snapshot of a golden set"),
            ('{"format": "ctxguard golden set", "schema_version": 9}', "schema_version: .*be 1"),
            ('{"format": "ctxguard golden set", "schema_version": 1}', "digest: Field required"),
        ],
    )
    def test_a_broken_snapshot_is_refused(
        self, tmp_path: Path, text: str | None, fault: str
    ) -> None:
        if text is not None:
            write_lines(tmp_path / "snapshot.json", text)
        with pytest.raises(DataError, match=fault):
            read_snapshot(tmp_path)


ids = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6
).filter(lambda text: text == text.strip() and "\t" not in text and "\n" not in text)
json_values = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
    lambda text: bool(text.strip())
)
kinds = st.sampled_from([0, 1, 3, "hard_negative", "distractor"])
labels = st.dictionaries(ids, kinds, min_size=1, max_size=5)
metadata = st.none() | st.dictionaries(st.text(max_size=4), json_values, max_size=2)
Drawn = dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]]


def golden_set(drawn: Drawn) -> Dataset:
    """Return queries in the order of their ids, by what was drawn for each."""
    qrels, distractors = {}, {}
    for query_id, (_, _, own) in drawn.items():
        qrels[query_id] = {name: own[name] if isinstance(own[name], int) else 0 for name in own}
        if misleading := {name: kind for name, kind in own.items() if isinstance(kind, str)}:
            distractors[query_id] = misleading
    queries = [Query(query_id, *drawn[query_id][:2]) for query_id in sorted(drawn)]
    return Dataset("set", tuple(queries), qrels, distractors)


class TestWriting:
    @given(st.dictionaries(ids, st.tuples(texts, metadata, labels), min_size=1, max_size=4))
    @settings(max_examples=60, deadline=None)
    def test_what_is_written_reads_back_equal(
        self, tmp_path_factory: pytest.TempPathFactory, drawn: Drawn
    ) -> None:
        golden = golden_set(drawn)
        folder = tmp_path_factory.mktemp("golden") / "set"
        assert freeze(golden, folder, "dev") == read_snapshot(folder)
        again = read_beir(folder, "dev")
        assert replace(again, name=golden.name, notes=()) == golden
        assert again.notes == ()
        assert again.digest() == golden.digest()

    @pytest.mark.parametrize(
        ("query", "passage_id", "fault"),
        [
            (Query("a b\t", "?"), "p", "cannot be written to a table"),
            (Query("q", "?"), "", "cannot be written to a table"),
            (Query("q", "\ud800"), "p", "lone surrogate"),
            (Query("q", "?", {"x": float("nan")}), "p", "written as JSON"),
        ],
    )
    def test_unwritable_leaves_nothing(
        self, tmp_path: Path, query: Query, passage_id: str, fault: str
    ) -> None:
        golden = Dataset("set", (query,), {query.query_id: {passage_id: 1}})
        with pytest.raises(DataError, match=fault):
            freeze(golden, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_full_folder_is_left_alone(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "mine.txt", "mine")
        with pytest.raises(ConfigurationError, match="exists already"):
            freeze(GOLDEN, tmp_path)

    def test_split_is_a_file_name(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="as a file name"):
            freeze(GOLDEN, tmp_path / "out", "../test")
