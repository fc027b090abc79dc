"""What judged questions say of the first k passages: the judge's own view, or corrected by people.

Where people graded enough questions whole, the judge's figures of all questions are corrected by
theirs and count as far as they narrow the result (Angelopoulos, Duchi and Zrnic, 2023, arXiv
2311.01453). Without, they are the judge's opinion, and have no interval. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctxguard._support.words import count
from ctxguard.core.interval import Interval
from ctxguard.core.metrics import Utilities, strict_utilities, udcg
from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.ratio import CONFIDENCE, t_quantile, unseen_share

KS = (1, 3, 5, 10, 20)
METRICS = ("precision", "mrr", "udcg", "recall")
"""Recall is the share of the relevant among what was judged; it and MRR are means over questions
that have one."""
LEAST_GRADED = 10
"""Questions that people graded whole, below which theirs correct nothing."""

Grades = Sequence[int | None]
"""Grades of a question's passages by rank; None where there is none."""


@dataclass(frozen=True)
class JudgedAtK:
    """The first k passages of each question.

    Attributes:
        precision: Share of the judged passages that is relevant.
        mrr: Reciprocal rank of the first relevant passage, 0 where none is among the first k.
        udcg: Strict UDCG.
        recall: Share of the question's judged relevant passages.
    """

    k: int
    precision: Interval
    mrr: Interval
    udcg: Interval
    recall: Interval


@dataclass(frozen=True)
class JudgedTable:
    """The figures of every k.

    Attributes:
        rows: By k; intervals only where people's grades correct the judge.
        questions: Questions with a verdict.
        graded: Questions that people graded whole.
    """

    rows: tuple[JudgedAtK, ...]
    questions: int
    graded: int

    @property
    def is_corrected(self) -> bool:
        """Whether people's grades correct the judge."""
        return self.graded >= LEAST_GRADED

    @property
    def in_words(self) -> str:
        """Whose figures they are."""
        judged = f"{count(self.questions, 'question')} judged"
        if self.is_corrected:
            return f"{judged}, corrected by people's grades of {self.graded}"
        graded = f"{self.graded} graded whole" if self.graded else "none graded"
        return f"the judge's own view, uncorrected: {judged}, {graded} by people"


def judged_table(
    verdicts: Mapping[str, Grades],
    people: Mapping[str, Grades],
    utilities: Utilities,
    *,
    top_grade: int,
    top_grade_of_people: int,
) -> JudgedTable:
    """Average precision, MRR, strict UDCG and recall of the first k over judged questions.

    Args:
        verdicts: The judge's grades, by question.
        people: People's, of the questions that they graded whole.
        utilities: The worth of a passage.
        top_grade, top_grade_of_people: The highest grade of each scale.
    """
    names = list(verdicts)
    judge = np.array([_terms(verdicts[name], top_grade, utilities) for name in names])
    graded = [row for row, name in enumerate(names) if name in people]
    found = np.array(
        [_terms(people[names[row]], top_grade_of_people, utilities) for row in graded]
    ).reshape(-1, len(KS), len(METRICS), 2)
    rows = [
        JudgedAtK(
            k,
            *(
                _corrected(judge[:, at, metric], graded, found[:, at, metric], bounded=name)
                if len(graded) >= LEAST_GRADED
                else _mean(judge[:, at, metric])
                for metric, name in enumerate(METRICS)
            ),
        )
        for at, k in enumerate(KS)
    ]
    return JudgedTable(tuple(rows), len(names), len(graded))


def _terms(grades: Grades, top_grade: int, utilities: Utilities) -> FloatArray:
    """Numerator and denominator of each metric at each k, shape (5, 4, 2)."""
    known, plain = [grade is not None for grade in grades], [grade or 0 for grade in grades]
    worth = strict_utilities(plain, top_grade=top_grade, judged=known, utilities=utilities)
    relevant = [grade > 0 for grade in plain]
    n_relevant, has_one = sum(relevant), float(any(relevant))
    first = relevant.index(True) + 1 if has_one else 0
    rows = []
    for k in KS:
        n_judged, found = sum(known[:k]), sum(relevant[:k])
        rows.append(
            (
                (found / max(n_judged, 1), float(n_judged > 0)),
                (1.0 / first if 0 < first <= k else 0.0, has_one),
                (udcg(worth[:k]).value, 1.0),
                (found / max(n_relevant, 1), has_one),
            )
        )
    return np.array(rows)


def _mean(terms: FloatArray) -> Interval:
    n = int(terms[:, 1].sum())
    return Interval(float(terms[:, 0].sum() / n), None, None, n) if n else Interval.undefined()


def _corrected(
    judge: FloatArray, graded: Sequence[int], found: FloatArray, *, bounded: str
) -> Interval:
    """Estimate Σ a / Σ b of all questions from the judge's terms and people's of some.

    Args:
        judge: Shape (n, 2), by the judge.
        graded: The m rows of these that people graded.
        found: Shape (m, 2), by people.
        bounded: The metric; all but UDCG lie in [0, 1].
    """
    n, m = len(judge), len(found)
    if not found[:, 1].any():
        return Interval.undefined()
    ratio, own = found[:, 0].sum() / found[:, 1].sum(), judge[graded]
    expected, seen = own[:, 0] - ratio * own[:, 1], found[:, 0] - ratio * found[:, 1]
    power = 0.0
    if (spread := expected.var(ddof=1)) > 1e-12:
        power = float(np.clip(np.cov(seen, expected)[0, 1] / spread / (1.0 + m / n), 0.0, 1.0))
    total = power * judge.mean(axis=0) + (found - power * own).mean(axis=0)
    value = float(total[0] / total[1]) if total[1] > 0.0 else float(ratio)
    errors = [terms[:, 0] - value * terms[:, 1] for terms in (judge, found, own)]
    variance = power**2 * errors[0].var(ddof=1) / n
    variance += (errors[1] - power * errors[2]).var(ddof=1) / m
    size = total[1] if total[1] > 0.0 else found[:, 1].mean()
    half = t_quantile((1.0 + CONFIDENCE) / 2.0, m - 1.0) * float(np.sqrt(variance)) / float(size)
    lower, upper = value - half, value + half
    if bounded != "udcg":
        value = min(max(value, 0.0), 1.0)
        # Questions too rare to be among those graded leave room on either side.
        unseen = unseen_share(float(found[:, 1].sum()))
        lower = max(min(lower, value * (1.0 - unseen)), 0.0)
        upper = min(max(upper, value + (1.0 - value) * unseen), 1.0)
    return Interval(value, lower, upper, m)
