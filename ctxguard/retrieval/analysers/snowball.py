"""Analysers of other languages written with spaces: stop words of bm25s, stems of PyStemmer."""

import hashlib
import threading
import unicodedata

from ctxguard._support.extras import require
from ctxguard.retrieval.analysers.words import words

_TURKISH_I = str.maketrans({"I": "ı", "İ": "i"})


class SnowballAnalyser:
    """Words in lower case without stop words, reduced to the stems of the Snowball algorithm.

    Texts are first normalised to Unicode's NFKC. See `ctxguard.retrieval.protocols.Analyser`.

    Args:
        language: An ISO 639-1 code that both libraries know.

    Raises:
        MissingExtraError: PyStemmer or bm25s is not installed.
    """

    def __init__(self, language: str) -> None:
        stemmer = require("Stemmer", "embedded")
        tokenization = require("bm25s.tokenization", "embedded")
        stop_words = tokenization.Tokenizer(stopwords=language).stopwords
        self._stop_words = frozenset(stop_words)
        self.stems = Stemmers(language).stems
        self.name = language
        self.scripts = frozenset({"LATIN", "CYRILLIC"} if language == "ru" else {"LATIN"})
        # Another release of either library may give other terms for the same text.
        version = ".".join(stemmer.version().split(".")[:2])
        digest = hashlib.sha256("\n".join(sorted(self._stop_words)).encode()).hexdigest()[:8]
        self.fingerprint = (
            f"NFKC, \\w\\w+, lower-case, identifier and camel-case parts, {len(self._stop_words)} "
            f"stop words {digest} and Snowball {version} stems of {language!r}"
        )

    def words(self, text: str) -> list[str]:
        """The words of a text, stop words too, not stemmed."""
        lower = _lower_turkish if self.name == "tr" else str.lower
        return words(unicodedata.normalize("NFKC", text), lower)

    def analyse(self, text: str) -> list[str]:
        """The terms of a text."""
        return self.stems([word for word in self.words(text) if word not in self._stop_words])


def _lower_turkish(text: str) -> str:
    """Lower case, where ``I`` is the capital of ``ı`` and ``İ`` that of ``i``."""
    return text.translate(_TURKISH_I).lower()


class Stemmers(threading.local):
    """A stemmer for each thread: one cannot be used by several at once.

    Args:
        language: An ISO 639-1 code that PyStemmer knows.

    Raises:
        MissingExtraError: PyStemmer is not installed.
    """

    def __init__(self, language: str) -> None:
        # Without its cache: to look a word up there takes longer than to stem it.
        self._stemmer = require("Stemmer", "embedded").Stemmer(language, 0)

    def stems(self, of: list[str]) -> list[str]:
        """The stem of each word."""
        stems: list[str] = self._stemmer.stemWords(of)
        return stems
