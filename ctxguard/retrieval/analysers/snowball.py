"""Analysers for other languages with spaces: stop words from bm25s, stems from PyStemmer."""

import hashlib
import unicodedata

from ctxguard._support.extras import require
from ctxguard.retrieval.analysers.stemmers import Stemmers
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
        # Another release of either library may yield other terms for the same text.
        version = ".".join(stemmer.version().split(".")[:2])
        digest = hashlib.sha256("\n".join(sorted(self._stop_words)).encode()).hexdigest()[:8]
        self.fingerprint = (
            f"NFKC, \\w\\w+, lower-case, identifier and camel-case parts, {len(self._stop_words)} "
            f"stop words {digest} and Snowball {version} stems of {language!r}"
        )

    def words(self, text: str) -> list[str]:
        """Split a text into words, with stop words, not stemmed."""
        lower = _lower_turkish if self.name == "tr" else str.lower
        return words(unicodedata.normalize("NFKC", text), lower)

    def analyse(self, text: str) -> list[str]:
        """Split a text into terms."""
        return self.stems([word for word in self.words(text) if word not in self._stop_words])


def _lower_turkish(text: str) -> str:
    """Convert to lower case, with ``I`` as the capital of ``ı`` and ``İ`` as that of ``i``."""
    return text.translate(_TURKISH_I).lower()
