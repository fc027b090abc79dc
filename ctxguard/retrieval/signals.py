"""Computes signals of one query's candidates: their similarity to the query and to one another.

All are computed from the candidates' texts and vectors, by one path for every retriever:

- ``match``: Σ_i w_i · max_j q_i · (e(t_j) + v), with q_i the unit state of the query's word piece
  i, w_i its weight by rarity, e(t) the vector of a piece by itself, t_j the passage's pieces and v
  the passage's vector: a soft match in the manner of MaxSim (Khattab and Zaharia, SIGIR 2020),
  without a stored vector for every piece. ``vector_match`` is its second part, Σ_i w_i · q_i · v.
- ``length``: ln(1 + terms).
- List signals, of S and L, the cosines of passages' vectors and of their BM25 term vectors
  (Robertson and Zaragoza, 2009): ``redundancy`` is the highest S to a better candidate;
  ``similarity_3`` and ``similarity_10`` are the mean S to the 3 and 10 best others, and
  ``term_similarity_3`` the mean L to the 3 best. Relevant passages resemble one another (cluster
  hypothesis; van Rijsbergen, Information Retrieval, 1979, chapter 3), and one that resembles a
  better one adds less (Carbonell and Goldstein, SIGIR 1998).
- ``ranker``: r = Σ a_k · z_k + Σ d_l · ½ · ln(rank_l) over the legs' scores and the signals above,
  where z_k is the z-score of an input in the list, clipped to ±4, and rank_l the 1-based rank by an
  input, equal values sharing the better one. The weights are those of the most likely order under a
  softmax over each list (ListNet; Cao et al., ICML 2007). Those in ``ranker.json`` were trained by
  `benchmarks.ranker` on the collections that it names.
- The second pass, relevance feedback from the list itself (Lavrenko and Croft, SIGIR 2001), with
  w = softmax(r): ``term_support_3`` and ``vector_support_3``, the mean L and S to the 3 best others
  by r; ``term_support``, Σ_{j≠i} w_j L_ij / Σ_{j≠i} w_j; ``smoothed_by_vectors`` and
  ``smoothed_by_terms``, r averaged with the weights exp((S_ij − 1) / 0.1) and L_ij² + 10⁻⁶, where
  S_ii = L_ii = 0 (score regularisation; Diaz, CIKM 2005); ``vector_redundancy`` and
  ``term_redundancy``, the highest S and L to a better one.

Each candidate is compared with the `MOST_COMPARED` best by reciprocal ranks. What a retriever does
not have is left out of the signals, and unknown to the ranker. `ctxguard.core.signals` lists the
transforms of each name that a model may use. Vectorised numpy; 60 candidates of 200 words take two
milliseconds on one thread. Pure, but for reading ``ranker.json``.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray, Leg
from ctxguard.retrieval.index.lexical import SparseRows
from ctxguard.retrieval.protocols import Float32Array, QueryStates, RowArray

RANKER_SIGNAL = "ranker"
"""The ranker's score among the signals."""

NAMES = (
    "match",
    "vector_match",
    "length",
    "redundancy",
    "similarity_3",
    "similarity_10",
    "term_similarity_3",
    RANKER_SIGNAL,
    "term_support_3",
    "term_support",
    "smoothed_by_terms",
    "term_redundancy",
    "vector_support_3",
    "smoothed_by_vectors",
    "vector_redundancy",
)
"""All signals, in the order in which they are computed."""

_SCORED = ("dense", "lexical", "reciprocal_ranks", *NAMES[: NAMES.index(RANKER_SIGNAL)])
_RANKED = ("dense", "lexical", "match")

INPUTS = (*(f"{name}.z" for name in _SCORED), *(f"{name}.log_rank" for name in _RANKED))
"""The ranker's inputs, ``NAME.z`` or ``NAME.log_rank``."""

MOST_COMPARED = 100
"""How many others a candidate is compared with, so that time does not grow with their square."""

MOST_QUERY_PIECES = 12
"""The most word pieces of a query that count: those with the highest weights."""

_NEAR = 64
"""Word pieces whose vectors are compared at once: more outgrow a core's nearest cache."""

