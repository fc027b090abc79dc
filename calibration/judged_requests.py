"""Measures any contexts of judged requests, and fits a policy to the requests.

People graded some of the candidates; a ridge logistic regression of their grades on what the judge
said predicts all of them (``ctxguard.measure.corrected``). P(relevant) is fitted to the grade where
there is one and else to the prediction. Without grades there is the judge's own view alone. The
estimators are those of live traffic: a context is the same rows with other ranks. Pure; fitting
needs the extra `calibrate`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from calibration.asked_questions import JUDGED_DEPTH
from calibration.choice import LOST_QUERIES, RICHEST
from calibration.data.dataset import Dataset
from calibration.evaluate import contexts
from calibration.fit import fit_model, pool_features
from calibration.fit import predicted as predicted_by
from calibration.pools import Pools
from calibration.settings import Settings
from calibration.verdict import mean_interval
from ctxguard._support.words import count
from ctxguard.core.passages import weight_of
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.corrected import (
    N_COLUMNS,
    NEVER,
    Graded,
    Model,
    corrected_differences,
    corrected_estimates,
    predicted,
)
from ctxguard.measure.estimate import DEFAULT_MIN_N, Estimate, Sums, lacks_grades
from ctxguard.measure.interval import Interval
from ctxguard.measure.metrics import METRICS, N_TERMS, POOL, Metric, shown_metrics, weighted_terms
from ctxguard.measure.rows import FAILED, BoolArray, IntArray, Rows
from ctxguard.measure.worth import READERS, Utilities

KS = (1, 3, 5, 10, 20)
MOST_PROBABLE = 0.99
"""The highest threshold on P(relevant)."""
BY_K: Mapping[str, Metric] = {
    "precision": Metric.PRECISION,
    "mrr": Metric.SERVED_MRR,
    "udcg": Metric.UDCG,
    "recall": Metric.POOLED_RECALL,
}
"""The metrics in the table by k. Recall counts the relevant candidates among those that could be
judged."""
COMPARED = (Metric.UDCG, Metric.POOLED_RECALL)
"""The metrics by which contexts are compared."""


@dataclass(frozen=True)
class JudgedRequests:
    """n judged requests on one route with all their candidates, of which m are in the rows.

    Attributes:
        rows: In the contexts that were served; a row's position is its place in its pool, and
            ``asked_probability`` is 0 where a grade does not stand for others.
        fold: Shape (n,), from 0 and below ``FOLDS``, the same for all requests of a question.
        stands_for: Shape (n,), how many of these requests each stands for that people graded; 0
            for one that they did not, NaN where no draw could have asked them.
        pools: In the order of the decision.
        is_exact: Whether the judge knows people's labels, which stand for grades of everything.
        utilities: The worth of a passage, in the rows.
        questions: The questions, without labels, with notes on how they were read.
        is_synthetic: Whether a model wrote some of the questions.
        serving_k: How many passages the first k were, of those that no policy cut; None where a
            policy served every request.
    """

    rows: Rows
    fold: IntArray
    stands_for: FloatArray
    pools: Pools
    is_exact: bool = False
    utilities: Utilities = READERS
    questions: Dataset = Dataset("judged requests", (), {})  # noqa: RUF009  frozen
    is_synthetic: bool = False
    serving_k: int | None = None

    @property
    def is_graded(self) -> BoolArray:
        """Whether people graded each passage, shape (m,)."""
        return np.asarray(self.rows.passages["asked_probability"] > 0.0)

    @property
    def n_graded(self) -> int:
        """The number of requests of which people graded a passage."""
        return len(np.unique(self.rows.request[self.is_graded]))

    @property
    def n_judged(self) -> int:
        """The number of candidates that were to be judged."""
        return int(np.count_nonzero(self.rows.passages["size"]))

    @property
    def n_failed(self) -> int:
        """The number of candidates without a grade because a call of the judge failed."""
        return int(np.count_nonzero(self.rows.passages["judge_grade"] == FAILED))

    @property
    def in_words(self) -> str:
        """Whose grades the estimates are based on, in words."""
        judged = f"{count(len(self.pools), 'request')} judged"
        n = int(self.is_graded.sum())
        if self.is_exact:
            return f"{judged} by known labels"
        if self.is_corrected:
            return f"{judged}, corrected with {count(n, 'grade')} from people on {self.n_graded}"
        return f"the judge's own view, uncorrected: {judged}, with {count(n, 'grade')} from people"

    @cached_property
    def features(self) -> FloatArray:
        """Features of P(relevant), shape (m, n_features); NaN where a leg has no score."""
        starts, rows = np.cumsum(self.pools.lengths) - self.pools.lengths, self.rows
        return np.asarray(
            pool_features(self.pools)[starts[rows.request] + rows.passages["position"]]
        )

    @cached_property
    def model(self) -> Model:
        """The regression of people's grades on the judge's."""
        return Model.fitted(self.rows, self.fold)

    @cached_property
    def p(self) -> FloatArray:
        """P(relevant) of each passage, shape (m,), from the grades of other questions."""
        return self.model.of(self.rows, self.fold)

    @cached_property
    def is_corrected(self) -> bool:
        """Whether people graded enough to correct the judge."""
        return self.served[Metric.UDCG].value is not None

    @cached_property
    def lacking(self) -> int:
        """Roughly how many more grades people must give, at least, before contexts can be compared.

        Pooled recall needs grades of dropped passages too.
        """
        return max([self.served[metric].n_needed or 0 for metric in COMPARED])

    @cached_property
    def served(self) -> Mapping[Metric, Estimate]:
        """The metrics of the served contexts, corrected by people's grades if there are enough."""
        if not self.is_graded.any():
            return dict.fromkeys(COMPARED, lacks_grades(DEFAULT_MIN_N))
        return self._corrected(self.rows)

    def estimates(self, ranks: IntArray) -> dict[Metric, Interval]:
        """Estimate the metrics of contexts, corrected by people's grades if there are enough.

        Otherwise they are the judge's own view, without intervals. Reciprocal rank is undefined
        where passages of a context were judged, or graded, without those above. Ranks are as in
        ``Rows.served``.
        """
        rows = self.rows.served(ranks)
        found = self._corrected(rows) if self.is_corrected else _by_judge(rows)
        plain = {metric: _plain(each) for metric, each in found.items()}
        return plain if rows.has_ranks else {**plain, Metric.SERVED_MRR: Interval.undefined()}

    def gain(self, new: IntArray, old: IntArray) -> dict[str, Interval]:
        """Estimate how much contexts gain over others in pooled ``recall`` and ``udcg``, in pairs.

        Half a lost request is added to the lower bound of recall.
        """
        rows, before = self.rows.served(new), self.rows.served(old)
        apart = predicted(rows, self.p, self.model)
        own = [*range(POOL), NEVER]
        apart[:, own] -= predicted(before, self.p, self.model)[:, own]
        graded = Graded.of(rows, self.p, self.stands_for, before)
        found = corrected_differences(self._sums(apart), graded, self.model)
        recall = _plain(found[Metric.POOLED_RECALL])
        if recall.value is not None and recall.bounds is not None:
            n = float(self.n_graded)
            lower = (recall.bounds[0] * n - LOST_QUERIES) / (n + LOST_QUERIES)
            recall = replace(recall, lower=lower)
        return {"recall": recall, "udcg": _plain(found[Metric.UDCG])}

    def sizes(self, ranks: IntArray) -> dict[str, Interval]:
        """Return the mean passages ``kept`` and ``tokens`` of contexts, weighting requests by 1/π.

        Tokens have no value where no text was kept.
        """
        weight, kept = 1.0 / self.rows.requests["probability"], ranks > 0

        def mean(table: FloatArray) -> Interval:
            value = weight @ np.where(kept, table, 0.0).sum(axis=1) / weight.sum()
            return Interval(float(value), None, None, len(kept))

        tokens = self.pools.tokens
        return {
            "kept": mean(np.ones(kept.shape)),
            "tokens": Interval.undefined() if tokens is None else mean(tokens),
        }

    def tokens_differ(self, new: IntArray, old: IntArray) -> Interval:
        """Estimate how much the tokens of contexts differ, as a share of the old contexts' tokens.

        Passages are counted if no text was kept.
        """
        weight = 1.0 / self.rows.requests["probability"]
        of_new, of_old = (
            np.where(ranks > 0, self.pools.sizes, 0.0).sum(axis=1) for ranks in (new, old)
        )
        return mean_interval(weight * (of_new - of_old) * weight.size / float(weight @ of_old))

    def _corrected(self, rows: Rows) -> Mapping[Metric, Estimate]:
        sums = self._sums(predicted(rows, self.p, self.model))
        graded = Graded.of(rows, self.p, self.stands_for)
        return corrected_estimates(sums, graded, self.model, DEFAULT_MIN_N)

    def _sums(self, columns: FloatArray) -> Sums:
        """Sum columns over the requests that a draw could have asked about."""
        covered, requests = ~np.isnan(self.stands_for), self.rows.requests
        sums, weight = Sums.of(N_COLUMNS), 1.0 / requests["probability"]
        sums.add((columns * weight[:, None])[covered], requests["session"][covered])
        return sums.ended()


