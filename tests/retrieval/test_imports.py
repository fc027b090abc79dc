"""Importing the retrieval package is cheap, and forking after a search is safe."""

import subprocess
import sys
import textwrap

import pytest

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


def test_no_optional_library_is_imported_before_it_is_used() -> None:
    loaded = run(
        """
        import sys
        import ctxguard.retrieval
        heavy = {"faiss", "bm25s", "rank_bm25", "sentence_transformers", "torch"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert loaded == "[]"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_forked_child_of_a_process_that_searched_can_search() -> None:
    """Pre-forking servers load the index once and search in every child."""
    assert (
        run(
            """
            import os, signal
            import numpy as np
            from ctxguard.retrieval import HybridRetriever
            from tests.doubles import WordHashEmbedder
            from ctxguard.core.types import Passage

            passages = [Passage(f"p{n}", f"passage number {n}") for n in range(300)]
            retriever = HybridRetriever.build(passages, embedder=WordHashEmbedder())
            expected = retriever.retrieve("number 7").passage_ids
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os._exit(0 if retriever.retrieve("number 7").passage_ids == expected else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        )
        == "0"
    )
