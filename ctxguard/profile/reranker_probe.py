"""Distinguishes rerankers, or embedders, by their scores of a few fixed texts.

A model's name on a server stays the same when its weights, its precision, the length at which it
cuts documents or the scale of its scores change. So calibration keeps the reranker's scores of
these texts in the profile's fingerprint, and a guard that applies the profile asks again. The same
reranker gives the same scores but for rounding: other batches, other kernels, bfloat16.

The texts belong to the identity: change one, and every profile must be calibrated again. Pure,
except that `probe_scores` calls the scorer that it is given.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from ctxguard.core.types import FloatArray

FINGERPRINT_KEY = "reranker_scores"
"""The fingerprint entry that holds a reranker's scores."""
RETRIEVER_KEY = "retriever_scores"
"""The fingerprint entry that holds a retriever's similarities (`ProbedRetriever`)."""

MOST_DIFFERENCE = 0.1
"""How far a score may move, as a share of the scores' standard deviation.

As measured, bfloat16 moves a score by at most 0.05, other batches and threads do not measurably
move it, and the nearest of twenty other rerankers, cut at 192 tokens for 256, moves it by 0.19.
"""

_DIGITS = 7
_PRECISION = 1e-9
"""The smallest spread assumed: if all scores are equal, any difference is too large."""


def _long(*, sentences: int, last: str) -> str:
    """Make a document that holds the answer only in its last sentence."""
    filler = [
        f"Section {at} of the service log records that pump {at * 7 % 31} was inspected, that its "
        f"seal number {at * 13 % 97} was in order and that the pressure was not changed."
        for at in range(1, sentences + 1)
    ]
    return " ".join([*filler, last])


_ANSWER = "The relief valve of the main boiler opens at 3.2 bar."

PROBES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "At which pressure does the relief valve of the boiler open?",
        (
            _ANSWER,
            "The relief valve of the main boiler opens at 2.3 bar.",
            "the relief valve of the main boiler opens at 3.2 BAR",
            "The relief valve of the main boiler closes at 2.8 bar and must never be blocked.",
            "The relief valve of the auxiliary tank opens at 3.2 bar.",
            "At which pressure does the relief valve of the boiler open?",
            "A boiler is a closed vessel in which water is heated.",
            "Das Sicherheitsventil des Hauptkessels öffnet bei 3,2 bar.",
            "主ボイラーの安全弁は3.2バールで開きます。",
            "La soupape de sûreté de la chaudière s'ouvre à 3,2 bars.",
            "Nobody was able to say when the concert would begin.",
            "3.2",
            _long(sentences=2, last=_ANSWER),
            _long(sentences=5, last=_ANSWER),
            _long(sentences=10, last=_ANSWER),
            _long(sentences=20, last=_ANSWER),
            _long(sentences=40, last=_ANSWER),
        ),
    ),
    (
        "wer darf den Schlüssel zum Archiv ausleihen",
        (
            "Den Schlüssel zum Archiv dürfen nur Mitarbeiterinnen der Bibliothek ausleihen.",
            "Den Schlüssel zum Archiv dürfen Gäste nicht ausleihen.",
            "Der Schlüssel zum Keller hängt neben der Tür.",
            "Only library staff may borrow the key to the archive.",
            "Visitors may borrow an umbrella at the front desk.",
            "Solo el personal de la biblioteca puede pedir prestada la llave del archivo.",
            "Ключ от архива выдаётся только сотрудникам библиотеки.",
            "Das Archiv wurde 1912 gegründet und 1954 erweitert.",
            "key archive staff borrow library",
            "Im Winter schließt die Bibliothek um 17 Uhr, im Sommer um 19 Uhr.",
            "return {key: archive[key] for key in staff if may_borrow(key)}",
            "| key | holder | since |\n|---|---|---|\n| archive | library staff | 2019 |",
        ),
    ),
    (
        "Did the Lindqvist trial of 2021 show that the drug lowers blood pressure?",
        (
            "In the Lindqvist trial (2021, n = 412) the drug lowered systolic pressure by 7 mmHg.",
            "In the Lindqvist trial (2021, n = 412) the drug did not lower systolic pressure.",
            "The Lindqvist trial of 2012 tested the same drug against asthma.",
            "A trial of 2021 by Okafor and others found that the drug lowers blood pressure.",
            "Blood pressure is the force of the blood against the walls of the arteries.",
            "The trial's protocol was registered in March 2020; its results are not published.",
            "Systolic pressure: −7.1 mmHg (95% CI −9.0 to −5.2), p < 0.001.",
            "Lindqvist Lindqvist Lindqvist trial trial drug drug pressure pressure 2021 2021",
            "Yes.",
            "No.",
            "The committee met on Tuesday, and the minutes were approved without changes.",
            "Patients who took the drug reported headaches, and eleven of them left the trial.",
        ),
    ),
)

_TEXTS = hashlib.sha256(repr(PROBES).encode()).hexdigest()[:8]


def probe_scores(score: Callable[[str, Sequence[str]], FloatArray]) -> str:
    """Describe a reranker's scores of the probes, as an entry of a fingerprint.

    Args:
        score: Scores documents for a query, shape (n,); whatever it raises is passed on.
    """
    return described([score(query, documents) for query, documents in PROBES])


def described(scores: Sequence[FloatArray]) -> str:
    """Write the entry of a fingerprint for the scores of each probe's documents, shape (n,)."""
    values = [float(value) for each in scores for value in each]
    return " ".join([_TEXTS, *(f"{value:.{_DIGITS}g}" for value in values)])


def difference(then: str, now: str) -> float | None:
    """Return the largest difference between two entries, in standard deviations of the first.

    Infinite if only one of two scores is a number; None if the entries come from different texts
    and cannot be compared.

    >>> difference("a 1 3", "a 1 3.5"), difference("a 1 3", "b 1 3")
    (0.5, None)
    """
    (texts, *former), (other_texts, *present) = then.split(" "), now.split(" ")
    try:
        was, is_now = np.array(former, dtype=float), np.array(present, dtype=float)
    except ValueError:
        return None
    if texts != other_texts or was.size != is_now.size:
        return None
    known = np.isfinite(was)
    if (known != np.isfinite(is_now)).any():
        return math.inf
    apart = np.abs(is_now[known] - was[known]).max(initial=0.0)
    return float(apart / max(was[known].std() if known.any() else 0.0, _PRECISION))
