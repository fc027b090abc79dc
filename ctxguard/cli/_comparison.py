"""How a comparison is shown: tables for people, JSON for programs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from ctxguard.cli._console import NO_DATA, Output, number, one_line, short_interval, table
from ctxguard.cli._tables import Rows

if TYPE_CHECKING:
    from calibration.compare.comparison import Compared, Comparison, Curve, CurvePoint
    from calibration.compare.paired_differences import Difference
    from calibration.compare.saved_comparison import RegressionCheck
    from ctxguard.profile.schema import Interval

_METRICS = (
    *("recall", "precision", "mrr", "ndcg", "udcg"),
    *("distractor_rate", "harm_undiscounted", "kept"),
)
_DIFFERENCES = ("recall", "ndcg", "udcg_strict", "harm")
_CURVE_KS = (1, 2, 3, 4, 5, 7, 10, 15, 20)
_STYLES = {
    "SAFE": "bold green",
    "RISKY": "bold yellow",
    "DANGEROUS": "bold red",
    "better": "green",
    "worse": "red",
    "within noise": "dim",
    "no data": "dim",
}


def document(
    comparison: "Comparison",
    checks: "Sequence[RegressionCheck]",
    about: Mapping[str, object],
    notes: Sequence[str],
) -> dict[str, object]:
    """A comparison as JSON; ``SavedComparison`` reads a part of it back."""
    return {
        **about,
        "measured_queries": len(comparison.query_ids),
        "baseline": comparison.baseline,
        "utilities": asdict(comparison.utilities),
        "unlabelled": comparison.unlabelled,
        "rule": list(comparison.rule.sentences),
        "candidates": [_candidate(each) for each in comparison.candidates],
        "differences": {
            name: {metric: asdict(each) for metric, each in by_metric.items()}
            for name, by_metric in comparison.differences.items()
        },
        "against": {
            check.candidate: {
                "saved": check.saved,
                "regressed": check.regressed,
                "differences": {name: asdict(each) for name, each in check.differences.items()},
            }
            for check in checks
        },
        "notes": list(notes),
        "query_ids": list(comparison.query_ids),
    }


def _candidate(each: "Compared") -> dict[str, object]:
    from calibration.compare.saved_comparison import values_as_json

    curve = each.curve
    return {
        "name": each.candidate.name,
        **each.candidate.describe(),
        "score_kind": each.kind.value,
        "metrics": {name: interval.model_dump() for name, interval in each.metrics.items()},
        "harm_share": each.harm_share.model_dump(),
        "verdict": each.verdict,
        "latency_ms": each.latency_ms,
        "families": [
            {"family": one.family, "signals": list(one.signals), "gain": one.gain.model_dump()}
            for one in each.families
        ],
        "optimal_k": curve.optimal_k,
        "optimal_k_within_noise": list(curve.within_noise),
        "curve": [
            {
                "k": point.k,
                "udcg_strict": point.udcg_strict.model_dump(),
                "gain": point.gain.model_dump(),
                "harm": point.harm.model_dump(),
            }
            for point in curve.points
        ],
        "per_query": values_as_json(each.per_query),
    }


def print_comparison(
    comparison: "Comparison", facts: Iterable[tuple[str, str]], output: Output, *, show_all: bool
) -> None:
    """One table of the candidates with their verdicts, and on request all that was measured."""
    output.facts(facts)
    _print_verdicts(comparison, output)
    if not show_all:
        output.note("--all shows every metric, the curve by k, the differences and the signals")
        return
    _print_metrics(comparison, output)
    _print_worth(comparison, output)
    _print_curve(comparison, output)
    if comparison.differences:
        _print_differences(comparison, output)
    if any(each.families for each in comparison.candidates):
        _print_families(comparison, output)


def _print_verdicts(comparison: "Comparison", output: Output) -> None:
    output.heading(f"What each candidate is worth to the reader, with {_confidence()} intervals")
    less = f"less {comparison.baseline}>"
    rows = table("candidate", "recall>", "udcg_strict>", less, "verdict")
    for each in comparison.candidates:
        differences = comparison.differences.get(each.candidate.name, {})
        strict = differences.get("udcg_strict")
        rows.add_row(
            _name(each.candidate.name),
            _two(each.metrics["recall"]).plain,
            short_interval(each.metrics["udcg_strict"]),
            "" if strict is None else _styled_short(strict),
            _styled(each.verdict or NO_DATA),
        )
    output.out.print(rows)
    for sentence in comparison.rule.sentences:
        output.out.print(sentence, style="dim")


def _styled_short(each: "Difference") -> Text:
    if each.value is None:
        return Text(NO_DATA)
    bounds = "" if each.lower is None else f" [{each.lower:+.2f}, {each.upper:+.2f}]"
    return Text(f"{each.value:+.2f}{bounds}", style=_STYLES.get(each.outcome, ""))


def _print_metrics(comparison: "Comparison", output: Output) -> None:
    output.heading("What each candidate would serve")
    rows = table("candidate", *(f"{name.replace('_', ' ')}>" for name in _METRICS), "ms>")
    for each in comparison.candidates:
        rows.add_row(
            _name(each.candidate.name),
            *(number(each.metrics[name].value) for name in _METRICS),
            f"{each.latency_ms:.2f}",
        )
    output.out.print(rows)
    output.out.print(
        "ms: median time of a retrieval with reranking and signals, without encoding the query",
        style="dim",
    )


def _print_worth(comparison: "Comparison", output: Output) -> None:
    output.heading("What it is worth to the reader, with every other passage counted as harm")
    rows = table(
        "candidate",
        f"udcg_strict, {_confidence()}>",
        "harm>",
        f"share of harm, {_confidence()}>",
        "best k>",
    )
    for each in comparison.candidates:
        strict, share = each.metrics["udcg_strict"], each.harm_share
        rows.add_row(
            _name(each.candidate.name),
            short_interval(strict),
            number(each.metrics["harm"].value),
            short_interval(share),
            _best_k(each.curve),
        )
    output.out.print(rows)
    output.out.print(
        "share of harm: mean harm / (mean gain + mean harm) in udcg_strict, where a passage that "
        f"is not relevant is worth {comparison.utilities.irrelevant:g} (for "
        "unlabelled ones see above)",
        style="dim",
    )
    output.out.print(
        "best k: k of the highest udcg_strict (range of k within noise of it)", style="dim"
    )


def _confidence() -> str:
    from calibration.evaluate import CONFIDENCE

    return f"{CONFIDENCE:.0%}"


def _best_k(curve: "Curve") -> str:
    ks = curve.within_noise
    return str(curve.optimal_k) + (f" ({min(ks)}–{max(ks)})" if len(ks) > 1 else "")


def _print_curve(comparison: "Comparison", output: Output) -> None:
    most = len(comparison.candidates[0].curve.points)
    ks = [k for k in _CURVE_KS if k <= most]
    output.heading("By the size of the context (k): utility = gain − harm, thresholds applied")
    rows = table("candidate", "k", *(f"{k}>" for k in ks))
    for each in comparison.candidates:
        points = [each.curve.points[k - 1] for k in ks]
        cells_of = {
            "utility": [_utility(point, each.curve.optimal_k) for point in points],
            "gain": [_two(point.gain) for point in points],
            "harm": [_two(point.harm) for point in points],
        }
        for what, cells in cells_of.items():
            first, last = what == "utility", what == "harm"
            rows.add_row(
                _name(each.candidate.name) if first else "",
                Text(what, style="" if first else "dim"),
                *cells,
                end_section=last,
            )
    output.out.print(rows)


def _utility(point: "CurvePoint", optimal_k: int) -> Text:
    cell = _two(point.udcg_strict)
    return Text(cell.plain, style="bold green" if point.k == optimal_k else "")


def _two(interval: "Interval") -> Text:
    return Text(NO_DATA if interval.value is None else f"{interval.value:.2f}", style="dim")


def _print_differences(comparison: "Comparison", output: Output) -> None:
    output.heading(f"Differences from {comparison.baseline}, paired by query")
    rows = _difference_table("candidate")
    for name, by_metric in comparison.differences.items():
        _add_differences(rows, [_name(name)], [by_metric[metric] for metric in _DIFFERENCES])
    output.out.print(rows)


def _print_families(comparison: "Comparison", output: Output) -> None:
    output.heading("What each family of signals adds to P(relevant), in strict UDCG")
    rows = table("candidate", "family", "gained>", f"{_confidence()} interval>", "n>")
    seen = set()
    for each in comparison.candidates:
        if each.candidate.stages in seen:
            continue
        seen.add(each.candidate.stages)
        for position, one in enumerate(each.families):
            rows.add_row(
                _name(each.candidate.name) if position == 0 else "",
                one.family,
                _signed(one.gain.value),
                _signed_interval(one.gain) or NO_DATA,
                f"{one.gain.n:,}",
                end_section=position == len(each.families) - 1,
            )
    output.out.print(rows)
    output.out.print(
        "with all families less without this one, refitted and measured out of fold", style="dim"
    )


def _difference_table(*leading: str) -> Rows:
    return table(*leading, "metric", "difference>", f"{_confidence()} interval>", "n>", "outcome")


def _add_differences(
    rows: Rows, leading: Sequence[Text | str], differences: "Sequence[Difference]"
) -> None:
    """One row for each; the first one has the leading cells."""
    for position, each in enumerate(differences):
        rows.add_row(
            *(leading if position == 0 else [""] * len(leading)),
            each.metric,
            _signed(each.value),
            _signed_interval(each) or NO_DATA,
            f"{each.n:,}",
            _styled(each.outcome),
            end_section=position == len(differences) - 1,
        )


def difference_in_words(each: "Difference") -> Text:
    """A difference with its interval, in the colour of its outcome."""
    words = f"{_signed(each.value)} {_signed_interval(each)}".rstrip()
    return Text(words, style=_STYLES.get(each.outcome, ""))


def _signed(value: float | None) -> str:
    return NO_DATA if value is None else f"{value:+.3f}"


def _signed_interval(each: "Difference | Interval") -> str:
    if each.lower is None or each.upper is None:
        return ""
    return f"[{each.lower:+.3f}, {each.upper:+.3f}]"


def print_checks(checks: "Sequence[RegressionCheck]", output: Output) -> None:
    """The candidates against those of a saved comparison, if there is one."""
    if not checks:
        return
    output.heading("Against the saved comparison, paired by query")
    rows = _difference_table("candidate", "saved")
    for check in checks:
        if check.saved is None:
            rows.add_row(_name(check.candidate), "not saved", *[""] * 5, end_section=True)
            continue
        leading = [_name(check.candidate), _name(check.saved)]
        _add_differences(rows, leading, list(check.differences.values()))
    output.out.print(rows)


def _name(name: str) -> Text:
    return Text(one_line(name), style="bold")


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))