def _by_judge(rows: Rows) -> Mapping[Metric, Interval]:
    """Estimate every metric from the judge's own grades, if enough requests have them."""
    sums, (values, inclusion) = Sums.of(N_TERMS), weighted_terms(rows)
    sums.add(values, rows.requests["session"], inclusion)
    own, found = sums.ended(), dict[Metric, Interval]()
    shown = shown_metrics(own.totals)
    for metric in METRICS:
        ratio = own.ratio(metric)
        found[metric] = Interval.undefined(ratio.n)
        if ratio.totals[1] > 0.0 and metric in shown:
            found[metric] = Interval(ratio.value, None, None, ratio.n)
    return found


def _plain(found: Interval) -> Interval:
    return Interval(found.value, found.lower, found.upper, found.n)


def fitted_policy(
    judged: JudgedRequests, settings: Settings, without: int = -1
) -> ExpectedUtilityPolicy:
    """Fit P(relevant), and a policy that keeps candidates as long as the utilities justify it.

    The context bounds what is kept (`_threshold`). No threshold is tuned on grades: that would tune
    it to the judge's errors.

    Args:
        settings: ``utilities``, ``min_keep``, ``context`` and ``serving_k`` are used.
        without: A fold whose requests have no part in it; −1 to use all.

    Raises:
        CalibrationError: no candidate has all features.
    """
    rows, passages, used = judged.rows, judged.rows.passages, judged.fold != without
    has_features = ~np.isnan(judged.features).any(axis=1)
    chosen = has_features & (passages["size"] > 0.0) & used[rows.request]
    if not chosen.any():
        raise CalibrationError("no judged candidate has the scores that P(relevant) needs")
    by_judge = judged.model.of(rows, np.full(used.size, without))
    relevance = np.where(judged.is_graded, passages["people_grade"] > 0, by_judge)[chosen]
    weight = (passages["size"] / rows.requests["probability"][rows.request])[chosen]
    # They sum to the effective number of equal weights (Kish, 1965, §8.2).
    weight *= weight.sum() / (weight**2).sum()
    inputs, n = judged.features[chosen], relevance.size
    # Each candidate counts as relevant and as not, by its probability.
    model = fit_model(
        judged.pools,
        np.concatenate([inputs, inputs]),
        np.arange(2 * n) < n,
        np.concatenate([weight * relevance, weight * (1.0 - relevance)]),
    )
    gain, cost = max(judged.model.gain, 1e-6), max(-settings.utilities.irrelevant, 0.0)
    threshold = _threshold(judged, model, np.flatnonzero(used), settings, cost / (cost + gain))
    return ExpectedUtilityPolicy(
        model,
        k=min(JUDGED_DEPTH, int(passages["position"][passages["size"] > 0.0].max()) + 1),
        cost=threshold * gain / (1.0 - threshold),
        gain=gain,
        min_keep=settings.min_keep,
        per_token=judged.pools.tokens is not None and settings.context != "utility",
    )


