"""Importing the retrieval package is cheap, and forking after a search is safe."""

import subprocess
import sys
import textwrap

from tests.timing import PATIENCE_SECONDS


def run(program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_optional_libraries_are_imported_late() -> None:
    loaded = run(
        """
        import sys
        import ctxguard.retrieval.hybrid.retriever
        heavy = {"faiss", "bm25s", "rank_bm25", "sentence_transformers", "torch"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert loaded == "[]"
