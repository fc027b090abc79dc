r"""The English analyser: words in lower case, without stop words, stemmed."""

from functools import cached_property
from itertools import filterfalse

from ctxguard.retrieval.analysers.stemmers import Stemmers
from ctxguard.retrieval.analysers.words import words

STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then "  # noqa: SIM905
    "there these they this to was will with".split()
)
"""The short list of English stop words that Lucene's analysers start from."""


class EnglishAnalyser:
    """Words in lower case with the parts of identifiers, without 33 stop words, by their stems.

    See `ctxguard.retrieval.protocols.Analyser`.
    """

    name = "en"
    fingerprint = (
        r"\w\w+, lower-case, identifier and camel-case parts, 33 English stop words, Snowball stems"
    )
    scripts = frozenset({"LATIN"})

    def analyse(self, text: str) -> list[str]:
        """Split a text into terms.

        Raises:
            MissingExtraError: PyStemmer is not installed.

        >>> EnglishAnalyser().analyse("Is the asyncio.wait_for timeout a floating number?")
        ['asyncio', 'wait_for', 'wait', 'timeout', 'float', 'number']
        """
        return self._stemmers.stems([*filterfalse(STOP_WORDS.__contains__, words(text))])

    @cached_property
    def _stemmers(self) -> Stemmers:
        return Stemmers("en")


ENGLISH = EnglishAnalyser()
