"""Which terms the recorded contexts can tell apart, whatever the answers are.

Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from calibration.reader.answers import COSTS, TERMS, IntArray, TermName
from ctxguard.core.types import FloatArray

MIN_OWN_VARIATION = 0.05
"""The least share of a term's variance that other terms do not explain (inflation 20)."""

MIN_CARRYING_QUESTIONS = 10

NOUNS: Mapping[str, str] = {
    "relevant": "the share of the needed passages",
    "irrelevant": "the number of irrelevant passages",
    "hard_negative": "the number of labelled hard negatives",
    "distractor": "the number of known distractors",
    "position": "the rank of the first relevant passage",
    "completeness": "whether all needed passages are there",
    "needed": "the number of needed passages",
}

_EXACT = 1e-9
_DIGITS = 9
_TAKES_PART = 0.2


def varies(column: FloatArray) -> bool:
    return bool(np.ptp(column) > _EXACT)


def unidentified(columns: Mapping[str, FloatArray], question: IntArray) -> dict[TermName, str]:
    """The terms that these contexts cannot identify, whatever the answers, each with the reason.

    Counts of passages that are not relevant are compared only among contexts with equally many
    relevant passages held and needed: if all contexts have one size, these counts follow from
    the number of relevant passages, and only an assumed curve could tell the two apart.
    ``relevant`` and ``completeness`` form the unit together, so ``relevant`` need not be told
    from it, nor from a count that is refused, which leaves the model.

    Args:
        columns: From ``answers.term_columns``, shape (n,) each.
        question: Shape (n,), which question each row answers.
    """
    varying = [name for name, column in columns.items() if varies(column)]
    reasons: dict[TermName, str] = {}
    for name in TERMS:
        if name not in varying:
            reasons[name] = _constant(name, columns[name])
    alike = _numbered(np.stack([columns["relevant"], columns["needed"]], axis=1))
    together = np.zeros_like(alike)
    for name in (*COSTS, "position", "relevant", "completeness"):
        if name in reasons:
            continue
        others = [other for other in varying if other != name]
        if name in ("relevant", "completeness"):
            others = [other for other in others if other not in reasons]
        if name == "relevant":
            others = [other for other in others if other != "completeness"]
        strata = alike if name in COSTS else together
        if reason := _shared(name, others, columns, strata, question):
            reasons[name] = reason
    return reasons


def _constant(name: TermName, column: FloatArray) -> str:
    if name in COSTS and column[0] == 0.0:
        return f"{NOUNS[name]} is 0 in every context"
    return f"{NOUNS[name]} is the same in every context"


def _shared(
    name: TermName,
    others: Sequence[str],
    columns: Mapping[str, FloatArray],
    strata: IntArray,
    question: IntArray,
) -> str | None:
    column = _centred(columns[name], strata)
    total = float(((columns[name] - columns[name].mean()) ** 2).sum())
    if (column**2).sum() < _EXACT * total:
        return (
            f"{NOUNS[name]} follows from the number of relevant ones in every context (contexts "
            "of one size?)"
        )
    table = np.stack([np.zeros_like(column), *[_centred(columns[o], strata) for o in others]], 1)
    weights = np.linalg.lstsq(table, column, rcond=None)[0]
    residual = column - table @ weights
    if (residual**2).sum() < MIN_OWN_VARIATION * total:
        parts = np.abs(weights) * np.sqrt((table**2).sum(axis=0))
        with_ = [
            NOUNS[other]
            for other, part in zip(others, parts[1:], strict=True)
            if part > _TAKES_PART * np.sqrt((column**2).sum())
        ]
        what = " and ".join(with_) or "the number of relevant passages"
        return (
            f"it cannot be told from {what}: under {MIN_OWN_VARIATION:.0%} of its variation is "
            "its own"
        )
    by_question = np.bincount(question, weights=residual**2)
    carrying = float(by_question.sum() ** 2 / (by_question**2).sum())
    if carrying < MIN_CARRYING_QUESTIONS:
        return (
            f"its own variation rests on the equivalent of {carrying:.0f} questions; "
            f"{MIN_CARRYING_QUESTIONS} are needed"
        )
    return None


def _centred(column: FloatArray, strata: IntArray) -> FloatArray:
    sizes = np.bincount(strata)
    centred: FloatArray = column - (np.bincount(strata, weights=column) / sizes)[strata]
    return centred


def _numbered(rows: FloatArray) -> IntArray:
    numbers: IntArray = np.unique(rows.round(_DIGITS), axis=0, return_inverse=True)[1].ravel()
    return numbers
