"""Summarises a calibration for a person who must decide whether to believe it.

Pure: a route's outcome in, rows with intervals and warnings out. The command line prints it and
the report begins with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibration.calibrate_route import Option, RouteOutcome
from calibration.evaluate import Measured, per_query
from calibration.fit import fit_temperature
from calibration.pools import LabelledPools
from calibration.results import Results, differences, tabulate
from calibration.settings import SIZES
from ctxguard._support.words import amount, count, figure, signed
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import ScoreKind
from ctxguard.measure.interval import Interval, bootstrap_interval
from ctxguard.profile.describe import describe_policy
from ctxguard.profile.schema import RouteVerdict

SUMMARY_METRICS = ("recall", "precision", "udcg", "misleading", "kept", "tokens")

SEED_RULE = "3 and 70%"
"""At most 3 passages, each with at least 70% of the best score: a rule that needs no labels."""

_SHORT = ("kept", "tokens", "recall", "misleading")

LEAST_JUDGED = 0.5
"""Below this share of labelled passages among those served today, their figures are mostly
guesses."""

NOTABLE_LOSS = 0.01
"""The smallest decrease in mean recall that is pointed out."""


@dataclass(frozen=True)
class Summary:
    """The figures and warnings a person should see first.

    Attributes:
        verdict: Whether the choice may be served, in words.
        serving_k: How many passages are served today.
        queries: How many were measured on.
        shown_by: ``held_out`` if the queries took no part in anything, ``folds`` if each fifth was
            measured by what the others choose.
        results: Today, the choice, and what leaner and richer contexts would give.
        missing: Sizes of context for which nothing but today's is shown to be better.
        by_size: Names of the policies of ``results`` by what they cost: today's, then each size of
            context that is at hand, from the least, and after it the first k of equal tokens.
            Those that serve the same contexts are one row, whose sizes a comma parts.
        chosen: The row of the choice.
        in_short: How the choice changes today's contexts, and what is not shown yet.
        asked: The worth of a model's answers, or why they are not used, in words; empty without
            one.
        keeps: The passages each of these policies keeps, in words.
        judged: Share of the first ``serving_k`` that has a label.
        warnings: Warnings, one line each.
    """

    verdict: str
    serving_k: int
    queries: int
    shown_by: str
    results: Results
    missing: tuple[str, ...]
    by_size: Mapping[str, str]
    chosen: str
    in_short: str
    asked: str
    keeps: Mapping[str, str]
    judged: Interval
    warnings: tuple[str, ...]


def summarise(outcome: RouteOutcome, *, metrics: tuple[str, ...] = SUMMARY_METRICS) -> Summary:
    """Put today's first k beside the choice, its alternatives, and a rule that needs no labels."""
    by_size, row = _by_size(outcome)
    own_options = (outcome.today, outcome.chosen, *by_size.values(), outcome.answered)
    options = {
        each.name: (describe_policy(each.policy), each.metrics)
        for each in own_options
        if each is not None
    }
    rule = _seed_rule(outcome.route.pools, outcome.route.measured)
    if not any(_equal(rule[1], own) for _, own in options.values()):
        options[SEED_RULE] = rule
    measured = {name: own for name, (_, own) in options.items()}
    settings, today = outcome.route.settings, outcome.today.metrics
    judged = bootstrap_interval(today["judged"], seed=settings.seed)
    verdict, evidence = outcome.profile.verdict, outcome.profile.evidence
    results = tabulate(measured, metrics, seed=settings.seed)
    return Summary(
        verdict="" if verdict is None else verdict.statement,
        serving_k=settings.serving_k,
        queries=len(today["judged"]),
        shown_by="folds" if evidence is None else evidence.shown_by,
        results=results,
        missing=_missing(outcome),
        by_size={size: each.name for size, each in by_size.items()},
        chosen=row,
        in_short=_in_short(results, outcome),
        asked=outcome.profile.asking,
        keeps={name: words for name, (words, _) in options.items()},
        judged=judged,
        warnings=tuple(_warnings(outcome, judged)),
    )


def _seed_rule(pools: LabelledPools, measured: LabelledPools) -> tuple[str, Measured]:
    """Say what the rule keeps, and measure it; ranks have no ratio, so only its k applies."""
    policy = RatioPolicy(k=3)
    if pools.kind is not ScoreKind.RANK:
        policy = RatioPolicy(k=3, min_ratio=0.7, temperature=fit_temperature(pools))
    return describe_policy(policy), per_query(measured, policy)


def _equal(these: Measured, those: Measured) -> bool:
    return all(np.array_equal(these[name], those[name], equal_nan=True) for name in these)


def _missing(outcome: RouteOutcome) -> tuple[str, ...]:
    if (wanted := outcome.route.wanted) == "utility":
        return ()
    asked = outcome.chosen.policy != outcome.today.policy
    return tuple(
        size for size in SIZES if size not in outcome.others and not (size == wanted and asked)
    )


def _by_size(outcome: RouteOutcome) -> tuple[dict[str, Option], str]:
    """Return the names of the contexts by cost, and the row of the choice."""
    offered = {str(size): option for size, option in outcome.others.items()}
    if outcome.chosen.policy != outcome.today.policy:
        wanted = outcome.route.wanted
        offered["chosen" if wanted == "utility" else wanted] = outcome.chosen
    rows: list[tuple[list[str], Option]] = [(["today"], outcome.today)]
    for size in ("chosen", *SIZES):
        if size not in offered:
            continue
        option = offered[size]
        alike = [place for place, (_, other) in enumerate(rows) if option.serves_as(other)]
        if not alike:
            rows.append(([size], option))
            continue
        names, other = rows[alike[0]]
        is_other = names[0] == "today" or option is not outcome.chosen
        rows[alike[0]] = [*names, size], other if is_other else option
    for place in reversed(range(1, len(rows))):
        first = outcome.route.of_equal_tokens(rows[place][1])
        if first is not None and not any(first.serves_as(option) for _, option in rows):
            rows.insert(place + 1, ([first.name], first))
    by_size = {", ".join(names): option for names, option in rows}
    row = next(name for name, option in by_size.items() if option.serves_as(outcome.chosen))
    return by_size, row


