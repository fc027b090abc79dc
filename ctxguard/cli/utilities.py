"""``ctxguard fit-utilities``: what passages are worth to a reader, from its marked answers."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli import _options
from ctxguard.cli._console import Output, interval, number, print_json, table

if TYPE_CHECKING:
    from calibration.reader.predictive_auc import MetricAucs
    from calibration.reader.utilities import ReaderFit


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("fit-utilities")(fit_utilities)


def fit_utilities(
    answers: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSONL with one answer per line: query_id, passage_ids in the order of the "
            "context, and correct (true or false).",
        ),
    ],
    data: Annotated[
        Path, typer.Option(metavar="FOLDER", help="BEIR folder with the labels of the queries.")
    ],
    split: Annotated[str, _options.split("test")] = "test",
    seed: _options.Seed = 0,
    as_json: _options.AsJson = False,
) -> None:
    """Fit the utilities of passages for one reader, from answers marked right or wrong.

    Shows which costs the answers identify, and how often each metric gives the right one of two
    answers the higher value.
    """
    from calibration.data.readers import read_beir
    from calibration.reader.answers import read_answers
    from calibration.reader.predictive_auc import predictive_aucs
    from calibration.reader.utilities import RULES
    from calibration.reader.utilities import fit_utilities as fit_reader

    marked, dataset = read_answers(answers), read_beir(data, split)
    fit = fit_reader(marked, dataset, seed=seed)
    metrics = predictive_aucs(marked, dataset, fit)
    if as_json:
        print_json(
            {
                "fit": asdict(fit),
                "utilities": asdict(fit.utilities()) if fit.identified_costs else None,
                "predictive_auc": {name: asdict(row) for name, row in metrics.items()},
                "rules": RULES,
                "notes": list(fit.notes),
            }
        )
    else:
        _print(fit, metrics, Output())


def _print(fit: "ReaderFit", metrics: "dict[str, MetricAucs]", output: Output) -> None:
    from calibration.reader import predictive_auc, utilities

    output.out.print(
        f"{fit.n_answers} answers to {fit.n_queries} questions; intervals of {fit.confidence:.0%}, "
        "questions resampled"
    )
    for note in fit.notes:
        output.note(note)
    terms = table("term", "value>", "interval>", "meaning, or why there is no value")
    for name, term in fit.terms.items():
        meaning = term.reason_if_none or utilities.DESCRIPTIONS[name]
        terms.add_row(name, number(term.value), interval(term), meaning)
    output.out.print(terms)
    if fit.identified_costs:
        worth = fit.utilities()
        values = ", ".join(f"{name} {getattr(worth, name):.3g}" for name in fit.identified_costs)
        output.out.print(f"utilities for this reader, with a relevant passage worth 1: {values}")
    else:
        output.out.print("no cost is identified: keep a preset for this reader")
    rows = table(
        *("metric", "pairs of answers", "AUC>", "interval>", "n>", "meaning, or why no AUC"),
        title="AUC: how often a metric is higher for the right one of two answers (0.5 is chance)",
    )
    for metric, aucs in metrics.items():
        meaning = predictive_auc.DESCRIPTIONS[metric]
        for pairs, auc in (("all", aucs.overall), ("same question", aucs.within)):
            rows.add_row(
                metric if pairs == "all" else "",
                pairs,
                number(auc.value),
                interval(auc),
                f"{auc.n:,}",
                auc.reason_if_none or (meaning if pairs == "all" else ""),
            )
    output.out.print(rows)
    output.out.print("A term has a value where:")
    output.items(utilities.RULES)
