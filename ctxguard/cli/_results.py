"""Lays out the one table of results, and a comparison or a calibration with it.

Pure. Each part is imported only when it is shown, so that help stays fast.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from ctxguard._support.words import count
from ctxguard.cli._tables import (
    NO_DATA,
    Cells,
    TextTable,
    bounds,
    dim,
    facts,
    heading,
    interval,
    number,
    remark,
)
from ctxguard.core.render import one_line
from ctxguard.core.types import Route
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.calibrate_route import RouteOutcome
    from calibration.compare.comparison import Comparison
    from calibration.compare.saved_comparison import RegressionCheck
    from calibration.report.summary import Summary
    from calibration.results import Difference, Results
    from ctxguard.profile.schema import RouteProfile

_CURVE_KS = (1, 2, 3, 4, 5, 7, 10, 15, 20)
_OPTION_METRICS = {
    "recall": "recall",
    "udcg": "UDCG",
    "kept": "passages",
    "tokens": "tokens",
    "misleading": "misleading",
}
_COMPARED = ("recall", "udcg", "kept", "tokens")
_FEW_DIGITS = {"kept": 1, "tokens": 0}
"""Decimals of these metrics in tables with many columns; others have two."""

_KNOWN = frozenset({"recall", "precision", "kept", "tokens"})
"""Metrics whose names explain themselves."""

_IN_WORDS = {"kept": "passages"}
"""Metrics whose names in a table differ from those in JSON."""

_STYLES = {
    "SAFE": "bold green",
    "RISKY": "bold yellow",
    "DANGEROUS": "bold red",
    "better": "green",
    "worse": "red",
    "within noise": "dim",
    "no data": "dim",
}
_DIFFERENCE = ("difference>", "n>", "outcome")


def by_metric(results: "Results") -> TextTable:
    """Make a row for each metric.

    The means of two policies stand beside their paired difference. Without one, each mean stands
    with its own interval.
    """
    policies = results.policies
    pair = len(policies) == 2 and any(row.difference and row.difference.n for row in results.rows)
    proven = any(row.difference and row.difference.value is not None for row in results.rows)
    last = _DIFFERENCE if pair and proven else ("n>",)
    rows = []
    for metric in results.metrics:
        found = [results.of(policy, metric) for policy in policies]
        difference = found[-1].difference
        if pair and proven and difference is not None:
            cells: list[Text | str] = [number(each.mean.value, _digits(metric)) for each in found]
            cells += _difference(difference, metric)
        else:
            cells = [interval(each.mean, _digits(metric, 2)) for each in found]
            cells.append(f"{found[-1].mean.n:,}")
        rows.append([_IN_WORDS.get(metric, metric), *cells])
    names = [one_line(name).removesuffix(", as today") for name in policies]
    return TextTable(["metric", *(f"{name}>" for name in names), *last], rows)


def definitions(results: "Results", names: Mapping[str, str] | None = None) -> Iterator[Text]:
    """Explain the words in a table that readers may not know, if it has figures for them."""
    from calibration.evaluate import DESCRIPTIONS

    for metric, name in (names or {each: each for each in results.metrics}).items():
        if metric not in _KNOWN and results.has_data(metric):
            yield dim(f"{name}: {DESCRIPTIONS[metric]}")


def _digits(metric: str, usual: int = 3) -> int:
    """Return as many decimals as a reader can use."""
    return 0 if metric == "tokens" else usual


def _difference(found: "Difference", metric: str) -> list[Text | str]:
    """Make the cells for the columns of ``_DIFFERENCE``: difference, interval, coloured outcome."""
    signed = interval(found, _digits(metric), "+")
    return [_styled(signed, found.outcome), f"{found.n:,}", _styled(found.outcome)]


def _name(name: str) -> Text:
    return Text(one_line(name), style="bold")


def _styled(words: str, outcome: str | None = None) -> Text:
    return Text(words, style=_STYLES.get(outcome or words, ""))


def comparison_shown(comparison: "Comparison", *, show_all: bool) -> Iterator[RenderableType]:
    """Lay out one row per candidate with its risk, and everything else on request."""
    from calibration.compare.comparison import RULE

    results = comparison.results
    yield heading("What each candidate is worth to the reader")
    rows: list[Cells] = []
    for each in comparison.candidates:
        found = {m: results.of(each.candidate.name, m) for m in _COMPARED}
        less = found["udcg"].difference
        means = [number(row.mean.value, _FEW_DIGITS.get(m, 2)) for m, row in found.items()]
        means[2:2] = ["" if less is None else interval(less, 2, "+")]
        rows.append((_name(each.candidate.name), *means, _styled(each.risk or NO_DATA)))
    columns = ("recall>", "udcg>", f"less {results.reference}>", "passages>", "tokens>", "risk")
    yield TextTable(("candidate", *columns), rows)
    yield from map(dim, RULE)
    if not show_all:
        yield remark("--all shows every metric with its difference, and the curve by k")
        return
    others = [name for name in results.policies if name != results.reference]
    for name in others or results.policies:
        yield heading(f"{name}, every metric" + (" paired by query" if others else ""))
        yield by_metric(results.only(dict.fromkeys((results.reference, name))))
    yield from _sizes_shown(comparison)


def _sizes_shown(comparison: "Comparison") -> Iterator[RenderableType]:
    least = min(len(each.udcg_by_k) for each in comparison.candidates)
    ks = [k for k in _CURVE_KS if k <= least]
    rows: list[Cells] = []
    others: list[Cells] = []
    for each in comparison.candidates:
        name = _name(each.candidate.name)
        cells = [number(each.udcg_by_k[k - 1].value, 2) for k in ks]
        span = f" ({min(each.within_noise)}–{max(each.within_noise)})"
        best = f"{each.optimal_k}{span if len(each.within_noise) > 1 else ''}"
        rows.append((name, *cells, best))
        others.append((name, interval(each.harm_share), f"{each.latency_ms:.2f}"))
    yield heading("udcg by the size of the context (k), thresholds applied")
    yield TextTable(("candidate", *(f"{k}>" for k in ks), "best k>"), rows)
    yield dim("best k: k of the highest (range of k within noise of it)")
    yield TextTable(("candidate", "share of harm>", "ms>"), others)
    yield dim("share of harm: mean harm / (mean gain + mean harm)")


def checks_shown(checks: "Sequence[RegressionCheck]") -> Iterator[RenderableType]:
    """Lay out how the candidates differ from those of a saved comparison, if there is one."""
    if not checks:
        return
    rows: list[Cells] = []
    for check in checks:
        if check.saved is None:
            rows.append((_name(check.candidate), "not saved", *[""] * 4))
        names = (check.candidate, check.saved or "")
        for metric, each in check.differences.items():
            rows.append((*map(_name, names), metric, *_difference(each, metric)))
            names = ("", "")
    yield heading("Against the saved comparison, paired by query")
    yield TextTable(("candidate", "saved", "metric", *_DIFFERENCE), rows)


def differences_shown(
    route: Route, summary: "Summary", metrics: Iterable[str] | None = None
) -> Iterator[RenderableType]:
    """Lay out today's context beside the chosen one on one route: these metrics, or all."""
    yield _route_heading(route, summary)
    shown = summary.results.only(summary.results.policies[:2], metrics)
    yield by_metric(shown)
    yield from definitions(shown)


