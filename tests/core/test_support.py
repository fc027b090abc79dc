"""Helpers of every folder: replacing a file in one step, and the user's cache folder."""

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from calibration.answers import AnswerFile
from calibration.asked_questions import asked_questions
from calibration.data.golden import read_snapshot
from calibration.data.readers import read_corpus
from calibration.data.text_files import new_folder, write_lines
from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.regular_file import read_regular
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.monitor.labels.files import RowToLabel, read_label_file, write_label_file
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.doubles import WordHashEmbedder


class TestAtomicWrite:
    @pytest.mark.parametrize("error", [None, KeyboardInterrupt])
    def test_old_content_stays_until_the_end(
        self, error: type[BaseException] | None, tmp_path: Path
    ) -> None:
        file = tmp_path / "file"
        file.write_text("old")
        with suppress(KeyboardInterrupt), atomic_write(file) as stream:
            stream.write(b"new")
            assert file.read_text() == "old"
            if error is not None:
                raise error
        left = "old" if error else "new"
        assert (file.read_text(), list(tmp_path.iterdir())) == (left, [file])

    def test_a_folder_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(OSError, match="folder"), atomic_write(tmp_path / "folder") as stream:
            stream.write(b"new")
        assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]

    @pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
    def test_only_dead_writers_leftovers_are_cleared(self, tmp_path: Path) -> None:
        """What a killed writer left is cleared and work in progress is not."""
        file = tmp_path / "file"
        script = (
            "import os, sys\nfrom pathlib import Path\n"
            "from ctxguard._support.atomic_write import atomic_write\n"
            "with atomic_write(Path(sys.argv[1])) as stream:\n"
            "    stream.write(b'half'); stream.flush(); print('written', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        pipe = subprocess.PIPE
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(file)], stdin=pipe, stdout=pipe
        )
        with writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            others = {tmp_path / ".file.notes", tmp_path / ".file2.abcdefgh"}
            for other in others:
                other.touch()
            with atomic_write(file) as stream:
                stream.write(b"new")
            left = set(tmp_path.iterdir()) - others
            assert file in left
            assert len(left) == 2
            writer.kill()
        with atomic_write(file) as stream:
            stream.write(b"newer")
        assert (set(tmp_path.iterdir()), file.read_text()) == ({file} | others, "newer")

    @pytest.mark.parametrize("mode", [0o644, 0o600])
    def test_new_file_has_given_permissions(self, tmp_path: Path, mode: int) -> None:
        with atomic_write(tmp_path / "file", mode=mode) as stream:
            stream.write(b"new")
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode

    @pytest.mark.skipif(os.name == "nt", reason="has no such permissions")
    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_files_with_texts_are_private(self, tmp_path: Path, umask: int) -> None:
        passage = Passage("p", "a text")
        labels = [RowToLabel("always", "query", "", "a text", None, None, "r", "p")]
        former = os.umask(umask)
        try:
            retriever = HybridRetriever.build([passage], embedder=WordHashEmbedder())
            retriever.save(tmp_path / "index")
            retriever.update([passage, Passage("new", "a text")])
            retriever.save(tmp_path / "index")
            write_label_file(tmp_path / "labels" / "l.csv", labels)
            write_label_file(tmp_path / "labels" / "l.jsonl", labels)
            write_lines(tmp_path / "lines" / "l.jsonl", ["a text"])
            with new_folder(tmp_path / "frozen") as folder:
                write_lines(folder / "l.jsonl", ["a text"])
        finally:
            os.umask(former)
        entries = list(tmp_path.rglob("*"))
        assert {each.stat().st_mode & 0o777 for each in entries if each.is_file()} == {0o600}
        assert {each.stat().st_mode & 0o777 for each in entries if each.is_dir()} == {0o700}


@pytest.mark.skipif(sys.platform != "linux", reason="the folders of Linux")
class TestCacheFolder:
    def test_environment_names_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "ctxguard"
        assert not cache_folder().exists()

    @pytest.mark.parametrize("value", [None, "", "not/absolute"])
    def test_default_is_in_the_home_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "ctxguard"

    def test_without_home_the_error_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        with pytest.raises(ConfigurationError, match="set XDG_CACHE_HOME"):
            cache_folder()


class TestReadRegular:
    def test_memory_is_for_content_not_limit(self, tmp_path: Path) -> None:
        """Memory is taken for what is there and not for the limit."""
        (tmp_path / "file").write_bytes(b"small")
        tracemalloc.start()
        try:
            assert read_regular(tmp_path / "file", 2**30) == b"small"
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(("limit", "fits"), [(5, True), (4, False)])
    def test_file_over_the_limit_is_refused(self, limit: int, fits: bool, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"12345")
        if fits:
            assert read_regular(tmp_path / "file", limit) == b"12345"
        else:
            with pytest.raises(OSError, match=r"over 3\.8"):
                read_regular(tmp_path / "file", limit)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
    @pytest.mark.parametrize(
        "read",
        [
            read_snapshot,
            lambda folder: list(read_corpus(folder / "snapshot.json")),
            lambda folder: asked_questions(folder / "snapshot.json"),
            lambda folder: read_label_file(folder / "snapshot.json", "me", 1.0, 3),
            lambda folder: AnswerFile(folder / "snapshot.json", "reader"),
        ],
        ids=[*("frozen set", "corpus", "questions"), *("labels", "answers")],
    )
    def test_no_reader_waits_for_a_pipe(
        self, read: Callable[[Path], object], tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "snapshot.json")
        with suppress(DataError):
            assert read(tmp_path) is None
