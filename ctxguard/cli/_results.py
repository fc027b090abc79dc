"""Prints the one table of results, and a comparison or a calibration with it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from ctxguard.cli._console import NO_DATA, Output, bounds, interval, number, one_line
from ctxguard.cli._tables import TextTable
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
_COMPARED = {"recall": 2, "udcg": 2, "kept": 1, "tokens": 0}
"""Decimals of each figure shown of a candidate."""

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


def define(results: "Results", output: Output, names: Mapping[str, str] | None = None) -> None:
    """Explain the words of a table that a reader may not know, where it has figures.

    Args:
        results: The table.
        output: Prints it.
        names: The metrics to show, with their names in the table; all by their own names unless
            given.
    """
    from calibration.evaluate import DESCRIPTIONS

    for metric, name in (names or {each: each for each in results.metrics}).items():
        if metric not in _KNOWN and results.has_data(metric):
            output.out.print(f"{name}: {DESCRIPTIONS[metric]}", style="dim")


def _digits(metric: str, usual: int = 3) -> int:
    """Return as many decimals as a reader can use."""
    return 0 if metric == "tokens" else usual


def _difference(found: "Difference", metric: str) -> list[Text | str]:
    """Make the cells of ``_DIFFERENCE``."""
    return [_signed(found, metric), f"{found.n:,}", _styled(found.outcome)]


def _signed(found: "Difference", metric: str = "") -> Text:
    """Write a difference with its interval, in the colour of its outcome."""
    return Text(interval(found, _digits(metric), "+"), style=_STYLES.get(found.outcome, ""))


def _name(name: str) -> Text:
    return Text(one_line(name), style="bold")


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))


def print_comparison(
    comparison: "Comparison",
    facts: Iterable[tuple[str, str | None]],
    output: Output,
    *,
    show_all: bool,
) -> None:
    """Print one row per candidate with its risk, and everything else on request."""
    from calibration.compare.comparison import RULE

    results = comparison.results
    output.facts(*facts)
    output.heading("What each candidate is worth to the reader")
    rows: list[Sequence[str | Text]] = []
    for each in comparison.candidates:
        found = {m: results.of(each.candidate.name, m) for m in _COMPARED}
        less = found["udcg"].difference
        means = [number(row.mean.value, _COMPARED[m]) for m, row in found.items()]
        means[2:2] = ["" if less is None else interval(less, 2, "+")]
        rows.append((_name(each.candidate.name), *means, _styled(each.risk or NO_DATA)))
    columns = ("recall>", "udcg>", f"less {results.reference}>", "passages>", "tokens>", "risk")
    output.table(("candidate", *columns), rows)
    for sentence in RULE:
        output.out.print(sentence, style="dim")
    if not show_all:
        output.note("--all shows every metric with its difference, and the curve by k")
        return
    others = [name for name in results.policies if name != results.reference]
    for name in others or results.policies:
        output.heading(f"{name}, every metric" + (" paired by query" if others else ""))
        output.out.print(by_metric(results.only(dict.fromkeys((results.reference, name)))))
    _print_sizes(comparison, output)


def _print_sizes(comparison: "Comparison", output: Output) -> None:
    least = min(len(each.curve.udcg) for each in comparison.candidates)
    ks = [k for k in _CURVE_KS if k <= least]
    output.heading("udcg by the size of the context (k), thresholds applied")
    rows: list[Sequence[str | Text]] = []
    others: list[Sequence[str | Text]] = []
    for each in comparison.candidates:
        size = each.curve
        cells = [number(size.udcg[k - 1].value, 2) for k in ks]
        span = f" ({min(size.within_noise)}–{max(size.within_noise)})"
        best = f"{size.optimal_k}{span if len(size.within_noise) > 1 else ''}"
        rows.append((_name(each.candidate.name), *cells, best))
        harm, took = interval(each.harm_share), f"{each.latency_ms:.2f}"
        others.append((_name(each.candidate.name), harm, took))
    output.table(("candidate", *(f"{k}>" for k in ks), "best k>"), rows)
    output.out.print("best k: k of the highest (range of k within noise of it)", style="dim")
    output.table(("candidate", "share of harm>", "ms>"), others)
    output.out.print("share of harm: mean harm / (mean gain + mean harm)", style="dim")


def print_checks(checks: "Sequence[RegressionCheck]", output: Output) -> None:
    """Print the candidates against those of a saved comparison, if there is one."""
    if not checks:
        return
    output.heading("Against the saved comparison, paired by query")
    rows: list[Sequence[str | Text]] = []
    for check in checks:
        if check.saved is None:
            rows.append((_name(check.candidate), "not saved", *[""] * 4))
        names = (check.candidate, check.saved or "")
        for metric, each in check.differences.items():
            rows.append((*map(_name, names), metric, *_difference(each, metric)))
            names = ("", "")
    output.table(("candidate", "saved", "metric", *_DIFFERENCE), rows)


def print_differences(
    route: Route, summary: "Summary", output: Output, metrics: Iterable[str] | None = None
) -> None:
    """Print today beside the choice on one route: these metrics, or all."""
    _print_heading(route, summary, output)
    shown = summary.results.only(summary.results.policies[:2], metrics)
    output.out.print(by_metric(shown))
    define(shown, output)


def _print_heading(route: Route, summary: "Summary", output: Output) -> None:
    """Print on which queries a route was measured."""
    on = "held-out queries"
    if summary.shown_by == "folds":
        on = "queries, each left out of the choice that it measures"
    output.heading(f"route {route.value}, on {summary.queries:,} {on}")


def print_summary(
    summary: "Summary",
    outcome: "RouteOutcome",
    output: Output,
    *,
    show_all: bool,
) -> None:
    """Print today beside the choice, leaner and richer contexts, and warnings."""
    from calibration.report import certificate_words

    route = outcome.route.measured.route
    (print_differences if show_all else _print_heading)(route, summary, output)
    _print_options(summary, output, with_words=not show_all)
    judged = NO_DATA if summary.judged.value is None else f"{summary.judged.value:.0%}"
    in_shadow = outcome.served is not outcome.chosen
    output.facts(
        ("keeps", describe_policy(outcome.profile.policy)),
        ("serves", f"the first {summary.serving_k} while in shadow" if in_shadow else None),
        ("why", outcome.profile.why if show_all else None),
        ("certificate", certificate_words(outcome) if show_all else None),
        ("judged", f"{judged} of the first {summary.serving_k} passages have a label"),
    )
    for warning in summary.warnings:
        output.warning(warning)


def _print_options(summary: "Summary", output: Output, *, with_words: bool) -> None:
    """Print leaner and richer contexts beside today's, each with its paired differences."""
    rows: list[Sequence[str | Text]] = []
    shown = {m: name for m, name in _OPTION_METRICS.items() if summary.results.has_data(m)}
    asked = {name: name for name in summary.results.policies if name.startswith("with answers")}
    for size, name in {**summary.by_size, **asked}.items():
        found = {metric: summary.results.of(name, metric) for metric in shown}
        # Five columns with intervals at 80 characters: fewer decimals than elsewhere.
        digits = {metric: {"tokens": 0, "kept": 1}.get(metric, 2) for metric in found}
        own = [number(each.mean.value, digits[metric]) for metric, each in found.items()]
        is_chosen = size == summary.chosen
        mark = "→ " if is_chosen else "  "
        style = "bold" if is_chosen else ""
        # Further names of the same contexts go below the first: the table has 80 columns.
        first, _, others = size.partition(", ")
        rows.append((Text(mark + first, style=style), *own))
        less = [
            bounds(each.difference, digits[metric], "+", "{}…{}") if each.difference else ""
            for metric, each in found.items()
        ]
        if others or any(less):
            below = Text(f"  = {others}" if others else "", style=style)
            rows.append((below, *(Text(words, style="dim") for words in less)))
    output.table(("  context", *(f"{name}>" for name in shown.values())), rows)
    if summary.missing:
        missing = ", ".join(summary.missing)
        output.note(f"{missing}: no policy is shown to keep today's recall and be better")
    if len(rows) > 1:
        output.note(
            "below each figure: the interval of its difference from today's; first k: the "
            "retriever's own order at equal tokens; --context chooses"
        )
    if with_words:
        define(summary.results, output, shown)


def print_asking(route: "RouteProfile", output: Output) -> None:
    """Print what an assessor adds and costs, or why nobody is asked."""
    if not route.asking:
        return
    assessor = route.assessor
    output.heading("what the assessor adds")
    output.facts(("verdict", route.asking))
    if assessor is None or assessor.gain is None:
        return
    cost = "" if assessor.cost is None else f", which cost {assessor.cost:.3g}"
    output.facts(
        ("1,000 requests", f"{assessor.calls:,.0f} calls{cost}"),
        ("keeps", describe_policy(assessor.policy)),
    )