def _route_heading(route: Route, summary: "Summary") -> RenderableType:
    """Say on which queries a route was measured."""
    on = count(summary.queries, "held-out query")
    if summary.shown_by == "folds":
        on = f"{count(summary.queries, 'query')}, each left out of the choice that it measures"
    return heading(f"route {route.value}, on {on}")


def summary_shown(
    summary: "Summary", outcome: "RouteOutcome", *, show_all: bool
) -> Iterator[RenderableType]:
    """Lay out today's context beside the chosen one, leaner and richer contexts, and warnings."""
    from calibration.report import certificate_words

    route = outcome.route.measured.route
    if show_all:
        yield from differences_shown(route, summary)
    else:
        yield _route_heading(route, summary)
    yield from _options_shown(summary, show_all=show_all)
    judged = NO_DATA if summary.judged.value is None else f"{summary.judged.value:.0%}"
    in_shadow = outcome.served is not outcome.chosen
    yield facts(
        ("keeps", describe_policy(outcome.profile.policy)),
        ("serves", f"the first {summary.serving_k} while in shadow" if in_shadow else None),
        ("why", outcome.profile.why if show_all else None),
        ("certificate", certificate_words(outcome) if show_all else None),
        ("judged", f"{judged} of the first {summary.serving_k} passages have a label"),
    )
    for warning in summary.warnings:
        yield remark(warning, "warning", "bold yellow")


def _options_shown(summary: "Summary", *, show_all: bool) -> Iterator[RenderableType]:
    """Lay out leaner and richer contexts beside today's, each with its paired differences."""
    from calibration.report.summary import SEED_RULE

    rows: list[Cells] = []
    shown = {m: name for m, name in _OPTION_METRICS.items() if summary.results.has_data(m)}
    named = {*summary.by_size.values(), "chosen", *([] if show_all else [SEED_RULE])}
    more = {name: name for name in summary.results.policies if name not in named}
    for size, name in {**summary.by_size, **more}.items():
        own, less = [], []
        for metric in shown:
            found, digits = summary.results.of(name, metric), _FEW_DIGITS.get(metric, 2)
            own.append(number(found.mean.value, digits))
            gap = found.difference
            less.append("" if gap is None else bounds(gap, digits, "+", "{}…{}"))
        is_chosen = size == summary.chosen
        style = "bold" if is_chosen else ""
        # Further names of the same contexts go below the first: the table has 80 columns.
        first, _, others = size.partition(", ")
        rows.append((Text(("→ " if is_chosen else "  ") + first, style=style), *own))
        if others or any(less):
            below = Text(f"  = {others}" if others else "", style=style)
            rows.append((below, *map(dim, less)))
    yield TextTable(("  context", *(f"{name}>" for name in shown.values())), rows)
    if summary.missing:
        missing = ", ".join(summary.missing)
        yield remark(f"{missing}: no policy is shown to keep today's recall and be better")
    if len(rows) > 1:
        yield remark(
            "below each figure: the interval of its difference from today's; first k: the "
            "retriever's own order at equal tokens; --context chooses"
        )
    if SEED_RULE in more:
        yield remark(f"{SEED_RULE}: at most 3 passages, each with at least 70% of the best score")
    if not show_all:
        yield from definitions(summary.results, shown)


def asking_shown(route: "RouteProfile") -> Iterator[RenderableType]:
    """Lay out an assessor's benefit and cost, or why none is asked."""
    if not route.asking:
        return
    assessor = route.assessor
    yield heading("what the assessor adds")
    yield facts(("verdict", route.asking))
    if assessor is None or assessor.gain is None:
        return
    cost = "" if assessor.cost is None else f", which cost {assessor.cost:.3g}"
    yield facts(
        ("1,000 requests", f"{assessor.calls:,.0f} calls{cost}"),
        ("keeps", describe_policy(assessor.policy)),
    )
