"""Splits texts into the lexical index's terms; there is one file per language family.

Pure, except that an analyser is kept once it is made. Ours need the extra `embedded`.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.analysers.cjk import CjkAnalyser
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.analysers.snowball import SnowballAnalyser
from ctxguard.retrieval.protocols import Analyser

LANGUAGES: Mapping[str, str] = MappingProxyType(
    {
        "en": "English",
        "da": "Danish",
        "de": "German",
        "es": "Spanish",
        "fr": "French",
        "it": "Italian",
        "nl": "Dutch",
        "no": "Norwegian",
        "pt": "Portuguese",
        "ru": "Russian",
        "sv": "Swedish",
        "tr": "Turkish",
        "cjk": "Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese",
    }
)
"""The codes of ctxguard's own analysers, with their languages."""


def as_analyser(analyser: Analyser | str) -> Analyser:
    """Return a given analyser unchanged, or the analyser for a language code.

    Raises:
        ConfigurationError: the language is unknown, or the object is not an analyser.
        MissingExtraError: a required library is not installed.
    """
    if isinstance(analyser, str):
        return analyser_for(analyser)
    if not isinstance(analyser, Analyser):
        raise ConfigurationError(
            f"{analyser!r} is not an analyser; give a language code, one of {', '.join(LANGUAGES)}"
            ", or an object with name, fingerprint, scripts and analyse(text)"
        )
    return analyser


@cache
def analyser_for(language: str) -> Analyser:
    """Return the analyser for one of `LANGUAGES`; errors as for `as_analyser`."""
    if language not in LANGUAGES:
        raise ConfigurationError(
            f"there is no analyser for the language {language!r}; use one of "
            f"{', '.join(LANGUAGES)} (cjk: {LANGUAGES['cjk']}), or give an analyser of your own "
            "to HybridRetriever.build"
        )
    if language == "en":
        return ENGLISH
    return CjkAnalyser() if language == "cjk" else SnowballAnalyser(language)


def analyser_of_index(name: str, given: Analyser | None) -> Analyser:
    """Return the analyser that a saved index names: ctxguard's own, or the one ``given``.

    Raises:
        ConfigurationError: the index was built with a custom analyser that was not given, or with a
            different one.
    """
    if given is None and name in LANGUAGES:
        return analyser_for(name)
    if given is None or given.name != name:
        instead = "" if given is None else f", not {given.name!r}"
        raise ConfigurationError(
            f"the index was built with the analyser {name!r}{instead}; pass that analyser as "
            "`analyser`, or build the index again"
        )
    return given
