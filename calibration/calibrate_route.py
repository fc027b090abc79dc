"""Calibrate one route: the family of policies, the choice, its verdict and its evidence."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from calibration import risk
from calibration.certify import Certification, Promise, certify
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import PROFILE_METRICS, QueryMetrics, contexts, of_contexts
from calibration.figures import significant
from calibration.fit import fit_relevance, fit_temperature, out_of_fold, probabilities
from calibration.folded import Choose, Folded
from calibration.grid import Grid, ratio_grid, sizes, utility_grid
from calibration.objectives import (
    CAUTIONS,
    choose,
    extend,
    fewest_to_choose,
    highest_utility,
    tried,
)
from calibration.pool_labels import IntArray, PoolLabels, labelled_part
from calibration.replay import Pools
from calibration.settings import ChoiceSettings, Context, Family
from calibration.sufficiency import calibrate_sufficiency
from calibration.verdict import (
    FEWEST_MEASURED,
    fewest_to_enforce,
    lower_bound,
    verdict,
)
from ctxguard._support.settings import optional, setting
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import named_features, signal_of
from ctxguard.core.types import DEFAULT_DEPTH, FloatArray, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile.schema import (
    Certificate,
    RecallDifference,
    RouteEvidence,
    RouteProfile,
    RouteVerdict,
    SufficiencyProfile,
)

FEWEST_LABELS = 20
"""With fewer answerable queries to choose on, no probability is fitted (DESIGN.md §5)."""

FEWEST_TO_CHOOSE = 30
"""With a promise: answerable queries that are left to choose on before any are held out."""

ORDERING_SHARE = 0.4
"""With a promise: share of the choosing queries that fits and orders; the rest tests."""

LEAST_SHARE_CHOSEN = 0.5
"""Where at most this share of the queries is measured by a choice, their figures are today's own,
and nothing is enforced by them."""

SIZES: tuple[Context, ...] = get_args(Context)
"""What a context may cost, from the least."""


class Settings(ChoiceSettings):
    """How to choose and certify, with what a calibration in Python alone takes."""

    objective: Literal["context", "utility"] = setting(
        "Choose by ``context``, or the policy of highest strict UDCG whatever its recall.",
        value="context",
    )
    promise: Promise | None = optional(
        "The promise that the certificate must make of the chosen policy, then the one of highest "
        "strict UDCG that keeps the promise, whatever the objective. None for a certificate that "
        "says what the choice costs."
    )
    depth: int = setting("Candidates per query.", ge=1, value=DEFAULT_DEPTH)
    utilities: Utilities = setting("The worth of a passage.", value=DEFAULT_UTILITIES)
    utilities_source: str | None = optional(
        "Where the utilities come from, in words; None for the preset."
    )
    signal_columns: tuple[str, ...] = setting(
        "Columns of the passages' metadata whose signals P(relevant) may use.", value=()
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.serving_k > self.depth:
            raise ConfigurationError(
                f"serving_k {self.serving_k!r} is more than the {self.depth!r} candidates that are "
                "retrieved: raise depth"
            )
        return self

    def held_out_share(self, answerable: int) -> float:
        """Return the share of the queries to hold out: as asked for, or as a promise needs."""
        if self.held_out is not None:
            return self.held_out
        return 0.0 if self.promise is None else spare_share(answerable)


def spare_share(answerable: int) -> float:
    """Return the share of the queries that may be held out where others choose.

    >>> [round(spare_share(n), 2) for n in (20, 49, 50, 60, 400)]
    [0.0, 0.0, 0.4, 0.5, 0.5]
    """
    if answerable >= 2 * FEWEST_TO_CHOOSE:
        return 0.5
    spare = answerable - FEWEST_TO_CHOOSE
    return spare / answerable if spare >= FEWEST_MEASURED else 0.0


@dataclass(frozen=True)
class Option:
    """A policy that could be served, measured on queries that had no part in its choice.

    Attributes:
        name: A few words that tell it from the others.
        policy: The policy.
        order: Shape (n_q, depth), columns of the pools of the queries that measure, best first.
        kept: Shape (n_q, depth), whether each of these is in the context.
        metrics: Of these contexts.
        verdict: Whether the policy may be served; None for what is served today.
    """

    name: str
    policy: Policy
    order: IntArray
    kept: NDArray[np.bool_]
    metrics: QueryMetrics
    verdict: RouteVerdict | None = None


@dataclass(frozen=True)
class RouteOutcome:
    """One route's choice and the alternatives.

    Attributes:
        profile: The route's part of the profile.
        certification: The outcome of the test; None without a promise.
        chosen: The policy of the profile.
        others: By what a context may cost, what would be chosen so; a size is missing where that
            is the first k.
        route: What all of this was chosen and measured on.
    """

    profile: RouteProfile
    certification: Certification | None
    chosen: Option
    others: Mapping[Context, Option]
    route: "LabelledRoute"

    @property
    def today(self) -> Option:
        """The first k, as served today."""
        return self.route.today

    @property
    def served(self) -> Option:
        """What the verdict has served: the choice, or today's first k while it is in shadow."""
        verdict = self.chosen.verdict
        return self.today if verdict is not None and verdict.decision == "shadow" else self.chosen

    @property
    def options(self) -> tuple[Option, ...]:
        """Today's first k, the choice, then what other sizes of context would give."""
        return (self.today, self.chosen, *self.others.values())


