"""Calibrate one route: the family of policies, the choice, its certificate, its evidence."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from calibration import risk
from calibration.certify import Certification, Promise, certify
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import PROFILE_METRICS, QueryMetrics, per_query
from calibration.fit import fit_relevance, fit_temperature, out_of_fold, probabilities
from calibration.grid import Grid, GridIndex, plain_grid, ratio_grid, sizes, utility_grid
from calibration.objectives import keep_recall
from calibration.pool_labels import PoolLabels, labelled_part
from calibration.replay import Pools
from calibration.settings import ChoiceSettings, Family
from calibration.sufficiency import calibrate_sufficiency
from calibration.verdict import FEWEST_HELD_OUT, verdict
from calibration.weights import deciles, n_equivalent, significant, weighted_mean
from ctxguard._support.settings import optional, setting
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.signals import named_features, signal_of
from ctxguard.core.types import DEFAULT_DEPTH, FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.profile.schema import (
    Certificate,
    RecallDifference,
    RouteProfile,
    RouteVerdict,
)

FEWEST_LABELS = 20
"""With fewer answerable queries to choose on, no probability is fitted (DESIGN.md §5)."""

FEWEST_TO_CHOOSE = 30
"""Answerable queries that are left to choose on before any are held out, unless a share is given.
Below 50 of them the default objective accepts no policy, unless one finds more than today's."""

TIGHT = 0.05
"""A bound on the decrease in recall that people can rely on; see ``RouteOutcome``."""

ORDERING_SHARE = 0.4
"""With a promise: share of the choosing queries that fits and orders; the rest tests."""

REFUTED = "chosen, then refuted"
"""The name of the option that was chosen, where held-out queries refute it."""

LADDER = (3.0, 2.0, 1.0)
"""How cautious each of the choices of a ladder is, from the first to the default."""

FEWEST_FOR_LADDER = 100
"""Answerable queries that a ladder needs."""

_OTHER_TOLERANCES = (0.05, 0.1)
"""Larger losses of recall, whose policies are shown beside the choice."""


class Settings(ChoiceSettings):
    """How to choose and certify, with what a calibration in Python alone takes."""

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

    @property
    def baseline(self) -> str:
        """The baseline of recall loss, as a certificate names it."""
        return f"k={self.serving_k}"

    def held_out_share(self, answerable: int) -> float:
        """The share of the queries to hold out.

        >>> settings = Settings()
        >>> [round(settings.held_out_share(n), 2) for n in (20, 49, 50, 60, 400)]
        [0.0, 0.0, 0.4, 0.5, 0.5]
        """
        if self.held_out is not None:
            return self.held_out
        if answerable >= 2 * FEWEST_TO_CHOOSE:
            return 0.5
        spare = answerable - FEWEST_TO_CHOOSE
        return spare / answerable if spare >= FEWEST_HELD_OUT else 0.0


@dataclass(frozen=True)
class Option:
    """A policy that could be served, measured on the same queries as the others.

    Attributes:
        name: A few words that tell it from the others.
        policy: The policy.
        metrics: Its metrics on the held-out queries, or on the choosing ones if none is held out.
    """

    name: str
    policy: Policy
    metrics: QueryMetrics


@dataclass(frozen=True)
class RouteOutcome:
    """One route's choice and the alternatives.

    Attributes:
        profile: The route's part of the profile.
        chosen_grid: Every policy of the family over the choosing queries.
        place: The grid over the choosing queries that holds the chosen policy, and where: the
            family's, or that of the first k alone.
        certification: The outcome of the test; None without a promise.
        options: The first k served today, the choice, and those of other objectives.
        labels_needed: How many held-out queries like these would show that the choice loses at
            most ``TIGHT`` of mean recall; None where no number would, or nothing is held out.
    """

    profile: RouteProfile
    chosen_grid: Grid
    place: tuple[Grid, tuple[GridIndex]]
    certification: Certification | None
    options: tuple[Option, ...]
    labels_needed: int | None

    @property
    def today(self) -> Option:
        """The first k, as served today."""
        return self.options[0]

    @property
    def chosen(self) -> Option:
        """The policy of the profile."""
        return self.options[1]

    @property
    def highest_utility(self) -> Option:
        """The policy of highest strict UDCG."""
        return self.options[-1]


