"""Analyses other languages with spaces, with stop words from bm25s and stems from PyStemmer.

Pure; needs both libraries, of the extra `embedded`.
"""

import hashlib
import unicodedata

from ctxguard._support.extras import require
from ctxguard.retrieval.analysers.english import stems, words

_TURKISH_I = str.maketrans({"I": "ı", "İ": "i"})


class SnowballAnalyser:
    """Lower-cased NFKC words without stop words, stemmed by the Snowball algorithm.

    Args:
        language: An ISO 639-1 code that both libraries know.

    Raises:
        MissingExtraError: PyStemmer or bm25s is not installed.
    """

    def __init__(self, language: str) -> None:
        stemmer = require("Stemmer", "embedded")
        tokenization = require("bm25s.tokenization", "embedded")
        self._stop_words = frozenset(tokenization.Tokenizer(stopwords=language).stopwords)
        self.name = language
        self.scripts = frozenset({"LATIN", "CYRILLIC"} if language == "ru" else {"LATIN"})
        # Another release of either library may yield other terms for the same text.
        version = ".".join(stemmer.version().split(".")[:2])
        digest = hashlib.sha256("\n".join(sorted(self._stop_words)).encode()).hexdigest()[:8]
        self.fingerprint = (
            f"NFKC, \\w\\w+, lower-case, identifier and camel-case parts, {len(self._stop_words)} "
            f"stop words {digest} and Snowball {version} stems of {language!r}"
        )

    def analyse(self, text: str) -> list[str]:
        """Split a text into terms."""
        lower = _lower_turkish if self.name == "tr" else str.lower
        found = words(unicodedata.normalize("NFKC", text), lower)
        return stems(self.name, [each for each in found if each not in self._stop_words])


def _lower_turkish(text: str) -> str:
    """Convert to lower case, with ``I`` as the capital of ``ı`` and ``İ`` as that of ``i``."""
    return text.translate(_TURKISH_I).lower()