def calibrate_route(
    pools: Pools, dataset: Dataset, chosen_on: Dataset, held_out: Dataset | None, settings: Settings
) -> RouteOutcome:
    """Choose one route's policy on ``chosen_on``, and say whether it may be served.

    Without a promise all choosing queries fit and choose. What the choice gives is measured on the
    held-out queries, which give a certificate too; without any, on each fifth of the choosing
    queries by what the others choose. With a promise the choosing queries are split into those
    that fit and order the policies and those that test them, and the held-out queries only
    measure. Where nothing may be enforced, today's order goes on beyond the first ``serving_k`` if
    that pays (`calibration.objectives.extend`); where nothing is accepted or certified, or what
    was chosen is refuted, the first ``serving_k`` passages are kept as today.

    Raises:
        CalibrationError: the labels do not support a choice.
    """
    route = LabelledRoute.of(pools, dataset, chosen_on, held_out, settings)
    if settings.promise is not None:
        chosen, certification = route.promised(chosen_on, settings.promise)
        return route.outcome(chosen, {}, certification)
    asked = route.asked
    chosen = route.offer(asked)
    sizes_offered = {size: route.offer(size) for size in SIZES if size != asked}
    today = route.today.policy
    others = {size: each for size, each in sizes_offered.items() if each.policy != today}
    return route.outcome(chosen, others, None)


