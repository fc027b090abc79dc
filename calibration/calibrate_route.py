"""Calibrates one route: the family of policies, the choice, its verdict and its evidence.

Pure; needs the extra `calibrate`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from calibration.certify import Certification, calibrate_sufficiency, certify
from calibration.choice import LADDERS, Choose, Folded, choose, extend, highest_utility, tried
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import PROFILE_METRICS, Measured, contexts, intervals, of_contexts
from calibration.fit import fit_relevance, fit_temperature, out_of_fold, predicted, significant
from calibration.grid import Grid, ratio_grid, sizes, utility_grid
from calibration.pools import LabelledPools
from calibration.settings import SIZES, Context, Family, Settings, Wanted
from calibration.verdict import RISK_PER_SAVED, fewest_to_enforce, lower_bound, verdict
from ctxguard._support.words import count
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import named_features, signal_of
from ctxguard.core.types import FloatArray, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.measure import risk
from ctxguard.measure.interval import Interval
from ctxguard.measure.rows import BoolArray, IntArray
from ctxguard.profile.schema import (
    Certificate,
    RouteEvidence,
    RouteProfile,
    RouteVerdict,
    SufficiencyProfile,
)

FEWEST_LABELS = 20
"""With fewer answerable queries to choose on, no probability is fitted (DESIGN.md §5)."""

ORDERING_SHARE = 0.4
"""With a promise: the share of the choosing queries that fit and order policies; the rest test."""

LEAST_SHARE_CHOSEN = 0.5
"""Where at most this share of the queries is measured by a choice, their figures are today's own,
and nothing is decided by them."""


@dataclass(frozen=True)
class Option:
    """A policy that could be served, measured on queries that had no part in its choice.

    Attributes:
        name: A few words that tell it from the others.
        order: Shape (n_q, depth), columns of the measured pools, best first.
        kept: Shape (n_q, depth), whether each of these is in the context.
        metrics: Of these contexts.
        verdict: Whether the policy may be served.
    """

    name: str
    policy: Policy
    order: IntArray
    kept: BoolArray
    metrics: Measured
    verdict: RouteVerdict

    @property
    def cost(self) -> float:
        """Mean tokens of a context, or passages if tokens are unknown."""
        return float(_lengths(self.metrics).mean())

    def serves_as(self, other: "Option") -> bool:
        """Return whether all contexts hold the same passages in the same order."""
        own, others = self.order[self.kept], other.order[other.kept]
        return np.array_equal(self.kept, other.kept) and np.array_equal(own, others)


@dataclass(frozen=True)
class RouteOutcome:
    """One route's choice and the alternatives.

    Attributes:
        profile: The route's part of the profile.
        certification: The outcome of the test; None without a promise.
        others: What would be chosen for each cost of a context; a size is missing where that
            is the first k.
        route: What all of this was chosen and measured on.
        answered: The contexts with the answers of a model that was asked; None without.
    """

    profile: RouteProfile
    certification: Certification | None
    chosen: Option
    others: Mapping[Context, Option]
    route: "LabelledRoute"
    answered: Option | None = None

    @property
    def today(self) -> Option:
        """The first k, as served today."""
        return self.route.today

    @property
    def served(self) -> Option:
        """The contexts served under the verdict: the choice, or in shadow today's first k."""
        return self.today if self.chosen.verdict.decision == "shadow" else self.chosen

    @property
    def options(self) -> tuple[Option, ...]:
        """Today's first k, the choice, then the options of other sizes."""
        return (self.today, self.chosen, *self.others.values())