def calibrate_route(
    pools: Pools, dataset: Dataset, chosen_on: Dataset, held_out: Dataset | None, settings: Settings
) -> RouteOutcome:
    """Choose one route's policy on ``chosen_on``, certify it, and measure it on ``held_out``.

    Without a promise all choosing queries fit and choose, and the held-out queries bound what the
    chosen policy costs in recall. With a promise the choosing queries are split into those that
    fit and order the policies and those that test them, and the held-out queries only measure.
    Where no policy is accepted or certified, or the held-out queries refute the one that keeps
    recall, the first ``serving_k`` passages are kept as today.

    Raises:
        CalibrationError: the labels do not support a choice.
    """
    k, promise = settings.serving_k, settings.promise
    part = partial(labelled_part, pools, dataset, utilities=settings.utilities, baseline_k=k)
    family, why = _family(pools, chosen_on, settings)
    chosen_part = part(chosen_on)
    grid, _ = _grids(family, *chosen_part, settings)
    today = RatioPolicy(k=k)
    keeping_recall = partial(keep_recall, grid, k)

    def at(index: GridIndex | None) -> Policy:
        return today if index is None else grid.policy(index)

    evidence_of = partial(QueryMetrics.evidence, seed=settings.seed, metrics=PROFILE_METRICS)
    best = grid.means.best()
    certification: Certification | None = None
    n_rungs, refuted = 1, tuple[Option, ...]()
    measured_part = chosen_part if held_out is None else part(held_out)

    def option(name: str, policy: Policy) -> Option:
        return Option(name, policy, per_query(*measured_part, policy))

    first = option(f"first {k}, as today", today)

    def compared(chosen: Option) -> tuple[FloatArray, FloatArray]:
        if held_out is None:
            return np.zeros(0), np.zeros(0)
        recall, today = (each.metrics.values["recall"] for each in (chosen, first))
        return shuffled(chosen.metrics, recall - today, settings.seed)

    if promise is not None:
        policy, certification = _promised(part, chosen_on, family, promise, settings)
        index = certification.grid_index
    else:
        index = best if settings.objective == "utility" else keeping_recall(settings.tolerance)
        enough = held_out is not None and len(dataset.answerable) >= FEWEST_FOR_LADDER
        if settings.ladder and settings.objective == "keep-recall" and enough:
            rungs = [keeping_recall(settings.tolerance, caution) for caution in LADDER]
            index, n_rungs = climbed(
                [each for each in rungs if each is not None],
                lambda each: (
                    _verdict(*compared(option("", at(each))), settings).decision == "enforce"
                ),
            )
            if n_rungs > 1:
                why += f"; of {n_rungs} choices, from a careful one on, the boldest to enforce"
        policy = at(index)
    chosen = option("chosen", policy)
    differences, weights = compared(chosen)
    judged = _verdict(differences, weights, settings, found=index is not None)
    if index is not None and judged.decision == "keep":
        why += f"; the first {k} as today, since the held-out queries refute what was chosen"
        refuted = (replace(chosen, name=REFUTED),)
        index, policy, chosen = None, today, replace(first, name="chosen")
    elif index is None:
        why += f"; the first {k} as today, since no other policy " + (
            "is shown to keep their recall"
            if promise is None
            else "that gains utility is certified"
        )
    options = (
        first,
        chosen,
        *refuted,
        *[
            option(f"recall lower by {tolerance:g} at most", at(keeping_recall(tolerance)))
            for tolerance in _OTHER_TOLERANCES
        ],
        option("highest utility", grid.policy(best)),
    )
    certificate = None
    if certification is not None and promise is not None:
        # The first k lose nothing of themselves; what harm they do was not tested.
        if index is not None or (promise.beta is None and certification.n_recall):
            certificate = _certificate(certification, promise, settings)
    elif held_out is not None and index is not None:
        certificate = _cost_certificate(chosen.metrics, differences, weights, settings, n_rungs)
    measured = per_query(*chosen_part, policy)
    profile = RouteProfile(
        policy=policy,
        score_kind=pools.kind,
        why=why,
        verdict=judged,
        certificate=certificate,
        chosen_on=evidence_of(measured),
        held_out=None if held_out is None else evidence_of(chosen.metrics),
        reference=reference_deciles(
            chosen_part[0], measured.values["kept"], chosen_part[1].weights
        ),
        safe_policy=today,
        sufficiency=calibrate_sufficiency(
            policy,
            getattr(grid.policy(best), "model", None),
            None if held_out is None else measured_part,
            false_alarms=settings.false_alarms,
            delta=settings.delta if promise is None else promise.delta,
        ),
    )
    needed = (
        risk.differences_needed(differences, TIGHT, settings.delta, weights)
        if differences.size
        else None
    )
    return RouteOutcome(
        profile,
        grid,
        (plain_grid(*chosen_part, k), ((0, 0),)) if index is None else (grid, (index,)),
        certification,
        options,
        needed,
    )