@dataclass(frozen=True)
class LabelledRoute:
    """One route's candidates and labels, and the policies among which to choose.

    Attributes:
        part: The pools and labels of a part of the queries.
        own: Those of the queries that choose.
        why: Why the family of policies was taken, in words.
        fitted: What the family was fitted to.
        choosing: The family's policies.
        extending: Policies that go on in today's order.
        chances: Shape (n_q, depth), P(relevant) of the candidates of the queries that measure, from
            a model that did not see their labels; None without.
        measured: The pools and labels of the queries that measure: those held out, or all, of
            which each fifth is measured by what the others choose.
        held_out: Whether these had no part in anything.
    """

    settings: Settings
    part: Callable[[Dataset], tuple[Pools, PoolLabels]]
    own: tuple[Pools, PoolLabels]
    family: Family
    why: str
    fitted: "Fitted"
    choosing: Folded
    extending: Folded
    chances: FloatArray | None
    measured: tuple[Pools, PoolLabels]
    held_out: bool

    @classmethod
    def of(
        cls,
        pools: Pools,
        dataset: Dataset,
        chosen_on: Dataset,
        held_out: Dataset | None,
        settings: Settings,
    ) -> Self:
        k = settings.serving_k
        part = partial(labelled_part, pools, dataset, utilities=settings.utilities, baseline_k=k)
        own = part(chosen_on)
        family, why = _family(own[0], chosen_on, settings)
        fitted = _fit(family, *own, settings)
        grid = fitted.grid(*own, fitted.out_of_fold)
        longer = ratio_grid(*own, temperature=fitted.temperature, ks=grid.ks, min_keep=k)
        measured, chances = own, fitted.out_of_fold
        if held_out is not None:
            measured = part(held_out)
            chances = None if fitted.model is None else probabilities(fitted.model, measured[0])
        return cls(
            settings,
            part,
            own,
            family,
            why,
            fitted,
            among(grid, settings),
            Folded.of(longer, tried(longer, k), k),
            chances,
            measured,
            held_out is not None,
        )

    @cached_property
    def today(self) -> Option:
        """The first k, as served today."""
        k = self.settings.serving_k
        policy = RatioPolicy(k=k)
        return self._measured_option(f"first {k}, as today", policy)

    @property
    def asked(self) -> Context | Literal["utility"]:
        """What contexts were asked for."""
        return self.settings.context if self.settings.objective == "context" else "utility"

    def rules(self, asked: Context | Literal["utility"]) -> tuple[Choose, ...]:
        """Return the rules by which a policy is chosen for such contexts, the boldest first.

        The first whose policy may be enforced is taken, else the last. Queries that were held out
        have no part in that: there is one rule.
        """
        if asked == "utility":
            return (highest_utility,)
        k, tolerance = self.settings.serving_k, self.settings.tolerance
        rule = partial(choose, serving_k=k, context=asked, tolerance=tolerance)
        is_bare = not self.own[0].legs and not self.own[0].signals
        cautions = CAUTIONS[-1:] if self.held_out or is_bare else CAUTIONS
        return tuple(partial(rule, caution=caution) for caution in cautions)

    def offer(self, asked: Context | Literal["utility"]) -> Option:
        """Find what would be served for such contexts, with its verdict."""
        k = self.settings.serving_k
        for rule in self.rules(asked):
            first = self._chosen(asked, self.choosing, rule)
            if _is(first, "enforce"):
                break
        if asked == "utility" or _is(first, "enforce"):
            return self._as_today() if first is None else first
        longer = self._chosen(asked, self.extending, partial(extend, serving_k=k, context=asked))
        if longer is not None and longer.verdict is not None and longer.verdict.value is not None:
            update = {"decision": "enforce", "extends": True, "n_needed": None}
            return replace(longer, verdict=longer.verdict.model_copy(update=update))
        if first is None or _is(first, "keep"):
            return self._as_today(None if first is None else first.verdict)
        return first

    def by_probability(self) -> "Fitted":
        """Return P(relevant) and the policies by it, whatever the family of this route is.

        Raises:
            CalibrationError: the labels do not support a probability.
        """
        if self.fitted.model is not None:
            return self.fitted
        n = self.own[1].n_answerable
        if n < FEWEST_LABELS:
            raise CalibrationError(
                f"{n} answerable queries to choose on, and a probability needs {FEWEST_LABELS}"
            )
        return _fit("expected_utility", *self.own, self.settings)

    def promised(self, chosen_on: Dataset, promise: Promise) -> tuple[Option, Certification]:
        """Choose the policy that keeps a promise, with its verdict, and how it was tested."""
        settings = self.settings
        fit_part, test_part = ordering_and_test_parts(chosen_on, settings.seed)
        ordering, testing = self.part(fit_part), self.part(test_part)
        fitted = _fit(self.family, *ordering, settings)
        tested = None if fitted.model is None else probabilities(fitted.model, testing[0])
        own, other = fitted.grid(*ordering, fitted.out_of_fold), fitted.grid(*testing, tested)
        certification = certify(own, other, promise, seed=settings.seed)
        index = certification.grid_index
        if index is None:
            return self._as_today(), certification
        option = self._measured_option("promised", other.policy(index))
        return replace(option, verdict=self.judged(option.metrics)), certification

    def outcome(
        self,
        chosen: Option,
        others: Mapping[Context, Option],
        certification: Certification | None,
    ) -> RouteOutcome:
        """Return the route's part of the profile, with all that it was chosen among."""
        settings, promise = self.settings, self.settings.promise
        pools, _ = self.measured
        is_today = chosen.policy == self.today.policy
        certificate = None
        if certification is not None and promise is not None and not is_today:
            certificate = _certificate(certification, promise, settings)
        elif self.held_out and not is_today:
            differences = self._differences(chosen.metrics)
            certificate = _cost_certificate(chosen.metrics, differences, settings)
        profile = RouteProfile(
            policy=chosen.policy,
            score_kind=pools.kind,
            why=self._why(chosen),
            verdict=chosen.verdict,
            certificate=certificate,
            evidence=self._evidence(chosen.metrics, is_today=is_today),
            safe_policy=self.today.policy,
            sufficiency=self._sufficiency(chosen),
        )
        return RouteOutcome(
            profile=profile,
            certification=certification,
            chosen=replace(chosen, name="chosen"),
            others=others,
            route=self,
        )

    def _chosen(self, name: str, among: Folded, rule: Choose) -> Option | None:
        """Return the policy that a rule takes, with its verdict; None where it takes none."""
        index = among.chosen(rule)
        if index is None:
            return None
        policy = among.grid.policy(index)
        if self.held_out:
            option = self._measured_option(name, policy)
        else:
            order, n_kept = among.contexts(rule, self.settings.serving_k)
            option = self.option(name, policy, order, np.arange(order.shape[1]) < n_kept[:, None])
        judged = self.judged(option.metrics)
        vacuous = not self.held_out and among.share_chosen(rule) <= LEAST_SHARE_CHOSEN
        if vacuous and judged.decision == "enforce":
            needed = self._in_all(judged.n)
            judged = RouteVerdict(decision="shadow", n=judged.n, n_needed=needed, **self._limits)
        return replace(option, verdict=judged)

    def _measured_option(self, name: str, policy: Policy) -> Option:
        """Measure a policy on the queries that measure, in which they had no part."""
        return self.option(name, policy, *contexts(self.measured[0], policy))

    def option(self, name: str, policy: Policy, order: IntArray, kept: NDArray[np.bool_]) -> Option:
        """Pair a policy with the contexts that it gives the queries that measure."""
        pools, labels = self.measured
        metrics = of_contexts(pools, labels, order, kept, fit_temperature(pools))
        return Option(name, policy, order, kept, metrics)

    def _as_today(self, refuted: RouteVerdict | None = None) -> Option:
        """Keep today's first k, where nothing was accepted, or what was chosen is refuted."""
        n = int((self.measured[1].n_relevant > 0).sum())
        fewest = fewest_to_enforce(self._limits["tolerance"], self._limits["max_loss"])
        recall = self.today.metrics.values["recall"]
        if fewest is not None and n and np.nanmin(recall) == 1.0:
            # Where nothing can be gained, a choice has to show that it loses nothing.
            to_choose = fewest_to_choose(self._limits["tolerance"])
            fewest = None if to_choose is None else max(fewest, self._in_all(to_choose))
        kept = RouteVerdict(
            decision="keep",
            n=n,
            shown_by=self._shown_by,
            n_needed=fewest if fewest is not None and n < fewest else None,
            **self._limits,
        )
        return replace(self.today, verdict=kept if refuted is None else refuted)

    def _in_all(self, choosing: int) -> int:
        """Count the queries of which as many choose as are told, in each fold's absence."""
        return choosing if self.held_out else math.ceil(choosing * 5 / 4)

    @property
    def _shown_by(self) -> Literal["folds", "held_out"]:
        return "held_out" if self.held_out else "folds"

    @property
    def _limits(self) -> dict[str, Any]:
        # A loss that the promise allows was accepted.
        settings = self.settings
        accepted = 0.0 if settings.promise is None else settings.promise.alpha
        return {
            "serving_k": settings.serving_k,
            "tolerance": max(settings.tolerance, accepted),
            "max_loss": max(settings.max_loss, accepted),
        }

    def _differences(self, metrics: QueryMetrics) -> FloatArray:
        """Return recall less today's where it is defined."""
        recall = metrics.values["recall"] - self.today.metrics.values["recall"]
        return shuffled(recall, self.settings.seed)

    def judged(self, metrics: QueryMetrics) -> RouteVerdict:
        """Judge whether contexts with these metrics may be served."""
        settings = self.settings
        gains = metrics.values["udcg_strict"] - self.today.metrics.values["udcg_strict"]
        return verdict(
            self._differences(metrics),
            gain=float(gains.mean()) if gains.size else None,
            shown_by=self._shown_by,
            refutable=settings.promise is None and settings.objective == "context",
            **self._limits,
        )

    def _evidence(self, metrics: QueryMetrics, *, is_today: bool) -> RouteEvidence:
        found = metrics.evidence(self.settings.seed, PROFILE_METRICS)
        losses = shuffled(metrics.values["recall_loss"], self.settings.seed)
        most = None
        if losses.size > 1 and not is_today:
            most = min(math.ceil(-lower_bound(-losses) * 1e4) / 1e4, 1.0)
        return found.model_copy(update={"shown_by": self._shown_by, "most_recall_loss": most})

    def _sufficiency(self, chosen: Option) -> SufficiencyProfile | None:
        if self.chances is None:
            return None
        labels = self.measured[1].reordered(chosen.order)
        inside = np.take_along_axis(self.chances, chosen.order, axis=1)
        best = np.where(chosen.kept & ~np.isnan(inside), inside, -np.inf).max(axis=1)
        promise = self.settings.promise
        holds: NDArray[np.bool_] = np.any(labels.relevant & chosen.kept, axis=1)
        return calibrate_sufficiency(
            np.where(np.isfinite(best), best, np.nan),
            holds,
            model=None if isinstance(chosen.policy, ExpectedUtilityPolicy) else self.fitted.model,
            shown_by=self._shown_by,
            false_alarms=self.settings.false_alarms,
            delta=self.settings.delta if promise is None else promise.delta,
        )

    def _why(self, chosen: Option) -> str:
        k, judged = self.settings.serving_k, chosen.verdict
        if judged is not None and judged.extends:
            return (
                f"the first {k} in today's order and more while that pays, since no other policy "
                "is shown to keep their recall"
            )
        if chosen.policy != self.today.policy:
            return self.why
        if judged is not None and judged.value is not None:
            return f"{self.why}; the first {k} as today, since the labels refute what was chosen"
        shown = "is shown to keep their recall"
        if self.settings.promise is not None:
            shown = "that gains utility is certified"
        return f"{self.why}; the first {k} as today, since no other policy {shown}"