def _threshold(
    judged: JudgedRequests, model: RelevanceModel, used: IntArray, settings: Settings, least: float
) -> float:
    """Return the lowest length-weighted P of a candidate that is kept: ``least`` or more.

    On the mean over the used requests, contexts then have at most today's tokens, or twice as many
    where they may be richer. The leanest hold as many relevant passages as today's by P.
    """
    if settings.context == "utility":
        return least
    pools = judged.pools.rows(used)
    depth = min(JUDGED_DEPTH, pools.scores.shape[1])
    weight = 1.0 / judged.rows.requests["probability"][used, None]
    sizes = np.ones(pools.scores.shape) if pools.tokens is None else pools.sizes
    p = np.nan_to_num(predicted_by(model, pools))[:, :depth]
    tokens, expected = weight * sizes[:, :depth], weight * p
    worth = p if pools.tokens is None else p * weight_of(sizes[:, :depth])
    order = np.argsort(-worth, axis=None, kind="stable")
    of_today = slice(settings.serving_k)
    within = RICHEST if settings.context == "richer" else 1.0
    n = np.searchsorted(
        tokens.ravel()[order].cumsum(), within * tokens[:, of_today].sum(), side="right"
    )
    if settings.context == "leaner":
        found = expected.ravel()[order].cumsum()
        n = min(n, np.searchsorted(found, expected[:, of_today].sum()) + 1)
    ranked = worth.ravel()[order]
    return float(np.clip(ranked[min(max(int(n), 1), ranked.size) - 1], least, MOST_PROBABLE))


def decided(pools: Pools, policy: Policy) -> IntArray:
    """Return the ranks of the contexts that the guard would serve under a policy."""
    order, kept = contexts(pools, policy)
    ranks = np.zeros_like(order)
    np.put_along_axis(ranks, order, kept * np.arange(1, order.shape[1] + 1), axis=1)
    return ranks


def decided_by_others(judged: JudgedRequests, settings: Settings) -> IntArray:
    """Decide on each request with a policy that was fitted without its fold."""
    ranks = np.zeros(judged.pools.scores.shape, np.intp)
    for fold in np.unique(judged.fold).tolist():
        rows = np.flatnonzero(judged.fold == fold)
        ranks[rows] = decided(judged.pools.rows(rows), fitted_policy(judged, settings, fold))
    return ranks


def table_by_k(judged: JudgedRequests) -> dict[int, dict[str, Interval]]:
    """Estimate the metrics of the first k, with intervals if people's grades correct the judge.

    Any k could be served: judging always gives at least this table.
    """
    table = {}
    for k in KS:
        found = judged.estimates(decided(judged.pools, RatioPolicy(k=k)))
        table[k] = {name: found[metric] for name, metric in BY_K.items()}
    return table
