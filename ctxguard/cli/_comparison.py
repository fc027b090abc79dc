"""What a comparison, a list of runs and a diff look like: tables for people, JSON for programs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ctxguard.cli._console import NO_DATA, Output, number, one_line, print_json, table

if TYPE_CHECKING:
    from calibration.comparing.compare import Compared, Comparison, Curve, CurvePoint
    from calibration.comparing.differences import Difference
    from calibration.comparing.regression import Check
    from calibration.comparing.runstore import Run, RunStore
    from ctxguard.profile import Interval

_NAME_WIDTH = 18
_LISTED_WIDTH = 16
_FOUND = ("recall", "precision", "mrr", "ndcg", "udcg", "distractor_rate", "kept")
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
    found: "Comparison",
    runs: "Sequence[Run]",
    checks: "Sequence[Check]",
    about: Mapping[str, object],
    notes: Sequence[str],
) -> dict[str, object]:
    """A comparison as JSON."""
    return {
        **about,
        "measured_queries": len(found.query_ids),
        "baseline": found.baseline,
        "rule": list(found.rule.sentences),
        "candidates": [
            _candidate(each, run) for each, run in zip(found.candidates, runs, strict=True)
        ],
        "differences": {
            name: {metric: asdict(each) for metric, each in by_metric.items()}
            for name, by_metric in found.differences.items()
        },
        "against": {
            check.run.candidate: {
                "earlier": None if check.earlier is None else _run(check.earlier),
                "regressed": check.regressed,
                "differences": {name: asdict(each) for name, each in check.differences.items()},
            }
            for check in checks
        },
        "notes": list(notes),
    }


def _candidate(each: "Compared", run: "Run") -> dict[str, object]:
    curve = each.curve
    return {
        "name": each.candidate.name,
        **each.candidate.describe(),
        "score_kind": each.kind.value,
        "run_id": run.run_id,
        "profile": run.profile,
        "metrics": {name: found.model_dump() for name, found in each.metrics.items()},
        "harm_share": each.harm_share.model_dump(),
        "verdict": each.verdict,
        "latency_ms": each.latency_ms,
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
    }


def print_comparison(found: "Comparison", facts: Iterable[tuple[str, str]], output: Output) -> None:
    """The figures, the verdicts with their rule, the curve and the differences."""
    output.facts(facts)
    _print_found(found, output)
    _print_worth(found, output)
    _print_curve(found, output)
    if found.differences:
        _print_differences(found, output)


def _print_found(found: "Comparison", output: Output) -> None:
    output.heading("What each would serve")
    made = table("candidate", *(f"{_header(name)}>" for name in _FOUND), "ms>")
    for each in found.candidates:
        made.add_row(
            _name(each.candidate.name),
            *(number(each.metrics[name].value) for name in _FOUND),
            f"{each.latency_ms:.2f}",
        )
    output.out.print(made)
    output.out.print(
        "ms: median of a retrieval with its reranking; encoding the query is left out",
        style="dim",
    )


def _header(metric: str) -> str:
    """Long names on two lines."""
    return metric.replace("_", " ").replace(" rate", "\nrate")


def _print_worth(found: "Comparison", output: Output) -> None:
    output.heading("What it is worth to the reader, every irrelevant passage counted")
    made = table(
        *(
            "candidate",
            "udcg\nstrict>",
            f"{_confidence()}>",
            "harm>",
            "share of\nharm>",
            f"{_confidence()}>",
        ),
        *("best k>", "verdict"),
    )
    for each in found.candidates:
        strict, share = each.metrics["udcg_strict"], each.harm_share
        made.add_row(
            _name(each.candidate.name),
            number(strict.value),
            _short(strict),
            number(each.metrics["harm"].value),
            number(share.value),
            _short(share),
            _best_k(each.curve),
            _styled(each.verdict or NO_DATA),
        )
    output.out.print(made)
    output.out.print(
        "share of harm: mean harm / (mean gain + mean harm) in udcg_strict, where an irrelevant "
        f"passage is worth {found.utilities.irrelevant:g}",
        style="dim",
    )
    output.out.print("best k: of the highest udcg_strict (others within noise of it)", style="dim")
    for sentence in found.rule.sentences:
        output.out.print(sentence, style="dim")


def _confidence() -> str:
    from calibration.evaluate import CONFIDENCE

    return f"{CONFIDENCE:.0%}"


def _short(estimate: "Interval") -> Text:
    if estimate.lower is None or estimate.upper is None:
        return Text("")
    return Text(f"[{estimate.lower:.2f}, {estimate.upper:.2f}]", style="dim")


def _best_k(curve: "Curve") -> str:
    ks = curve.within_noise
    return str(curve.optimal_k) + (f" ({min(ks)}–{max(ks)})" if len(ks) > 1 else "")


def _print_curve(found: "Comparison", output: Output) -> None:
    most = len(found.candidates[0].curve.points)
    ks = [k for k in _CURVE_KS if k <= most]
    output.heading("By the size of the context (k): utility = gain − harm, thresholds in force")
    made = table("candidate", "", *(f"{k}>" for k in ks))
    for each in found.candidates:
        points = [each.curve.points[k - 1] for k in ks]
        rows = {
            "utility": [_utility(point, each.curve.optimal_k) for point in points],
            "gain": [_two(point.gain) for point in points],
            "harm": [_two(point.harm) for point in points],
        }
        for what, cells in rows.items():
            first, last = what == "utility", what == "harm"
            made.add_row(
                _name(each.candidate.name) if first else "",
                Text(what, style="" if first else "dim"),
                *cells,
                end_section=last,
            )
    output.out.print(made)


def _utility(point: "CurvePoint", optimal_k: int) -> Text:
    cell = _two(point.udcg_strict)
    return Text(cell.plain, style="bold green" if point.k == optimal_k else "")


def _two(found: "Interval") -> Text:
    return Text(NO_DATA if found.value is None else f"{found.value:.2f}", style="dim")


def _print_differences(found: "Comparison", output: Output) -> None:
    output.heading(f"Differences from {found.baseline}, paired by query")
    made = _difference_table("candidate")
    for name, by_metric in found.differences.items():
        _add_differences(made, [_name(name)], [by_metric[metric] for metric in _DIFFERENCES])
    output.out.print(made)


def _difference_table(*leading: str) -> Table:
    return table(*leading, "metric", "difference>", f"{_confidence()} interval>", "n>", "")


def _add_differences(
    made: Table, leading: Sequence[Text | str], differences: "Sequence[Difference]"
) -> None:
    """A row for each, with what they are the differences of on the first."""
    for row, each in enumerate(differences):
        made.add_row(
            *(leading if row == 0 else [""] * len(leading)),
            each.metric,
            NO_DATA if each.value is None else f"{each.value:+.3f}",
            NO_DATA
            if each.lower is None or each.upper is None
            else f"[{each.lower:+.3f}, {each.upper:+.3f}]",
            f"{each.n:,}",
            _styled(each.outcome),
            end_section=row == len(differences) - 1,
        )


def print_checks(checks: "Sequence[Check]", output: Output) -> None:
    """The new runs against earlier ones."""
    output.heading("Against earlier runs, paired by query")
    made = _difference_table("candidate", "earlier run")
    for check in checks:
        if check.earlier is None:
            made.add_row(_name(check.run.candidate), "no earlier run", *[""] * 5, end_section=True)
            continue
        earlier = Text(check.earlier.run_id).append(f"\nat {commit(check.earlier)}", style="dim")
        _add_differences(
            made, [_name(check.run.candidate), earlier], list(check.differences.values())
        )
    output.out.print(made)


def list_runs(store: "RunStore", output: Output, *, as_json: bool) -> None:
    """The runs of a store, the last first."""
    runs = store.runs()
    if as_json:
        print_json({"store": str(store.path), "runs": [_run(run) for run in runs]})
        return
    if not runs:
        output.out.print(f"{store.path} holds no runs yet")
        return
    made = table(
        *("run", "candidate", "profile", "commit", "data", "recall>", "udcg\nstrict>", "kept on")
    )
    for run in runs:
        made.add_row(
            Text(run.run_id, no_wrap=True),
            _name(run.candidate, _LISTED_WIDTH),
            run.profile[:8],
            commit(run),
            one_line(run.data),
            number(_mean(run, "recall")),
            number(_mean(run, "udcg_strict")),
            Text(run.kept_at[:10]).append("\nregression" if run.regressed else "", style="red"),
        )
    for column in (0, 2, 3, 7):
        made.columns[column].no_wrap = True
    output.out.print(made)
    if any(run.commit.dirty for run in runs):
        output.out.print("*: files differed from the commit", style="dim")


def diff_runs(older: "Run", newer: "Run", output: Output, *, seed: int, as_json: bool) -> None:
    """What the second run changed."""
    from calibration.comparing.runstore import diff_runs as diff

    found = diff(newer, older, seed=seed)
    if as_json:
        print_json(
            {
                "a": _run(older),
                "b": _run(newer),
                "differences": {metric: asdict(each) for metric, each in found.items()},
            }
        )
        return
    output.facts(
        [
            (name, f"{run.run_id}  {run.candidate}, commit {commit(run)}, kept {run.kept_at}")
            for name, run in (("A", older), ("B", newer))
        ]
        + [("data", f"{newer.data}, {len(newer.metrics.query_ids):,} queries")]
    )
    made = table("metric", "A>", "B>", "B − A>", f"{_confidence()} interval>", "n>", "")
    for metric, each in found.items():
        made.add_row(
            metric,
            number(_mean(older, metric)),
            number(_mean(newer, metric)),
            NO_DATA if each.value is None else f"{each.value:+.3f}",
            NO_DATA
            if each.lower is None or each.upper is None
            else f"[{each.lower:+.3f}, {each.upper:+.3f}]",
            f"{each.n:,}",
            _styled(each.outcome),
        )
    output.out.print(made)
    output.out.print(
        f"latency: {older.latency_ms:.2f} ms then, {newer.latency_ms:.2f} ms now (medians)",
        style="dim",
    )


def _run(run: "Run") -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "candidate": run.candidate,
        "profile": run.profile,
        "commit": run.commit.commit_id,
        "dirty": run.commit.dirty,
        "data": run.data,
        "dataset_digest": run.data_digest,
        "queries": len(run.metrics.query_ids),
        "settings": run.settings,
        "latency_ms": run.latency_ms,
        "regressed": run.regressed,
        "kept_at": run.kept_at,
        "metrics": {metric: _mean(run, metric) for metric in run.metrics.values},
    }


def _mean(run: "Run", metric: str) -> float | None:
    """The mean of a run's metric over the queries on which it is defined."""
    values = run.metrics.values.get(metric)
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanmean(values))


def commit(run: "Run") -> str:
    """A run's commit, shortened, with a star where files differed from it."""
    return run.commit.commit_id[:7] + "*" * run.commit.dirty


def _name(name: str, width: int = _NAME_WIDTH) -> Text:
    text = one_line(name)
    short = text if len(text) <= width else text[: width - 1] + "…"
    return Text(short, style="bold", no_wrap=True)


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))