def among(grid: Grid, settings: Settings) -> Folded:
    """Return the policies of a grid over the choosing queries, to choose among."""
    indices = tried(grid, settings.serving_k)
    if settings.objective == "utility":
        indices = tuple(np.ndindex(len(grid.ks), grid.thresholds.size))
    return Folded.of(grid, indices, settings.serving_k)


def _is(option: Option | None, decision: str) -> bool:
    return option is not None and option.verdict is not None and option.verdict.decision == decision


@dataclass(frozen=True)
class Fitted:
    """What a family of policies was fitted to on some queries.

    Attributes:
        model: P(relevant); None for relative scores.
        out_of_fold: Shape (n_q, depth), P(relevant) of these queries' candidates from models that
            did not see their labels; None for relative scores.
        temperature: Of the relative scores.
        ks: Sizes of context.
    """

    model: RelevanceModel | None
    out_of_fold: FloatArray | None
    temperature: float
    ks: tuple[int, ...]
    min_keep: int

    def grid(self, pools: Pools, labels: PoolLabels, chances: FloatArray | None) -> Grid:
        """Return the policies over some queries, with P(relevant) of their candidates."""
        tried: dict[str, Any] = {"ks": self.ks, "min_keep": self.min_keep}
        if self.model is None or chances is None:
            return ratio_grid(pools, labels, temperature=self.temperature, **tried)
        return utility_grid(pools, labels, chances, self.model, **tried)


