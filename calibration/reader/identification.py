"""Finds the terms that the contexts can tell apart within questions, whatever the answers are.

Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from calibration.reader.answers import COSTS, TERMS, IntArray, TermName
from calibration.reader.within_question import centred
from ctxguard.core.types import FloatArray

MIN_OWN_VARIATION = 0.05
"""Minimum share of a term's variance that other terms do not explain (inflation 20)."""

MIN_CARRYING_QUESTIONS = 10

NOUNS: Mapping[TermName, str] = {
    "relevant": "the share of the needed passages",
    "unjudged": "the number of unjudged passages",
    "irrelevant": "the number of irrelevant passages",
    "hard_negative": "the number of labelled hard negatives",
    "distractor": "the number of known distractors",
    "position": "the rank of the first relevant passage",
    "completeness": "whether all needed passages are there",
}

_EXACT = 1e-9
_DIGITS = 9
_TAKES_PART = 0.2


def unidentified(
    columns: Mapping[TermName, FloatArray], needed: IntArray, question: IntArray
) -> dict[TermName, str]:
    """Return the terms that these contexts cannot identify, whatever the answers, with the reason.

    Only differences between the contexts of one question count. Counts of passages that are not
    relevant must also differ among contexts with the same numbers of held and needed passages: if
    all contexts of a question have one size, these counts follow from the number of relevant
    passages, and only an assumed curve could tell the two apart. ``relevant`` and ``completeness``
    form the unit together, so ``relevant`` need not be told from it, nor from a count that is
    refused, which leaves the model.

    Args:
        columns: From ``answers.term_columns``, shape (n,) each.
        needed: Shape (n,), number of relevant passages of each row's question.
        question: Shape (n,), the question that each row answers.
    """
    within = {name: centred(column, question) for name, column in columns.items()}
    varying = [name for name in TERMS if within[name].any()]
    reasons = {name: _constant(name, columns[name]) for name in TERMS if name not in varying}
    of_held = _indicators(columns["relevant"], needed, question)
    for name in (*COSTS, "position", "relevant", "completeness"):
        if name in reasons:
            continue
        others = [other for other in varying if other != name]
        if name in ("relevant", "completeness"):
            others = [other for other in others if other not in reasons]
        if name == "relevant":
            others = [other for other in others if other != "completeness"]
        held = of_held if name in COSTS else of_held[:, :0]
        if reason := _shared(name, others, within, held, question):
            reasons[name] = reason
    return reasons


def _constant(name: TermName, column: FloatArray) -> str:
    if name in COSTS and not column.any():
        return f"{NOUNS[name]} is 0 in every context"
    return f"{NOUNS[name]} is the same in every context of a question"


def _shared(
    name: TermName,
    others: Sequence[TermName],
    within: Mapping[TermName, FloatArray],
    held: FloatArray,
    question: IntArray,
) -> str | None:
    column = within[name]
    total = float((column**2).sum())
    if held.size and (_residual(column, held) ** 2).sum() < _EXACT * total:
        return (
            f"{NOUNS[name]} follows from the number of relevant ones in every context (contexts "
            "of one size?)"
        )
    table = np.concatenate([held, *[within[other][:, None] for other in others]], axis=1)
    residual = _residual(column, table)
    if (residual**2).sum() < MIN_OWN_VARIATION * total:
        weights = np.linalg.lstsq(table, column, rcond=None)[0][held.shape[1] :]
        with_ = [
            NOUNS[other]
            for other, weight in zip(others, weights, strict=True)
            if abs(weight) * np.sqrt((within[other] ** 2).sum()) > _TAKES_PART * np.sqrt(total)
        ]
        what = " and ".join(with_) or "the number of relevant passages"
        return (
            f"within questions it cannot be told from {what}: under {MIN_OWN_VARIATION:.0%} of its "
            "variation is its own"
        )
    by_question = np.bincount(question, weights=residual**2)
    carrying = float(by_question.sum() ** 2 / (by_question**2).sum())
    if carrying < MIN_CARRYING_QUESTIONS:
        return (
            f"its own variation rests on the equivalent of {carrying:.0f} questions; "
            f"{MIN_CARRYING_QUESTIONS} are needed"
        )
    return None


def _residual(column: FloatArray, table: FloatArray) -> FloatArray:
    if not table.size:
        return column
    residual: FloatArray = column - table @ np.linalg.lstsq(table, column, rcond=None)[0]
    return residual


def _indicators(share: FloatArray, needed: IntArray, question: IntArray) -> FloatArray:
    """Indicators of each pair (held, needed) of relevant passages, centred within questions."""
    pairs = np.stack([share.round(_DIGITS), needed], axis=1)
    values, own = np.unique(pairs, axis=0, return_inverse=True)
    indicators = [centred((own.ravel() == value) * 1.0, question) for value in range(len(values))]
    return np.stack(indicators, axis=1)