def calibrate_route(
    pools: LabelledPools, chosen_on: Dataset, held_out: Dataset | None, settings: Settings
) -> RouteOutcome:
    """Choose one route's policy on ``chosen_on``, and say whether it may be served.

    Without a promise all choosing queries fit and choose. What the choice gives is measured on the
    held-out queries, which give a certificate too; without any, on each fifth of the choosing
    queries by what the others choose. With a promise the choosing queries are split into those
    that fit and order the policies and those that test them, and the held-out queries only
    measure. Where nothing may be enforced, today's order goes on beyond the first ``serving_k`` if
    that pays (`calibration.choice.extend`); where nothing is accepted or certified, or what
    was chosen is refuted, the first ``serving_k`` passages are kept as today.

    Args:
        pools: All queries' candidates; the first ``serving_k`` are the baseline of recall loss.

    Raises:
        CalibrationError: the labels do not support a choice.
    """
    route = LabelledRoute(pools, chosen_on, held_out, settings)
    certification, others = None, dict[Context, Option]()
    if settings.alpha is not None:
        chosen, certification = route.promised(chosen_on, settings.alpha)
    else:
        offered = route.offers
        chosen = (
            route.offer("utility") if settings.context == "utility" else offered[settings.context]
        )
        today = route.today.policy
        others = {
            size: each
            for size, each in offered.items()
            if size != settings.context and each.policy != today
        }
    profile = RouteProfile(
        policy=chosen.policy,
        score_kind=pools.kind,
        why=_why(route, chosen),
        verdict=chosen.verdict,
        certificate=_certificate(route, chosen, certification),
        evidence=_evidence(route, chosen),
        safe_policy=route.today.policy,
        sufficiency=_sufficiency(route, chosen),
    )
    return RouteOutcome(profile, certification, replace(chosen, name="chosen"), others, route)


