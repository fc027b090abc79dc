"""Reads passages and queries in order: sentences, words, and the stem of each word."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ctxguard.retrieval.analysers.english import EnglishAnalyser
from ctxguard.retrieval.analysers.snowball import SnowballAnalyser, Stemmers
from ctxguard.retrieval.analysers.words import words
from ctxguard.retrieval.protocols import Analyser

LONGEST_SENTENCE = 64
"""Maximum words of a sentence, where it is cut: lists and tables often have no full stop."""

SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？｡]+|\n+")
"""The separator of two sentences; abbreviations are not recognised."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The functions that read texts; safe to use from several threads at once.

    Attributes:
        words: Returns the words of a text in order, with repetitions and stop words.
        stems: Returns the stem of each word.
        terms_are_stems: Whether the terms that lexical search matches are stems, not words.
    """

    words: Callable[[str], list[str]]
    stems: Callable[[list[str]], list[str]]
    terms_are_stems: bool = False

    @classmethod
    def of(cls, analyser: Analyser) -> "Reading":
        """Split as an analyser does, with stop words, and use Snowball's stems if it has any.

        For scripts without spaces, such as Chinese, and for a user's own analyser, the words are
        its terms, which are their own stems.

        Raises:
            MissingExtraError: PyStemmer is not installed.
        """
        if isinstance(analyser, EnglishAnalyser):
            return cls(words, Stemmers("en").stems)
        if isinstance(analyser, SnowballAnalyser):
            return cls(analyser.words, analyser.stems, terms_are_stems=True)
        return cls(analyser.analyse, list)

    def sentences(self, text: str) -> list[list[str]]:
        """Return the words of each sentence; none is empty or longer than `LONGEST_SENTENCE`.

        >>> from ctxguard.retrieval.analysers.english import ENGLISH
        >>> Reading.of(ENGLISH).sentences("Fish soup\\nServe hot. (See p. 3!) Enjoy")
        [['fish', 'soup'], ['serve', 'hot'], ['see'], ['enjoy']]
        """
        read = [self.words(sentence) for sentence in SENTENCE_END.split(text)]
        return [
            sentence[start : start + LONGEST_SENTENCE]
            for sentence in read
            for start in range(0, len(sentence), LONGEST_SENTENCE)
        ]