_CLIP = 4.0
"""z-scores are clipped to ± this: in a list of 100, a single candidate can have one of 10."""

_WIDTH = 0.1
_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class Ranker:
    """The weights of the ranker, by input.

    Attributes:
        weights: One weight for each of ``INPUTS``.
        trained_on: Names of collections.
        in_order: The weights in the order of ``INPUTS``.
    """

    weights: Mapping[str, float]
    trained_on: tuple[str, ...] = ()
    in_order: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_order", np.array([self.weights[name] for name in INPUTS]))

    @staticmethod
    @cache
    def default() -> "Ranker":
        """Return the ranker that comes with the package; read once."""
        return Ranker.of_json(files(__package__).joinpath("ranker.json").read_text("utf-8"))

    @classmethod
    def of_json(cls, text: str) -> "Ranker":
        """Read a ranker as `benchmarks.ranker` writes it."""
        data = json.loads(text)
        return cls(data["weights"], tuple(data["trained_on"]))

    def digest(self) -> str:
        """Hash the weights to 16 hexadecimal digits."""
        weights = {name: float(weight) for name, weight in self.weights.items()}
        return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()[:16]


class CandidateFeatures(NamedTuple):
    """One query's candidates as signals read them; row i is the same candidate in every array.

    Attributes:
        lengths: The number of terms of each, shape (n,).
        terms: Their terms.
        term_weights: BM25's weight of each entry of ``terms``, each row at unit length.
        vectors: Their unit vectors, shape (n, dimension); None if they are unknown.
        pieces: Their word pieces; None if they are unknown.
    """

    lengths: FloatArray
    terms: SparseRows
    term_weights: Float32Array
    vectors: Float32Array | None = None
    pieces: SparseRows | None = None


class QueryPieces(NamedTuple):
    """A query's word pieces.

    Attributes:
        states: The unit state of each, shape (m, d).
        weights: The weight of each by rarity; they sum to 1, shape (m,).
        table: The unit vector of every piece of the model by itself, shape (n_pieces, d).
    """

    states: Float32Array
    weights: Float32Array
    table: Float32Array

    @classmethod
    def of(cls, query: QueryStates, rarity: FloatArray, table: Float32Array) -> "QueryPieces":
        """Keep the `MOST_QUERY_PIECES` rarest pieces, weighted by each one's ``rarity`` ≥ 0."""
        weights = rarity[query.piece_ids]
        rarest = np.argsort(-weights, kind="stable")[:MOST_QUERY_PIECES]
        weights = weights[rarest] / (weights[rarest].sum() or 1.0)
        return cls(query.states[rarest], weights.astype(np.float32), table)


def signals(
    candidates: CandidateFeatures,
    legs: Mapping[str, Leg],
    fused: FloatArray,
    query: QueryPieces | None,
    ranker: Ranker,
) -> dict[str, FloatArray]:
    """Compute the signals by name, shape (n,) each, in the order of `NAMES`.

    Those that need vectors, or the query's word pieces, are left out where these are unknown.

    Args:
        candidates: At least one.
        legs: ``lexical``, ``dense``, or both: each leg's scores of the candidates, shape (n,).
        fused: The reciprocal ranks of the legs, shape (n,).
        query: The query's word pieces; None if they are unknown.
        ranker: The weights.
    """
    lengths, entries, weights, vectors, pieces = candidates
    order = np.argsort(-fused, kind="stable")
    compared = order[:MOST_COMPARED]
    best = np.arange(compared.size)
    terms = term_cosines(entries, weights, compared)
    near = None if vectors is None else Cosines.of(vectors @ vectors[compared].T, compared)
    found: dict[str, FloatArray] = {}
    if query is not None and pieces is not None and vectors is not None:
        found["match"], found["vector_match"] = soft_match(query, pieces, vectors)
    found["length"] = np.log1p(lengths)
    if near is not None:
        found["redundancy"] = near.highest_to_better(near.is_better(order))
        found["similarity_3"] = near.mean_of_best(best, 3)
        found["similarity_10"] = near.mean_of_best(best, 10)
    found["term_similarity_3"] = terms.mean_of_best(best, 3)
    r: FloatArray = ranker.in_order @ ranker_inputs(legs, found, fused)
    found[RANKER_SIGNAL] = r
    return found | second_pass(near, terms, r)