class LabelledRoute:
    """One route's labelled candidates, and the policies to choose from.

    Attributes:
        pools: Of all queries.
        why: Why the family of policies was taken, in words.
        fitted: The fit of the family to the queries that choose.
        choosing: The family's policies.
        extending: Policies that extend today's order.
        measured: The pools of the queries that measure: those held out, or all, of which each
            fifth is measured by what the others choose.
        held_out: Whether these had no part in anything.
    """

    def __init__(
        self, pools: LabelledPools, chosen_on: Dataset, held_out: Dataset | None, settings: Settings
    ) -> None:
        own, k = _part(pools, chosen_on), settings.serving_k
        if not len(own):
            raise CalibrationError(
                "there are no queries to choose on: the retriever answered none of them; see which "
                "queries were skipped, and why"
            )
        self.settings, self.pools = settings, pools
        self._family, self.why = _family(own, chosen_on, settings)
        fitted = self.fitted = _fit(self._family, own, settings)
        self.choosing = among(fitted.grid(fitted.pools), settings)
        longer = ratio_grid(own, temperature=fitted.temperature, ks=fitted.ks, min_keep=k)
        self.extending = Folded(longer, tried(longer, k))
        self.held_out, self.measured = held_out is not None, fitted.pools
        if held_out is not None:
            self.measured = fitted.predict(_part(pools, held_out))
        self._folded: dict[object, Option] = {}

    @cached_property
    def today(self) -> Option:
        """The first k, as served today; kept if nothing else is accepted."""
        k, n = self.settings.serving_k, self.measured.n_answerable
        fewest = fewest_to_enforce(self._limits["tolerance"], self._limits["max_loss"])
        needed = fewest if fewest is not None and n < fewest else None
        return self._first(k, f"first {k}, as today", self._undecided("keep", needed))

    def of_equal_tokens(self, option: Option) -> Option | None:
        """Return the largest k whose first k have no more tokens on average than an option.

        None where that is today's, or the option's own context, or none is so short.
        """
        of_k = self.measured.sizes.cumsum(axis=1).mean(axis=0)
        k = int(np.searchsorted(of_k, option.cost + 1e-9, side="right"))
        if k == 0 or RatioPolicy(k=k) in (option.policy, self.today.policy):
            return None
        return self._first(k, f"first {k}", self.today.verdict)

    def _undecided(self, decision: Literal["keep", "shadow"], needed: int | None) -> RouteVerdict:
        n = self.measured.n_answerable
        return RouteVerdict(decision=decision, n=n, n_needed=needed, **self._limits)

    def _first(self, k: int, name: str, verdict: RouteVerdict) -> Option:
        policy = RatioPolicy(k=k)
        order, kept = contexts(self.measured, policy)
        return Option(name, policy, order, kept, of_contexts(self.measured, order, kept), verdict)

    def option(self, name: str, policy: Policy, order: IntArray, kept: BoolArray) -> Option:
        """Judge a policy by its contexts for the measured queries."""
        own = of_contexts(self.measured, order, kept)
        today, length = self.today.metrics, _lengths(self.today.metrics)
        judged = verdict(
            self.recall_gained(own),
            own["udcg"] - today["udcg"],
            (_lengths(own) - length) / max(float(length.mean()), 1.0),
            todays_udcg=float(today["udcg"].mean()),
            refutable=self.wanted != "utility",
            risk_per_saved=RISK_PER_SAVED if name in ("balanced", "richer") else math.inf,
            **self._limits,
        )
        return Option(name, policy, order, kept, own, judged)

    def recall_gained(self, metrics: Measured) -> FloatArray:
        """Return recall minus today's for the queries that define it."""
        recall = metrics["recall"] - self.today.metrics["recall"]
        return shuffled(recall, self.settings.seed)

    def rules(self, wanted: Wanted) -> tuple[Choose, ...]:
        """Return the rules for choosing a policy for such contexts, boldest first.

        The first whose policy may be enforced is taken, else the last. Queries that were held out
        have no part in that: there is one rule.
        """
        if wanted == "utility":
            return (highest_utility,)
        rule = partial(choose, context=wanted, tolerance=self.settings.tolerance)
        steps = LADDERS[wanted][-1:] if self.held_out else LADDERS[wanted]
        return tuple(partial(rule, step=step) for step in steps)

    @cached_property
    def offers(self) -> Mapping[Context, Option]:
        """The contexts that would be served at each cost.

        Where balanced ones may be enforced, they are the leaner ones too if these cost more, and
        the richer ones if these are not richer than today's. Queries that were held out have no
        part in that.
        """
        found = {size: self.offer(size) for size in SIZES}
        leaner, balanced, richer = found.values()
        if balanced.verdict.decision == "enforce" and not self.held_out:
            if leaner.verdict.decision != "enforce" or balanced.cost < leaner.cost:
                found["leaner"] = replace(balanced, name="leaner")
            if richer.cost <= self.today.cost:
                found["richer"] = replace(balanced, name="richer")
        return found

    def offer(self, wanted: Wanted) -> Option:
        """Find the option that would be served for such contexts, with its verdict."""
        first: Option | None = None
        for rule in self.rules(wanted):
            found = self._chosen(wanted, self.choosing, rule)
            if found is not None and found.verdict.decision == "enforce":
                return found
            # If none may be served, take the nearest: one in shadow, else the most careful.
            if found is not None and (first is None or first.verdict.decision != "shadow"):
                first = found
        if wanted == "utility":
            return self.today if first is None else first
        if wanted == "richer":
            longer = self._chosen(wanted, self.extending, extend)
            if longer is not None and longer.verdict.recall is not None:
                update = {"decision": "enforce", "extends": True, "n_needed": None}
                return replace(longer, verdict=longer.verdict.model_copy(update=update))
        if first is None:
            return self.today
        if first.verdict.decision == "keep":
            return replace(self.today, verdict=first.verdict)
        return first

    def promised(self, chosen_on: Dataset, alpha: float) -> tuple[Option, Certification]:
        """Choose the policy that keeps a promise; return it with its verdict and its test."""
        settings = self.settings
        ordering, testing = (
            _part(self.pools, part) for part in ordering_and_test_parts(chosen_on, settings.seed)
        )
        fitted = _fit(self._family, ordering, settings)
        own, other = fitted.grid(fitted.pools), fitted.grid(fitted.predict(testing))
        certification = certify(own, other, alpha=alpha, delta=settings.delta, seed=settings.seed)
        if certification.grid_index is None:
            return self.today, certification
        policy = other.policy(certification.grid_index)
        return self.option("promised", policy, *contexts(self.measured, policy)), certification

    def by_probability(self) -> "Fitted":
        """Return P(relevant) and the policies based on it, whichever family this route has.

        Raises:
            CalibrationError: the labels do not support a probability.
        """
        if self.fitted.model is not None:
            return self.fitted
        own = self.fitted.pools
        if own.n_answerable < FEWEST_LABELS:
            raise CalibrationError(
                f"a probability needs {FEWEST_LABELS} answerable queries to choose on, but there "
                f"are {own.n_answerable}"
            )
        return _fit("expected_utility", own, self.settings)

    @property
    def wanted(self) -> Wanted:
        """The aim of the choice: if there is a promise, the highest utility that keeps it."""
        return "utility" if self.settings.alpha is not None else self.settings.context

    @property
    def shown_by(self) -> Literal["folds", "held_out"]:
        """How the measured queries were excluded from the choice."""
        return "held_out" if self.held_out else "folds"

    def _chosen(self, name: str, among: Folded, rule: Choose) -> Option | None:
        """Return the policy that a rule chooses, with its verdict; None if it chooses none."""
        index = among.chosen(rule)
        if index is None:
            return None
        policy = among.grid.policy(index)
        if self.held_out:
            return self.option(name, policy, *contexts(self.measured, policy))
        # Steps of a ladder often make the same choice: identical contexts are measured once.
        by_others = among.by_others(rule)
        key = (name, among is self.choosing, index, *by_others.values())
        if key not in self._folded:
            served = among.contexts(by_others, self.settings.serving_k)
            self._folded[key] = self.option(name, policy, *served)
        found = self._folded[key]
        vacuous = among.share_chosen(by_others) <= LEAST_SHARE_CHOSEN
        if vacuous and found.verdict.recall is not None:
            needed = math.ceil(found.verdict.n * 5 / 4)
            return replace(found, verdict=self._undecided("shadow", needed))
        return found

    @property
    def _limits(self) -> dict[str, Any]:
        # A loss that the promise allows was accepted.
        settings = self.settings
        accepted = settings.alpha or 0.0
        return {
            "shown_by": self.shown_by,
            "serving_k": settings.serving_k,
            "tolerance": max(settings.tolerance, accepted),
            "max_loss": max(settings.max_loss, accepted),
        }


