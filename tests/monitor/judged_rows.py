"""Judged requests as rows, written down as a test needs them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ctxguard.measure.estimate import Sums
from ctxguard.measure.metrics import N_TERMS, Metric, weighted_terms
from ctxguard.measure.rows import (
    MISSING,
    NEAR,
    PASSAGE,
    REQUEST,
    UNGRADED,
    Rows,
    rank_group,
    session_number,
)

GAIN, HARM = 1.0, 0.5


@dataclass(frozen=True)
class Judged:
    """One judged request, its whole pool as far as nothing else is said.

    Attributes:
        served, dropped: Verdicts of the judge, the served ones by rank.
        weight: 1 / the probability of having been judged.
        dropped_chance: The probability with which each of the dropped was judged.
        pool_chance: That of the whole pool; None where it was not judged.
        n_first: How many of the retriever's first few, all judged, were dropped; those are the
            first of ``dropped``. None where they were not judged by design.
        grades: People's, of the served passages and then of the dropped; None for an ungraded one.
        chances: With which each of these was asked for; empty for certainty.
        scores: The judge's log-odds; empty without.
    """

    served: Sequence[int] = ()
    dropped: Sequence[int] = ()
    weight: float = 1.0
    session: str | None = None
    question: int = 0
    dropped_chance: float = 1.0
    pool_chance: float | None = 1.0
    n_first: int | None = None
    grades: Sequence[int | None] = ()
    chances: Sequence[float] = ()
    scores: Sequence[float] = ()

    def rows(self) -> Rows:
        n, k = len(self.served) + len(self.dropped), len(self.served)
        request, passages = np.zeros(1, REQUEST), np.zeros(n, PASSAGE)
        rank = np.arange(1, n + 1) * (np.arange(n) < k)
        verdicts = np.array([*self.served, *self.dropped], np.intp)
        grades = [UNGRADED if one is None else one for one in self.grades] or [UNGRADED] * n
        is_graded = np.array(grades, np.intp) != UNGRADED
        columns = {
            "rank": rank,
            "group": np.where(rank > 0, rank_group(rank), NEAR),
            "in_baseline": np.arange(n) < k + (self.n_first or 0),
            "judge_grade": verdicts,
            "score": list(self.scores) or 0.0,
            "worth": np.choose(verdicts, [-HARM, GAIN, 0.0, 0.0]),
            "size": np.where(rank > 0, 1.0, 1.0 / (self.dropped_chance or 1.0)),
            "people_grade": grades,
            "people_worth": np.where(is_graded, np.where(np.array(grades) > 0, GAIN, -HARM), 0.0),
            "asked_probability": np.where(is_graded, list(self.chances) or 1.0, 0.0),
        }
        for name, values in columns.items():
            passages[name] = values
        request["n_passages"], request["n_served"] = n, k
        request["probability"] = 1.0 / self.weight
        request["session"] = session_number(self.session)
        request["question"] = self.question
        request["dropped_probability"] = self.dropped_chance
        request["pool_probability"] = math.nan if self.pool_chance is None else self.pool_chance
        request["has_recall"] = self.pool_chance is not None and MISSING not in verdicts
        request["has_baseline"] = self.n_first is not None
        request["draw"] = int(is_graded.any())
        request["is_run"] = request["run_probability"] = 1
        return Rows.of(request, passages)


def rows_of(requests: Iterable[Judged]) -> Rows:
    return Rows.joined([one.rows() for one in requests])


def sums_of(rows: Rows, size: int | None = None) -> Sums:
    """Sums of the terms of some requests, added in parts, clustered by session."""
    found, number = Sums.of(N_TERMS), np.arange(len(rows.requests))
    for start in range(0, len(rows.requests), size or max(len(rows.requests), 1)):
        part = rows.take((number >= start) & (number < start + (size or len(rows.requests))))
        values, inclusion = weighted_terms(part)
        found.add(values, part.requests["session"], inclusion)
    return found.ended()


def sums(requests: Iterable[Judged]) -> Sums:
    return sums_of(rows_of(requests))


def ratio_sums(metric: Metric, requests: Iterable[Judged]) -> Sums:
    return sums(requests).ratio(metric)


def numbers(sums: Sums) -> list[float]:
    """All that estimates read of the two columns of a ratio."""
    return [sums.n, sums.n_observable, *sums.totals, *sums.products.ravel()]