def climbed(
    rungs: Sequence[GridIndex], enforces: Callable[[GridIndex], bool]
) -> tuple[GridIndex | None, int]:
    """The last choice in order before the first that may not be enforced, and how many there are.

    A fixed sequence: that any is enforced wrongly is as improbable as of a single one. Where the
    first may not be enforced, it is the choice; None without any.

    >>> climbed([(0, 9), (0, 6), (0, 6), (0, 2)], lambda index: index[1] > 4)
    ((0, 6), 3)
    """
    distinct = list(dict.fromkeys(rungs))
    passed = list(takewhile(enforces, distinct))
    return next(iter([*passed[-1:], *distinct]), None), max(len(distinct), 1)


def _promised(
    part: Callable[[Dataset], tuple[Pools, PoolLabels]],
    chosen_on: Dataset,
    family: Family,
    promise: Promise,
    settings: Settings,
) -> tuple[Policy, Certification]:
    """Choose the policy that keeps the promise, and say how it was tested."""
    fit_part, test_part = ordering_and_test_parts(chosen_on, settings.seed)
    ordering, testing = part(fit_part), part(test_part)
    own, over = _grids(family, *ordering, settings)
    other = over(*testing)
    certification = certify(own, other, promise, seed=settings.seed)
    index = certification.grid_index
    policy: Policy = RatioPolicy(k=settings.serving_k) if index is None else other.policy(index)
    return policy, certification


def _verdict(
    differences: FloatArray,
    weights: FloatArray,
    settings: Settings,
    *,
    found: bool = True,
) -> RouteVerdict:
    """Whether the chosen policy may be served; ``found`` unless it is what is served today."""
    # A loss that the promise allows was accepted.
    accepted = 0.0 if settings.promise is None else settings.promise.alpha
    limits: dict[str, Any] = {
        "serving_k": settings.serving_k,
        "tolerance": max(settings.tolerance, accepted),
        "max_loss": max(settings.max_loss, accepted),
    }
    if not found:
        return RouteVerdict(decision="keep", n=differences.size, **limits)
    refutable = settings.promise is None and settings.objective == "keep-recall"
    return verdict(differences, weights, refutable=refutable, **limits)


def shuffled(metrics: QueryMetrics, values: FloatArray, seed: int) -> tuple[FloatArray, FloatArray]:
    """The values that are defined and their queries' weights, in an order fixed beforehand.

    Betting needs one, and a file may be sorted by topic.
    """
    weights = np.ones(values.size) if metrics.weights is None else metrics.weights
    defined = np.flatnonzero(~np.isnan(values))
    order = defined[np.random.default_rng(seed).permutation(defined.size)]
    return values[order], weights[order]


