"""What a calibration shows first: what is served today beside the choice."""

from typing import TYPE_CHECKING

from ctxguard.cli._console import NO_DATA, Output, number, table
from ctxguard.core.types import Route
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from collections.abc import Container

    from calibration.calibrate import Calibration
    from calibration.report.data import Summary
    from ctxguard.profile.schema import Interval

_OPTION_METRICS = {"recall": "recall", "harm": "harm", "udcg_strict": "UDCG", "kept": "kept"}


def print_differences(
    route: Route,
    calibration: "Calibration",
    output: Output,
    metrics: "Container[str] | None" = None,
) -> "Summary":
    """Print today's serving beside the choice.

    Args:
        route: The route.
        calibration: The calibration.
        output: The output.
        metrics: Names of the metrics to print; None for all.
    """
    from calibration.report import summarise

    outcome, settings = calibration.outcomes[route], calibration.settings
    summary = summarise(outcome, settings, held_out=calibration.held_out is not None)
    on = "held-out queries" if summary.held_out else "queries that chose"
    output.heading(f"route {route.value}, on {summary.queries:,} {on}")
    rows = table("metric", f"first {summary.serving_k}, as today>", "chosen>", "difference>")
    for row in summary.rows:
        if metrics is None or row.metric in metrics:
            cells = (_cell(each, row.metric) for each in (row.today, row.chosen))
            rows.add_row(row.metric, *cells, _cell(row.difference, row.metric, signed=True))
    output.out.print(rows)
    return summary


def print_summary(
    route: Route, calibration: "Calibration", output: Output, *, show_all: bool
) -> None:
    """Today beside the choice, what to beware of, and on request what else could be chosen."""
    from calibration.report import certificate_words

    outcome, settings = calibration.outcomes[route], calibration.settings
    summary = print_differences(route, calibration, output)
    judged = NO_DATA if summary.judged.value is None else f"{summary.judged.value:.0%}"
    facts = [
        ("keeps", describe_policy(outcome.profile.policy)),
        ("why", outcome.profile.why),
        ("certificate", certificate_words(outcome, settings)),
        ("judged", f"{judged} of the first {summary.serving_k} passages have a label"),
    ]
    for name, segment in outcome.profile.segments.items():
        facts.append((f"segment {name}", describe_policy(segment.policy)))
        facts.append(("", segment.certificate.statement))
    output.facts(facts)
    for warning in summary.warnings:
        output.warning(warning)
    if not show_all:
        return
    output.heading("what else could be served")
    options = table("option", *(f"{name}>" for name in _OPTION_METRICS.values()))
    for option in summary.options:
        options.add_row(option.name, *(number(option.means[name]) for name in _OPTION_METRICS))
    output.out.print(options)


def _cell(estimate: "Interval", metric: str, *, signed: bool = False) -> str:
    """A mean and its interval, short enough for three in 80 columns."""
    form = ".0f" if metric == "tokens" else ".2f"
    if estimate.value is None:
        return NO_DATA
    mean = f"{estimate.value:{'+' if signed else ''}{form}}"
    if estimate.lower is None or estimate.upper is None:
        return mean
    return f"{mean} [{estimate.lower:{form}}, {estimate.upper:{form}}]"