class Cosines(NamedTuple):
    """The cosines between n candidates and m of them.

    Attributes:
        values: Shape (n, m), 0 of a candidate with itself.
        compared: The m candidates' rows, shape (m,).
    """

    values: Float32Array
    compared: RowArray

    @classmethod
    def of(cls, products: Float32Array, compared: RowArray) -> "Cosines":
        """Make cosines from products of unit vectors, shape (n, m), which are changed in place."""
        products[compared, np.arange(compared.size)] = 0.0
        return cls(products, compared)

    def mean_of_best(self, best: RowArray, k: int) -> FloatArray:
        """Compute each candidate's mean cosine to the k best others, shape (n,).

        ``best`` holds the places of the m among themselves, best first.
        """
        first = best[:k]
        sums = self.values[:, first].sum(axis=1, dtype=np.float64)
        others = np.full(sums.size, min(best.size, k))
        own = self.compared[first]
        if best.size > k:
            # One of the k best has the next in place of itself.
            sums[own] += self.values[own, best[k]]
        else:
            others[own] -= 1
        means: FloatArray = sums / np.maximum(others, 1)
        return means

    def highest_to_better(self, is_better: NDArray[np.bool_]) -> FloatArray:
        """Compute each candidate's highest cosine to a better one, (n,); 0 if none is above 0."""
        highest = (self.values * is_better).max(axis=1, initial=0.0)
        found: FloatArray = highest.astype(np.float64)
        return found

    def is_better(self, order: RowArray) -> NDArray[np.bool_]:
        """Return whether each of the m comes before each candidate in an order, shape (n, m)."""
        ranks = np.empty(order.size, np.int64)
        ranks[order] = np.arange(order.size)
        better: NDArray[np.bool_] = ranks[self.compared] < ranks[:, np.newaxis]
        return better

    def smoothed(self, weights: FloatArray | Float32Array, own: float, r: FloatArray) -> FloatArray:
        """Average the scores of the m by weights, shape (n, m).

        A candidate outside the m adds its own score, with the weight ``own``.
        """
        own_weights = np.full(r.size, own)
        own_weights[self.compared] = 0.0
        totals = weights @ r[self.compared] + own_weights * r
        smoothed: FloatArray = totals / (weights.sum(axis=1) + own_weights)
        return smoothed


def soft_match(
    query: QueryPieces, pieces: SparseRows, vectors: Float32Array
) -> tuple[FloatArray, FloatArray]:
    """Compute ``match`` and ``vector_match``, shape (n,) each.

    A passage without a word piece is as far as can be from any.
    """
    distinct, place = _compact(pieces.numbers)
    nearness = np.empty((distinct.size, query.weights.size), np.float32)
    for at in range(0, distinct.size, _NEAR):
        some = slice(at, at + _NEAR)
        np.matmul(query.table.take(distinct[some], axis=0), query.states.T, out=nearness[some])
    nearest = np.full((len(vectors), query.weights.size), -1.0, np.float32)
    filled = np.flatnonzero(np.diff(pieces.starts))
    if filled.size and query.weights.size:
        # The rows of pieces lie in one stretch of memory, which a maximum reads once.
        of_each = nearness.take(place, axis=0)
        nearest[filled] = np.maximum.reduceat(of_each, pieces.starts[filled], axis=0)
    weights = query.weights.astype(np.float64)
    by_vector: FloatArray = (vectors @ query.states.T) @ weights
    return nearest @ weights + by_vector, by_vector


def term_cosines(terms: SparseRows, weights: Float32Array, compared: RowArray) -> Cosines:
    """Compute the cosines of rows' term vectors with some rows'; 0 for a row without terms."""
    distinct, place = _compact(terms.numbers)
    # Only a term that two candidates share adds to a cosine.
    is_shared = np.bincount(place, minlength=distinct.size) > 1
    kept = is_shared[place]
    matrix = np.zeros((terms.starts.size - 1, int(is_shared.sum())), np.float32)
    matrix[terms.row_of_each[kept], (np.cumsum(is_shared) - 1)[place[kept]]] = weights[kept]
    return Cosines.of(matrix @ matrix[compared].T, compared)


