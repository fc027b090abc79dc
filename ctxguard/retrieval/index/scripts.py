"""Measures how much of a corpus is in scripts that its analyser does not support. Pure."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import numpy as np

from ctxguard.retrieval.analysers import LANGUAGES, analyser_for
from ctxguard.retrieval.protocols import Analyser

WARN_FROM = 0.01
"""The share of unsupported letters from which a corpus is reported not to fit its analyser."""

_BLOCK = 128


def unhandled_letters(texts: Iterable[str], analyser: Analyser) -> tuple[float, str | None]:
    """Compute the share of letters, in [0, 1], that are in none of an analyser's scripts.

    From `WARN_FROM` on, also returns a warning with its mend. Texts have no lone surrogates.
    """
    if analyser.scripts is None:
        return 0.0, None
    by_script = letters_by_script(texts)
    unhandled = Counter({at: n for at, n in by_script.items() if at not in analyser.scripts})
    if not unhandled.total():
        return 0.0, None
    share = unhandled.total() / sum(by_script.values())
    if share < WARN_FROM:
        return share, None
    scripts = [script for script, _ in unhandled.most_common(3)]
    made_for = [code for code in LANGUAGES if scripts[0] in (analyser_for(code).scripts or ())]
    instead = (
        f"for {LANGUAGES[made_for[0]]}, build the index with the analyser {made_for[0]!r} "
        f"(`ctxguard index --language {made_for[0]}`)"
        if made_for
        else "give an analyser of your own to HybridRetriever.build"
    )
    return share, (
        f"{share:.0%} of the letters are in scripts that the analyser {analyser.name!r} is not "
        f"made for ({', '.join(scripts)}), and lexical search finds few of their words; "
        f"{instead}"
    )


def letters_by_script(texts: Iterable[str]) -> Counter[str]:
    """Count the letters of each script in texts without lone surrogates.

    A script is the first word of a letter's Unicode name, after NFKC.

    >>> letters_by_script(["é", "ｱ", "東"])
    Counter({'LATIN': 1, 'CJK': 1, 'KATAKANA': 1})
    """
    counts, each = Counter[int](), iter(texts)
    while block := list(islice(each, _BLOCK)):
        found = np.bincount(np.frombuffer("".join(block).encode("utf-32-le"), np.uint32))
        there = np.flatnonzero(found)
        counts.update(dict(zip(there.tolist(), found[there].tolist(), strict=True)))
    by_script: Counter[str] = Counter()
    for code_point, n in sorted(counts.items()):
        letter = unicodedata.normalize("NFKC", chr(code_point))[0]
        # A half-width sound mark is a letter, and what it becomes is not.
        if chr(code_point).isalpha() and letter.isalpha():
            by_script[unicodedata.name(letter, "UNKNOWN").split()[0]] += n
    return by_script