def _in_short(results: Results, outcome: RouteOutcome) -> str:
    found = {name: results.of("chosen", name) for name in _SHORT}
    both = {
        name: (row.mean.value, results.of(results.reference, name).mean.value)
        for name, row in found.items()
    }
    noisy = [
        name
        for name in ("tokens", "recall", "misleading")
        if (less := found[name].difference)
        and less.outcome == "within noise"
        and not _is_equal(less)
    ]
    own, before = both["misleading"]
    misleading = "none labelled"
    if own is not None and before is not None:
        todays = f", today {figure(before, 2)}" if own != before else ""
        misleading = f"{figure(own, 2)} a question{todays}"
    verdict = outcome.profile.verdict
    return in_one_line(
        passages=both["kept"],
        tokens=both["tokens"],
        recall=None if outcome.chosen.serves_as(outcome.today) else found["recall"].difference,
        misleading=misleading,
        unshown="" if verdict is None else unshown_by(verdict, noisy, outcome.route.wanted),
    )


def _is_equal(found: Interval) -> bool:
    """Return whether a figure equals today's on every question, and so contains no noise."""
    return found.value == 0.0 == found.lower == found.upper


def in_one_line(
    *,
    passages: tuple[float | None, float | None],
    tokens: tuple[float | None, float | None],
    recall: Interval | None,
    misleading: str,
    unshown: str = "",
) -> str:
    """Describe in one line the contexts that a policy serves instead of today's.

    Args:
        passages: A context's, by the policy and today.
        tokens: Likewise; None where unknown.
        recall: Less today's; None where the contexts are today's own.
        misleading: How many passages mislead, in words.
        unshown: The claims not shown yet; empty if nothing is left to show.

    >>> saved, none = Interval(0.0, -0.02, 0.02, 40), "none labelled"
    >>> in_one_line(passages=(6.6, 10), tokens=(947, 1566), recall=saved, misleading=none)
    '6.6 passages in place of 10, 947 tokens in place of 1,566, recall +0.000 [-0.020, +0.020]; \
misleading: none labelled'
    """
    said = []
    for (own, before), noun in ((passages, "passage"), (tokens, "token")):
        if own is not None and before is not None:
            words = f"{amount(own)} {noun}{'' if own == 1.0 else 's'}"
            said.append(words if recall is None else f"{words} in place of {amount(before)}")
    if recall is None:
        said.append("as today")
    elif _is_equal(recall):
        said.append(f"the same recall on {'all ' * (recall.n > 1)}{count(recall.n, 'question')}")
    elif recall.value is not None:
        ends = "" if recall.bounds is None else " [{}, {}]".format(*map(signed, recall.bounds))
        said.append(f"recall {signed(recall.value)}{ends}")
    line = f"{', '.join(said)}; misleading: {misleading}"
    return f"{line}; not shown yet: {unshown}" if unshown else line


def unshown_by(verdict: RouteVerdict, noisy: Sequence[str], wanted: str) -> str:
    """Say what a verdict does not show yet, and how many questions would show it.

    Args:
        noisy: Figures whose difference from today's may be noise.
        wanted: The contexts that were asked for.
    """
    if verdict.decision == "enforce":
        shown = " ".join(verdict.gains)
        others = [each for each in noisy if each not in shown]
        return f"a difference in {' and '.join(others)}" if others else ""
    what = "that nothing is lost"
    if verdict.decision == "keep":
        what = "a gain at no more tokens" if wanted in ("leaner", "balanced") else "a gain"
    if verdict.n_needed is None:
        return what
    if verdict.recall is None:
        return f"{what}, which takes {count(verdict.n_needed, 'question')} or more"
    return f"{what}, which about {count(verdict.n_needed, 'question')} would probably decide"


def _warnings(outcome: RouteOutcome, judged: Interval) -> list[str]:
    lines = []
    settings, certificate = outcome.route.settings, outcome.profile.certificate
    k, both = settings.serving_k, (outcome.chosen.metrics, outcome.today.metrics)
    recall = differences(*both, ("recall",), seed=settings.seed)["recall"]
    if judged.value is not None and judged.value < LEAST_JUDGED:
        lacking = round((1.0 - judged.value) * k * judged.n)
        lines.append(
            f"only {judged.value:.0%} of the first {k} passages were ever labelled: harm and "
            "precision are mostly a guess; `ctxguard label --questions DATA --out labels.jsonl`, "
            f"with the same DATA, asks for the others, about {count(lacking, 'passage')} for "
            f"{count(judged.n, 'question')}"
        )
    if recall.value is not None and recall.value < -NOTABLE_LOSS:
        noise = recall.upper is None or recall.upper >= 0.0
        lines.append(
            f"mean recall is {figure(-recall.value)} lower than that of the first {k}"
            + (", which may be noise" if noise else "")
        )
    if certificate is not None and certificate.promises_nothing:
        lines.append(
            f"the certificate promises nothing useful: with {certificate.n_recall} held-out "
            "queries, more than half of the recall may be lost"
        )
    return lines
