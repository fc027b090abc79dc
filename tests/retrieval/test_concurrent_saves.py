"""Several saves into one folder at once: the index that the manifest names is always whole."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

from ctxguard.retrieval.index import storage


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut is not part of these tests."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(folder: Path, text: str) -> None:
    storage.save(folder, {"saved": text}, lambda files: written(files, text))


def written(files: Path, text: str) -> None:
    (files / "vectors.npy").write_text(text)


def loaded(folder: Path) -> str:
    """The text of the saved index, after its size and digest were checked."""
    manifest, files = storage.load(folder)
    assert (files / "vectors.npy").read_text() == manifest["saved"]
    return str(manifest["saved"])


def run_before_line(
    number: int, action: Callable[[], None], interrupted: Callable[[], None]
) -> bool:
    """Run ``action`` before the n-th line of `storage` that ``interrupted`` runs.

    Returns:
        Whether ``interrupted`` has so many lines.
    """
    lines, reached = count(1), False

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal reached
        if frame.f_code.co_filename != storage.__file__:
            return None
        # A trace function is not traced itself, nor is what it calls.
        if event == "line" and next(lines) == number:
            reached = True
            action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        interrupted()
    finally:
        sys.settrace(before)
    return reached


@pytest.mark.parametrize(
    ("before", "meanwhile"), [([], ["second"]), (["zeroth"], ["second"]), ([], ["second", "third"])]
)
def test_interleaved_saves_leave_a_whole_index(
    tmp_path: Path, before: list[str], meanwhile: list[str]
) -> None:
    """The first of two replaces the index whose files the other saw in the folder."""
    for number in count(1):
        folder = tmp_path / str(number)

        def save_all(texts: list[str], folder: Path = folder) -> None:
            for text in texts:
                save(folder, text)

        save_all(before)
        if not run_before_line(number, partial(save_all, meanwhile), partial(save_all, ["first"])):
            break
        assert loaded(folder) in ("first", meanwhile[-1]), number
        save(folder, "last")
        assert loaded(folder) == "last"
        assert len(list(folder.iterdir())) == 2, f"line {number}: something was left behind"
    assert number > 30


def test_interrupted_save_loses_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    # A file that was open as the interrupt came is closed when it is garbage.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        for number in count(1):
            folder = tmp_path / str(number)
            save(folder, "before")
            with suppress(KeyboardInterrupt):
                if not run_before_line(number, interrupt, partial(save, folder, "after")):
                    break
            assert loaded(folder) in ("before", "after"), number
        gc.collect()


PROGRAM = """
import sys
from pathlib import Path
from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.doubles import WordHashEmbedder

role, folder, turns = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
embedder = WordHashEmbedder()
if role == "load":
    sizes = {len(HybridRetriever.load(folder, embedder=embedder)) for turn in range(turns)}
    assert sizes <= {3, 4}, sizes
else:
    retriever = HybridRetriever.build(
        [Passage(str(n), f"passage number {n}") for n in range(int(role))], embedder=embedder
    )
    for turn in range(turns):
        retriever.save(folder)
"""


def test_two_processes_save_while_one_loads(tmp_path: Path) -> None:
    folder = tmp_path / "index"

    def start(role: str, turns: int) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, role, str(folder), str(turns)],
            stderr=subprocess.PIPE,
            text=True,
        )

    # One save before the others begin, so that there is something to load.
    start("3", 1).communicate()
    processes = [start("3", 8), start("4", 8), start("load", 8)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert len(list(folder.iterdir())) == 2
