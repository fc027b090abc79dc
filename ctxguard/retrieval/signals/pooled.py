"""All signals of one pool of candidates, and the pooled ranker's order of them."""

from collections.abc import Mapping

import numpy as np

from ctxguard._support import _compiled
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Leg
from ctxguard.retrieval.signals import candidates, second_pass, sentences, text
from ctxguard.retrieval.signals.candidates import (
    MOST_COMPARED,
    Float32Array,
    OrderArray,
    best_first,
    list_signals,
)
from ctxguard.retrieval.signals.ranker import CLIP, INPUTS, RANKER_SIGNAL, Ranker, RankerLevel
from ctxguard.retrieval.signals.sentences import SentenceInputs, sentence_signals
from ctxguard.retrieval.signals.term_vectors import term_cosines
from ctxguard.retrieval.signals.text import PassageWords, QueryWords, text_signals

_BY_RANKS = Fusion()
_VALUES = {level: [name.rpartition(".")[0] for name in names] for level, names in INPUTS.items()}
_N_SCORES = {level: sum(name.endswith(".z") for name in INPUTS[level]) for level in INPUTS}
_LEGS = ("lexical", "dense")
_POOLED = (*candidates.NAMES, RANKER_SIGNAL, *second_pass.NAMES)
_NAMES: Mapping[RankerLevel, tuple[str, ...]] = {
    "full": (*_LEGS, *text.NAMES, *sentences.NAMES, *_POOLED),
    "text": (*_LEGS, *text.NAMES, *_POOLED),
}


def ranked_signals(  # noqa: PLR0917  as the compiled one
    rows: OrderArray,
    legs: Mapping[str, Leg],
    words: PassageWords,
    query: QueryWords,
    stem_weights: FloatArray,
    vectors: Float32Array,
    sentence_inputs: SentenceInputs | None,
    ranker: Ranker,
    places: OrderArray | None = None,
) -> tuple[OrderArray, dict[str, FloatArray]]:
    """Compute every signal of one query's candidates, in one compiled call.

    Args:
        rows: The candidates' rows, shape (n,), best first by the legs' fusion.
        legs: ``lexical`` and ``dense``, shape (n,) each.
        words: The passages' words.
        query: The query's words.
        stem_weights: As for `term_cosines`.
        vectors: The passages' unit vectors, shape (n_rows, dimension).
        sentence_inputs: For the sentence signals; None for none of them.
        ranker: The weights.
        places: The row of each candidate in ``words``, ``vectors`` and sentences, shape (n,); None
            for ``rows``.

    Returns:
        The rows, best first by the ranker, ties by row; and by name, in that order, the legs'
        scores and every signal: text family, sentences if there are any, lists, ranker, second
        pass.
    """
    level: RankerLevel = "text" if sentence_inputs is None else "full"
    if _compiled.kernels is not None:
        ordered, values = np.empty(rows.size, np.int64), np.empty((len(_NAMES[level]), rows.size))
        _compiled.kernels.ranked_signals(
            rows,
            places,
            np.ascontiguousarray(legs["lexical"].scores),
            np.ascontiguousarray(legs["dense"].scores),
            *words,
            *query,
            stem_weights,
            vectors,
            *(sentence_inputs or (None,) * len(SentenceInputs._fields)),
            ranker.in_order[level],
            ordered,
            values,
        )
        return ordered, dict(zip(_NAMES[level], values, strict=True))
    places = rows if places is None else places
    signals = {name: legs[name].scores for name in _LEGS}
    signals |= zip(text.NAMES, text_signals(words, query, places), strict=True)
    if sentence_inputs is not None:
        found = sentence_signals(sentence_inputs, places)
        signals |= dict(zip(sentences.NAMES, found, strict=True))
    cosines = term_cosines(words, stem_weights, places)
    signals |= rank_candidates(legs, signals, vectors[places], cosines, ranker)
    order = np.lexsort((rows, -signals[RANKER_SIGNAL]))
    return rows[order], {name: values[order] for name, values in signals.items()}