def _lengths(metrics: Measured) -> FloatArray:
    """Return each context's tokens, or its passages if tokens are unknown."""
    return metrics["kept" if np.isnan(metrics["tokens"]).any() else "tokens"]


def _certificate(
    route: LabelledRoute, chosen: Option, certification: Certification | None
) -> Certificate | None:
    """Certify the tested promise, or bound the recall that a choice costs on held-out queries."""
    settings, metrics = route.settings, chosen.metrics
    if chosen.policy == route.today.policy:
        return None
    if certification is not None and settings.alpha is not None:
        return Certificate(
            alpha=settings.alpha,
            delta=settings.delta,
            baseline_k=settings.serving_k,
            test="betting p-values, fixed sequence",
            recall_loss=significant(certification.recall_loss),
            n_recall=certification.n_recall,
        )
    losses, gained = shuffled(metrics["recall_loss"], settings.seed), route.recall_gained(metrics)
    if not route.held_out or losses.size == 0:
        return None
    upper = risk.betting_upper_bound(losses, settings.delta)
    lower = risk.betting_lower_bound(gained, settings.delta)
    return Certificate(
        alpha=math.ceil(upper * 1e4) / 1e4,
        delta=settings.delta,
        baseline_k=settings.serving_k,
        test="betting bound",
        recall_loss=significant(losses.mean()),
        n_recall=losses.size,
        recall_difference=Interval(
            significant(gained.mean()), math.floor(lower * 1e4) / 1e4, None, gained.size
        ),
    )


def _evidence(route: LabelledRoute, chosen: Option) -> RouteEvidence:
    found, seed, most = chosen.metrics, route.settings.seed, None
    losses = shuffled(found["recall_loss"], seed)
    if losses.size > 1 and chosen.policy != route.today.policy:
        most = min(math.ceil(-lower_bound(-losses) * 1e4) / 1e4, 1.0)
    in_profile = {name: found[name] for name in PROFILE_METRICS}
    return RouteEvidence(
        queries=len(route.measured),
        metrics=intervals(in_profile, found, seed),
        shown_by=route.shown_by,
        most_recall_loss=most,
    )


def _sufficiency(route: LabelledRoute, chosen: Option) -> SufficiencyProfile | None:
    pools, settings = route.measured, route.settings
    if pools.probabilities is None:
        return None
    probabilities = np.take_along_axis(pools.probabilities, chosen.order, axis=1)
    relevant = np.take_along_axis(pools.relevant, chosen.order, axis=1)
    return calibrate_sufficiency(
        np.fmax.reduce(np.where(chosen.kept, probabilities, np.nan), axis=1),
        np.any(relevant & chosen.kept, axis=1),
        model=None if isinstance(chosen.policy, ExpectedUtilityPolicy) else route.fitted.model,
        shown_by=route.shown_by,
        false_alarms=settings.false_alarms,
        delta=settings.delta,
    )