def ordering_and_test_parts(chosen_on: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """With a promise: the queries that fit and order the policies, and those that test them."""
    ordering, testing = split_by_query(
        chosen_on, (ORDERING_SHARE, 1.0 - ORDERING_SHARE), seed=seed + 1
    )
    return ordering, testing


def _family(pools: Pools, chosen_on: Dataset, settings: Settings) -> tuple[Family, str]:
    """The family of policies, and why, in words."""
    labelled, legs = len(chosen_on.answerable), len(pools.legs)
    if settings.policy != "auto":
        return settings.policy, f"{settings.policy} was asked for"
    if labelled < FEWEST_LABELS:
        return "ratio", (
            f"ratio: {labelled} answerable queries to choose on, and a probability needs "
            f"{FEWEST_LABELS}"
        )
    signals = len({signal_of(feature) for feature in named_features(pools.signals)})
    if legs < 2 and not signals:
        return "ratio", "ratio: a single scorer, whose probability would keep the same order"
    named = f", {signals} named signals" if signals else ""
    return "expected_utility", (
        f"expected_utility: {labelled} answerable queries to choose on, {max(legs, 1)} "
        f"scorer{'s' * (legs > 1)}{named}"
    )


def _grids(
    family: Family, pools: Pools, labels: PoolLabels, settings: Settings
) -> tuple[Grid, Callable[[Pools, PoolLabels], Grid]]:
    """Every policy of a family over the queries that it is fitted to, and over any others."""
    largest = pools.scores.shape[1]
    if settings.max_tokens is not None and pools.tokens is not None:
        # Sizes go as far as the budget, on the mean; what is served today is always tried.
        tokens = np.nan_to_num(pools.tokens).cumsum(axis=1).mean(axis=0)
        within = int(np.searchsorted(tokens, settings.max_tokens, side="right"))
        largest = min(largest, max(within, settings.serving_k))
    ks = sorted({*sizes(largest), min(settings.serving_k, largest)})
    tried: dict[str, Any] = {"ks": ks, "min_keep": settings.min_keep}
    if family == "ratio":
        tried["temperature"] = fit_temperature(pools)
        return ratio_grid(pools, labels, **tried), lambda *part: ratio_grid(*part, **tried)
    model = fit_relevance(pools, labels)

    def grid(pools: Pools, labels: PoolLabels) -> Grid:
        return utility_grid(pools, labels, probabilities(model, pools), model, **tried)

    return utility_grid(pools, labels, out_of_fold(pools, labels), model, **tried), grid


def _certificate(certification: Certification, promise: Promise, settings: Settings) -> Certificate:
    """The certificate of a promise, of the chosen policy or of the first k as today."""
    tested = certification.grid_index is not None
    return Certificate(
        alpha=promise.alpha,
        beta=promise.beta,
        delta=promise.delta,
        baseline=settings.baseline,
        test="betting p-values, fixed sequence" if tested else "by definition",
        p_value=significant(certification.p_value or 0.0),
        recall_loss=significant(certification.recall_loss),
        harm=significant(certification.harm),
        n_recall=certification.n_recall,
        n_queries=certification.n_harm,
        n_equivalent=certification.n_equivalent,
    )


def _cost_certificate(
    chosen: QueryMetrics,
    differences: FloatArray,
    weights: FloatArray,
    settings: Settings,
    n_rungs: int,
) -> Certificate | None:
    """Bounds the recall that the chosen policy costs, by queries that did not choose it.

    Where several policies were to be tested all bounds hold at once, each with delta divided by
    their number.
    """
    losses, loss_weights = shuffled(chosen, chosen.values["recall_loss"], settings.seed)
    harm, harm_weights = shuffled(chosen, chosen.values["harm"], settings.seed)
    if losses.size == 0:
        return None
    upper = risk.betting_upper_bound(losses, settings.delta / n_rungs, loss_weights)
    lower = risk.betting_lower_bound(differences, settings.delta / n_rungs, weights)
    return Certificate(
        alpha=math.ceil(upper * 1e4) / 1e4,
        beta=None,
        delta=settings.delta,
        baseline=settings.baseline,
        test="betting bound",
        p_value=settings.delta,
        recall_loss=significant(float(weighted_mean(losses, loss_weights))),
        harm=significant(float(weighted_mean(harm, harm_weights))),
        n_recall=int(losses.size),
        n_queries=len(chosen.query_ids),
        n_equivalent=n_equivalent(weights),
        recall_difference=RecallDifference(
            value=significant(float(weighted_mean(differences, weights))),
            lower=math.floor(lower * 1e4) / 1e4,
            n=int(differences.size),
        ),
    )


def reference_deciles(
    pools: Pools, kept: FloatArray, weights: FloatArray
) -> dict[str, tuple[float, ...]]:
    """Deciles of label-free signals, for drift: top score, its gap to the second, kept count."""
    signals = {"top_score": np.where(pools.lengths > 0, pools.scores[:, 0], np.nan)}
    if pools.scores.shape[1] > 1:
        signals["score_gap"] = signals["top_score"] - pools.scores[:, 1]
    signals["kept"] = kept
    return {
        name: tuple(map(significant, deciles(values, weights).tolist()))
        for name, values in signals.items()
        if not np.isnan(values).all()
    }
