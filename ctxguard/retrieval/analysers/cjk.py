"""Analyses scripts without spaces between words, as overlapping pairs of characters.

Pure; needs the library regex, of the extra `embedded`.
"""

import unicodedata
from itertools import pairwise

from ctxguard._support.extras import require
from ctxguard.retrieval.analysers.english import ENGLISH

_SCRIPTS = ("Han", "Hiragana", "Katakana", "Hangul", "Bopomofo", "Thai", "Lao", "Khmer", "Myanmar")


class CjkAnalyser:
    """Pairs of neighbouring characters, as Lucene's CJKAnalyzer makes them, and English words.

    Texts are first normalised to Unicode's NFKC, which unifies half-width and full-width forms. A
    run of Chinese, Japanese, Korean, Thai, Lao, Khmer or Burmese characters yields every pair of
    adjacent characters; a run of one character yields that one. Accents and vowel signs belong to
    their character. Everything else is analysed as English. A query of one character therefore
    finds only passages where it has no neighbours.

    See `ctxguard.retrieval.protocols.Analyser`.

    Raises:
        MissingExtraError: the library regex is not installed.
    """

    name = "cjk"
    fingerprint = (
        f"NFKC, pairs of characters in runs of {' '.join(_SCRIPTS)}; else {ENGLISH.fingerprint}"
    )
    # The first words of the names of these scripts' letters.
    scripts = frozenset(
        {"CJK", "IDEOGRAPHIC", "KATAKANA-HIRAGANA", *map(str.upper, _SCRIPTS), *ENGLISH.scripts}
    )

    def __init__(self) -> None:
        regex = require("regex", "embedded")
        # The mark for long vowels belongs to no script, since two use it.
        character = "".join([rf"\p{{{script}}}" for script in _SCRIPTS]) + "ー"
        self._run = regex.compile(rf"(?:[{character}]\p{{M}}*+)++")
        self._character = regex.compile(r".\p{M}*+")

    def analyse(self, text: str) -> list[str]:
        """Split a text into terms.

        >>> CjkAnalyser().analyse("東京都のcafé")
        ['café', '東京', '京都', '都の']
        """
        text = unicodedata.normalize("NFKC", text)
        terms = ENGLISH.analyse(self._run.sub(" ", text))
        for run in self._run.findall(text):
            characters = self._character.findall(run)
            pairs = [first + second for first, second in pairwise(characters)]
            terms += pairs or characters
        return terms