def _why(route: LabelledRoute, chosen: Option) -> str:
    first, verdict = f"the first {route.settings.serving_k}", chosen.verdict
    if verdict.extends:
        return (
            f"{first} in today's order and more while that pays, since no other policy is shown to "
            "keep their recall"
        )
    if chosen.policy != route.today.policy:
        return route.why
    if verdict.recall is not None:
        return f"{route.why}; {first} as today, since nothing is shown to be better"
    shown = "is shown to keep their recall"
    if route.settings.alpha is not None:
        shown = "that gains utility is certified"
    return f"{route.why}; {first} as today, since no other policy {shown}"


def among(grid: Grid, settings: Settings) -> Folded:
    """Return the policies of a grid among which to choose."""
    indices = tried(grid, settings.serving_k)
    if settings.context == "utility":
        indices = tuple(np.ndindex(len(grid.ks), grid.thresholds.size))
    return Folded(grid, indices)


@dataclass(frozen=True)
class Fitted:
    """A family of policies fitted to some queries, with the context sizes to try.

    Attributes:
        pools: These queries, with P(relevant) of their candidates out of fold.
        model: P(relevant); None for relative scores of this temperature.
    """

    pools: LabelledPools
    model: RelevanceModel | None
    temperature: float
    ks: tuple[int, ...]
    min_keep: int

    def predict(self, pools: LabelledPools) -> LabelledPools:
        """Return other queries' pools with P(relevant), if there is a model."""
        if self.model is None:
            return pools
        return replace(pools, probabilities=predicted(self.model, pools))

    def grid(self, pools: LabelledPools, *, per_token: bool = True) -> Grid:
        """Return the grid of policies over some queries."""
        tried: dict[str, Any] = {"ks": self.ks, "min_keep": self.min_keep}
        if self.model is None or pools.probabilities is None:
            return ratio_grid(pools, temperature=self.temperature, **tried)
        return utility_grid(pools, pools.probabilities, self.model, per_token=per_token, **tried)


def shuffled(values: FloatArray, seed: int) -> FloatArray:
    """Return the defined values in an order fixed beforehand, as betting requires.

    A file may be sorted by topic.
    """
    defined = values[~np.isnan(values)]
    return defined[np.random.default_rng(seed).permutation(defined.size)]


def ordering_and_test_parts(chosen_on: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """With a promise, separate the queries that fit and order policies from those that test."""
    ordering, testing = split_by_query(
        chosen_on, (ORDERING_SHARE, 1.0 - ORDERING_SHARE), seed=seed + 1
    )
    return ordering, testing


def _family(pools: LabelledPools, chosen_on: Dataset, settings: Settings) -> tuple[Family, str]:
    """Choose the family of policies, and explain the choice."""
    labelled, legs = len(chosen_on.answerable), len(pools.legs)
    if settings.policy != "auto":
        return settings.policy, f"{settings.policy} was asked for"
    if labelled < FEWEST_LABELS:
        return "ratio", (
            f"ratio: {count(labelled, 'answerable query')} to choose on, but a probability needs "
            f"{FEWEST_LABELS}"
        )
    signals = len({signal_of(feature) for feature in named_features(pools.signals)})
    if pools.kind is ScoreKind.RANK and not legs and not signals:
        return "ratio", "ratio: the retriever gives only ranks, no scores"
    scorers = "1 scorer" if legs < 2 else f"{legs} scorers"
    named = f", {signals} named signals" if signals else ""
    return "expected_utility", (
        f"expected_utility: {labelled} answerable queries to choose on, {scorers}{named}"
    )


def _part(pools: LabelledPools, queries: Dataset) -> LabelledPools:
    return pools.subset(query.query_id for query in queries.queries)


def _fit(family: Family, pools: LabelledPools, settings: Settings) -> Fitted:
    """Fit a family of policies, with the sizes of context that the depth and a budget allow."""
    largest = pools.scores.shape[1]
    if settings.max_tokens is not None and pools.tokens is not None:
        # Sizes go as far as the budget, on the mean; what is served today is always tried.
        tokens = pools.sizes.cumsum(axis=1).mean(axis=0)
        within = int(np.searchsorted(tokens, settings.max_tokens, side="right"))
        largest = min(largest, max(within, settings.serving_k))
    ks = tuple(sorted({*sizes(largest), min(settings.serving_k, largest)}))
    model = None
    if family != "ratio":
        model = fit_relevance(pools)
        pools = replace(pools, probabilities=out_of_fold(pools, model))
    return Fitted(pools, model, fit_temperature(pools), ks, settings.min_keep)