def _compact(numbers: NDArray[np.integer]) -> tuple[RowArray, RowArray]:
    """Return the distinct numbers, ascending, and the position of each number among them."""
    there = np.zeros(int(numbers.max(initial=-1)) + 1, np.bool_)
    there[numbers] = True
    distinct = np.flatnonzero(there)
    place = np.empty(there.size, np.int64)
    place[distinct] = np.arange(distinct.size)
    return distinct, place[numbers]


def ranker_inputs(
    legs: Mapping[str, Leg], signals: Mapping[str, FloatArray], fused: FloatArray
) -> FloatArray:
    """Compute the ranker's inputs, shape (number of inputs, n), rows in the order of ``INPUTS``.

    A z-score is 0 if all values are equal; an unknown value (NaN) also has z-score 0, and the
    rank after all others. A leg that did not answer, and a missing signal, is unknown throughout.
    Arguments as for `signals`, with the signals that come before the ranker.
    """
    values = {**signals, "reciprocal_ranks": fused}
    if "dense" in legs:
        values["dense"] = legs["dense"].scores
    if "lexical" in legs:
        values["lexical"] = np.log1p(np.maximum(legs["lexical"].scores, 0.0))
    inputs = np.empty((len(INPUTS), fused.size))
    z, log_ranks = inputs[: len(_SCORED)], inputs[len(_SCORED) :]
    for row, name in zip(z, _SCORED, strict=True):
        row[:] = values.get(name, np.nan)
    for row, name in zip(log_ranks, _RANKED, strict=True):
        # Descending, with NaN behind all: how many are better is where a value would be put in.
        descending = -z[_SCORED.index(name)]
        row[:] = np.sort(descending).searchsorted(descending)
    log_ranks += 1.0
    np.log(log_ranks, out=log_ranks)
    log_ranks *= 0.5
    # From the highest, so that equal values are exactly 0: their mean may be rounded.
    z -= np.fmax.reduce(z, axis=1, keepdims=True)
    unknown = np.isnan(z)
    z[unknown] = 0.0
    n_known = np.maximum(fused.size - unknown.sum(axis=1, keepdims=True), 1)
    z -= z.sum(axis=1, keepdims=True) / n_known
    z[unknown] = 0.0
    spread = np.sqrt(np.einsum("ij,ij->i", z, z)[:, np.newaxis] / n_known)
    spread[spread == 0.0] = np.inf
    z /= spread
    np.clip(z, -_CLIP, _CLIP, out=z)
    return inputs


def second_pass(near: Cosines | None, terms: Cosines, r: FloatArray) -> dict[str, FloatArray]:
    """Compute the signals of the second pass from the ranker's scores, shape (n,), finite.

    A single candidate has 0 everywhere, and its own score for the smoothed ones.
    """
    compared = terms.compared
    best = np.argsort(-r[compared], kind="stable")
    is_better = terms.is_better(np.argsort(-r, kind="stable"))
    weights = np.exp(r - r.max(initial=-np.inf))
    own = np.zeros(r.size)
    own[compared] = weights[compared]
    weights = weights[compared]
    # Without itself. If one score is higher by hundreds, the others weigh nothing.
    total = weights.sum() - own
    support = np.divide(terms.values @ weights, total, out=np.zeros(r.size), where=total > 1e-12)
    found = {
        "term_support_3": terms.mean_of_best(best, 3),
        "term_support": support,
        "smoothed_by_terms": terms.smoothed(np.square(terms.values) + _FLOOR, _FLOOR, r),
        "term_redundancy": terms.highest_to_better(is_better),
    }
    if near is not None:
        found["vector_support_3"] = near.mean_of_best(best, 3)
        kernel = np.exp((near.values - np.float32(1.0)) / np.float32(_WIDTH))
        found["smoothed_by_vectors"] = near.smoothed(kernel, np.exp(-1.0 / _WIDTH), r)
        found["vector_redundancy"] = near.highest_to_better(is_better)
    return found
