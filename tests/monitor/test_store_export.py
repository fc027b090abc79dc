"""Samples, judgments and labels as Parquet files."""

from pathlib import Path

import pytest
from storing import entry, fill, judged, label

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import SampleStore, WorkerCounts


class TestExport:
    def read(self, path: Path) -> list[dict[str, object]]:
        parquet = pytest.importorskip("pyarrow.parquet")
        rows: list[dict[str, object]] = parquet.read_table(path).to_pylist()
        return rows

    def test_everything_can_be_exported(self, store: SampleStore, tmp_path: Path) -> None:
        ids = fill(store, 3)
        store.finish("judge", [judged(ids[1])])
        store.add_labels([label(2, 3)])
        path = tmp_path / "export.parquet"
        assert store.export_parquet(path, "samples") == 3
        samples = self.read(path)
        assert [row["sample_id"] for row in samples] == ids
        assert samples[1]["payload"] == b"payload"
        assert samples[1]["state"] == "judged"
        assert store.export_parquet(path, "judged") == 1
        [row] = self.read(path)
        assert (row["series"], row["request_id"], row["probability"]) == ("judge", "r1", 0.5)
        assert (row["summary"], row["grades"]) == (b"summary.", b"grades")
        assert store.export_parquet(path, "labels") == 1
        [row] = self.read(path)
        assert (row["request_id"], row["grade"], row["negative"]) == ("r2", 3, None)
        assert list(tmp_path.glob("*.partial")) == []

    def test_an_empty_store_gives_an_empty_file_with_its_columns(
        self, store: SampleStore, tmp_path: Path
    ) -> None:
        parquet = pytest.importorskip("pyarrow.parquet")
        assert store.export_parquet(tmp_path / "export.parquet", "samples") == 0
        assert "payload" in parquet.read_table(tmp_path / "export.parquet").column_names

    def test_more_rows_than_one_batch_are_exported(
        self, store: SampleStore, tmp_path: Path
    ) -> None:
        store.append("w", [entry(n) for n in range(2_300)], WorkerCounts(2_300))
        assert store.export_parquet(tmp_path / "export.parquet", "samples") == 2_300
        ids = [row["request_id"] for row in self.read(tmp_path / "export.parquet")]
        assert ids == [f"r{n}" for n in range(2_300)]

    def test_what_cannot_be_exported_is_refused(self, store: SampleStore, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot export 'all'"):
            store.export_parquet(tmp_path / "x", "all")  # type: ignore[arg-type]