def rank_candidates(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray],
    vectors: Float32Array,
    term_cosines: FloatArray,
    ranker: Ranker,
) -> dict[str, FloatArray]:
    """Score the candidates of one query, and compare each with the highest-scoring ones.

    Each is compared with the `MOST_COMPARED` best by reciprocal ranks, in both passes.

    Args:
        legs: ``lexical`` and ``dense``, shape (n,) each.
        signals: The text signals, and the sentence signals if there are any, shape (n,) each.
        vectors: The passages' unit vectors, shape (n, dimension).
        term_cosines: The cosines of the passages' term vectors, shape (n, n).
        ranker: The weights; of level ``full`` if there are sentence signals.

    Returns:
        The list signals, ``ranker`` (finite; higher is better) and the signals of the second pass
        by name, shape (n,) each, in the order of the input.

    Raises:
        KeyError: an input of the ranker is missing.
    """
    fused = fuse(legs, _BY_RANKS)
    order = best_first(fused)
    back, compared = np.argsort(order), order[:MOST_COMPARED]
    # Not a matrix product, in which equal vectors may have unequal cosines.
    cosines = np.einsum("id,jd->ij", vectors[order], vectors[compared]).astype(np.float64)
    by_terms = term_cosines[np.ix_(order, compared)]
    lists = {name: each[back] for name, each in list_signals(cosines, by_terms).items()}
    scores = ranker_scores(legs, {**signals, **lists}, ranker, fused)
    second = second_pass.second_pass(cosines, by_terms, scores[order])
    return {**lists, RANKER_SIGNAL: scores, **{name: each[back] for name, each in second.items()}}


def ranker_scores(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray],
    ranker: Ranker,
    fused: FloatArray | None = None,
) -> FloatArray:
    """Compute the ranker's score of every candidate, shape (n,); arguments as `ranker_inputs`."""
    level = level_of(signals)
    scores: FloatArray = np.einsum(
        "k,kn->n", ranker.in_order[level], ranker_inputs(legs, signals, level, fused)
    )
    return scores


def level_of(signals: Mapping[str, FloatArray]) -> RankerLevel:
    """Return the ranker's level for which these signals suffice."""
    return "full" if "sentence_match" in signals else "text"


def ranker_inputs(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray],
    level: RankerLevel,
    fused: FloatArray | None = None,
) -> FloatArray:
    """Compute the inputs of a level, shape (number of inputs, n), rows in the order of ``INPUTS``.

    A z-score is 0 if all values are equal; an unknown value (NaN) also has z-score 0, and the
    rank after all others.

    Args:
        legs: ``lexical`` and ``dense``, shape (n,) each.
        signals: The raw signals by name, list signals included, shape (n,) each.
        level: The level, which chooses the inputs.
        fused: The reciprocal ranks of the legs, shape (n,); None to fuse them here.

    Raises:
        KeyError: a signal is missing.
    """
    values = {
        **signals,
        "dense": legs["dense"].scores,
        "lexical": np.log1p(np.maximum(legs["lexical"].scores, 0.0)),
        "reciprocal_ranks": fuse(legs, _BY_RANKS) if fused is None else fused,
    }
    rows = [values[name] for name in _VALUES[level]]
    scored, ranked = rows[: _N_SCORES[level]], rows[_N_SCORES[level] :]
    return np.array([*map(_z_scores, scored), *map(_log_ranks, ranked)])


def _z_scores(values: FloatArray) -> FloatArray:
    known = values[~np.isnan(values)]
    # Rounding alone would spread equal values.
    if not known.size or known.max() == known.min():
        return np.zeros(values.size)
    z: FloatArray = np.nan_to_num((values - known.mean()) / known.std())
    return z.clip(-CLIP, CLIP)


def _log_ranks(values: FloatArray) -> FloatArray:
    """Half the logarithm of each 1-based rank, equal values sharing the better, NaN behind all."""
    ascending = np.sort(values[~np.isnan(values)])
    better = np.where(
        np.isnan(values), ascending.size, ascending.size - ascending.searchsorted(values, "right")
    )
    logs: FloatArray = 0.5 * np.log(1.0 + better)
    return logs
