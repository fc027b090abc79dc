"""Importing the retrieval package is cheap."""

import subprocess
import sys

from tests.timing import PATIENCE_SECONDS

PROGRAM = """
import sys
import ctxguard.retrieval.hybrid.retriever
print(sorted({"faiss", "bm25s", "rank_bm25", "sentence_transformers", "torch"} & set(sys.modules)))
"""


def test_optional_libraries_are_imported_late() -> None:
    command = [sys.executable, "-c", PROGRAM]
    assert subprocess.check_output(command, text=True, timeout=PATIENCE_SECONDS) == "[]\n"