def shuffled(values: FloatArray, seed: int) -> FloatArray:
    """Return the values that are defined, in an order fixed beforehand.

    Betting needs one, and a file may be sorted by topic.
    """
    defined = values[~np.isnan(values)]
    return defined[np.random.default_rng(seed).permutation(defined.size)]


def ordering_and_test_parts(chosen_on: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Split, with a promise, the queries that fit and order policies from those that test."""
    ordering, testing = split_by_query(
        chosen_on, (ORDERING_SHARE, 1.0 - ORDERING_SHARE), seed=seed + 1
    )
    return ordering, testing


def _family(pools: Pools, chosen_on: Dataset, settings: Settings) -> tuple[Family, str]:
    """Choose the family of policies, and say why."""
    labelled, legs = len(chosen_on.answerable), len(pools.legs)
    if settings.policy != "auto":
        return settings.policy, f"{settings.policy} was asked for"
    if labelled < FEWEST_LABELS:
        return "ratio", (
            f"ratio: {labelled} answerable queries to choose on, and a probability needs "
            f"{FEWEST_LABELS}"
        )
    signals = len({signal_of(feature) for feature in named_features(pools.signals)})
    if pools.kind is ScoreKind.RANK and not legs and not signals:
        return "ratio", "ratio: the retriever gives ranks alone, no scores"
    scorers = "1 scorer" if legs < 2 else f"{legs} scorers"
    named = f", {signals} named signals" if signals else ""
    return "expected_utility", (
        f"expected_utility: {labelled} answerable queries to choose on, {scorers}{named}"
    )


def _fit(family: Family, pools: Pools, labels: PoolLabels, settings: Settings) -> Fitted:
    """Fit a family of policies, with the sizes of context that the depth and a budget allow."""
    largest = pools.scores.shape[1]
    if settings.max_tokens is not None and pools.tokens is not None:
        # Sizes go as far as the budget, on the mean; what is served today is always tried.
        tokens = np.nan_to_num(pools.tokens).cumsum(axis=1).mean(axis=0)
        within = int(np.searchsorted(tokens, settings.max_tokens, side="right"))
        largest = min(largest, max(within, settings.serving_k))
    ks = tuple(sorted({*sizes(largest), min(settings.serving_k, largest)}))
    fitted = partial(Fitted, temperature=fit_temperature(pools), ks=ks, min_keep=settings.min_keep)
    if family == "ratio":
        return fitted(None, None)
    return fitted(fit_relevance(pools, labels), out_of_fold(pools, labels))


def _certificate(certification: Certification, promise: Promise, settings: Settings) -> Certificate:
    """Return the certificate of a promise that the chosen policy keeps."""
    return Certificate(
        alpha=promise.alpha,
        delta=promise.delta,
        baseline_k=settings.serving_k,
        test="betting p-values, fixed sequence",
        recall_loss=significant(certification.recall_loss),
        n_recall=certification.n_recall,
    )


def _cost_certificate(
    chosen: QueryMetrics, differences: FloatArray, settings: Settings
) -> Certificate | None:
    """Bound the recall that the chosen policy costs, by held-out queries."""
    losses = shuffled(chosen.values["recall_loss"], settings.seed)
    if losses.size == 0:
        return None
    upper = risk.betting_upper_bound(losses, settings.delta)
    lower = risk.betting_lower_bound(differences, settings.delta)
    return Certificate(
        alpha=math.ceil(upper * 1e4) / 1e4,
        delta=settings.delta,
        baseline_k=settings.serving_k,
        test="betting bound",
        recall_loss=significant(losses.mean()),
        n_recall=int(losses.size),
        recall_difference=RecallDifference(
            value=significant(differences.mean()),
            lower=math.floor(lower * 1e4) / 1e4,
            n=int(differences.size),
        ),
    )
