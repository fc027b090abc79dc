"""Stems words by the Snowball algorithm, as PyStemmer computes it."""

import threading

from ctxguard._support.extras import require


class Stemmers(threading.local):
    """A stemmer for each thread: several threads cannot share one.

    Args:
        language: An ISO 639-1 code that PyStemmer knows.

    Raises:
        MissingExtraError: PyStemmer is not installed.
    """

    def __init__(self, language: str) -> None:
        # Without its cache: looking a word up there takes longer than stemming it.
        self._stemmer = require("Stemmer", "embedded").Stemmer(language, 0)

    def stems(self, of: list[str]) -> list[str]:
        """Return the stem of each word."""
        stems: list[str] = self._stemmer.stemWords(of)
        return stems
