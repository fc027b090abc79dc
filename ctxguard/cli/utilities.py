"""``ctxguard fit-utilities``: what passages are worth to a reader, from answers marked right or
wrong."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from calibration.reader.concordance import MetricConcordance
    from calibration.reader.utilities import ReaderFit


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("fit-utilities")(fit_utilities)


def fit_utilities(
    answers: Annotated[
        Path, typer.Option(help="JSONL: query_id, passage_ids in context order, correct.")
    ],
    data: Annotated[Path, typer.Option(help="BEIR folder that labels the questions.")],
    split: Annotated[str, typer.Option(help="A name in the folder's qrels/.")] = "test",
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap and the folds.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit what passages are worth to one reader, from answers marked right or wrong.

    Says which costs the answers identify and which they cannot, and how well each metric tells
    right answers from wrong ones.
    """
    from calibration.labelling.datasets import read_beir
    from calibration.reader.answers import read_answers
    from calibration.reader.concordance import concordance
    from calibration.reader.utilities import fit_utilities as fit_reader

    given, dataset = read_answers(answers), read_beir(data, split)
    fit = fit_reader(given, dataset, seed=seed)
    metrics = concordance(given, dataset, fit)
    if as_json:
        typer.echo(json.dumps(_document(fit, metrics), indent=2, ensure_ascii=False))
    else:
        _print(fit, metrics, Console())


def _document(fit: "ReaderFit", metrics: "dict[str, MetricConcordance]") -> dict[str, object]:
    from calibration.reader.utilities import RULES

    return {
        "fit": asdict(fit),
        "utilities": asdict(fit.utilities()) if fit.identified_costs else None,
        "concordance": {name: asdict(row) for name, row in metrics.items()},
        "rules": RULES,
    }


def _print(fit: "ReaderFit", metrics: "dict[str, MetricConcordance]", console: Console) -> None:
    from calibration.reader import concordance, utilities

    console.print(
        f"{fit.n_answers} answers to {fit.n_queries} questions; intervals of {fit.confidence:.0%}, "
        "questions resampled"
    )
    for note in fit.notes:
        console.print(f"note: {note}")
    terms = Table("term", "value", "interval", "what it is, or why there is no value")
    for name, term in fit.terms.items():
        why = term.reason_if_none or utilities.DESCRIPTIONS[name]
        terms.add_row(name, _value(term), _interval(term), why)
    console.print(terms)
    if fit.identified_costs:
        worth = fit.utilities()
        found = ", ".join(f"{name} {getattr(worth, name):.3g}" for name in fit.identified_costs)
        console.print(f"utilities for this reader, with a relevant passage worth 1: {found}")
    else:
        console.print("no cost is identified: keep a preset for this reader")
    table = Table(
        "metric",
        "concordance",
        "interval",
        "answers",
        "within questions",
        "interval",
        "questions",
        "what it is, or why there is no value",
        title="How often the right one of two answers has the better context (0.5 is chance)",
    )
    for metric, row in metrics.items():
        why = row.overall.reason_if_none or concordance.DESCRIPTIONS[metric]
        cells = [[_value(c), _interval(c), str(c.n)] for c in (row.overall, row.within)]
        table.add_row(metric, *cells[0], *cells[1], why)
    console.print(table)
    console.print("A term has a value where:")
    for rule in utilities.RULES:
        console.print(f"  - {rule}")


class _Estimate(Protocol):
    @property
    def value(self) -> float | None: ...
    @property
    def lower(self) -> float | None: ...
    @property
    def upper(self) -> float | None: ...


def _value(estimate: _Estimate) -> str:
    return "none" if estimate.value is None else f"{estimate.value:.2f}"


def _interval(estimate: _Estimate) -> str:
    if estimate.lower is None or estimate.upper is None:
        return "none"
    return f"[{estimate.lower:.2f}, {estimate.upper:.2f}]"
