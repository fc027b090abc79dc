"""``ctxguard fit utilities``: what passages are worth to a reader, from its marked answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, as_json, check_writable, interval, number, print_json
from ctxguard.cli._inputs import read_labelled
from ctxguard.cli._tables import TextTable

if TYPE_CHECKING:
    from calibration.reader.utilities import ReaderEstimate, ReaderFit

_SEED = 0


class FitUtilities(SettingsModel):
    """Settings of ``ctxguard fit utilities``."""

    answers: Path = setting(
        "JSONL with one answer per line: query_id, passage_ids in the order of the context, "
        "correct (true or false), and optionally reader.",
        "FILE",
    )
    data: _options.LabelledQueries
    reader: str | None = optional(
        "Reader whose answers are used.", "NAME", default="the only one in the file"
    )
    out: Path | None = optional(
        "Write the utilities as JSON, for the key utilities of `ctxguard calibrate`.", "FILE"
    )
    as_json: _options.AsJson = False


def fit_utilities(settings: FitUtilities) -> None:
    """Fit the utilities of passages for one reader, from answers marked right or wrong.

    Compares the answers of one question with each other, so each question needs answers to several
    contexts. Shows which costs the answers identify, and how often each metric gives the right one
    of two answers the higher value.
    """
    from calibration.reader.answers import of_reader, read_answers
    from calibration.reader.predictive_auc import predictive_aucs
    from calibration.reader.utilities import fit_utilities as fit_reader
    from calibration.reader.utilities import utilities_document

    out = settings.out
    check_writable(out, "--out")
    marked = of_reader(read_answers(settings.answers), settings.reader)
    labelled = read_labelled(settings.data, "test")
    fit = fit_reader(marked, labelled.dataset)
    metrics = predictive_aucs(marked, labelled.dataset, fit, seed=_SEED)
    document = {**utilities_document(fit, marked[0].reader), "predictive_auc": metrics}
    if out is not None:
        with atomic_write(out) as stream:
            stream.write((as_json(document, indent=2) + "\n").encode())
    if settings.as_json:
        print_json({**document, "notes": [*labelled.notes, *fit.notes]})
        return
    output = Output()
    output.notes(labelled.notes)
    _print(fit, metrics, output)
    if out is not None:
        output.facts([("wrote", str(out))])


def _print(fit: "ReaderFit", metrics: "Mapping[str, ReaderEstimate]", output: Output) -> None:
    from calibration.reader import predictive_auc, utilities
    from calibration.reader.answers import COSTS

    output.out.print(
        f"{fit.n_answers:,} answers to {fit.n_queries:,} questions; {fit.n_compared:,} of these "
        "have answers to different contexts, which are compared with each other. Intervals of "
        f"{fit.confidence:.0%}, clustered by question"
    )
    output.notes(fit.notes)
    terms = TextTable("term", "value>", "interval>", "meaning, or why there is no value")
    together = "one cost for kinds that are not told apart"
    for name, term in {**fit.terms, **fit.costs}.items():
        own = fit.terms.get(name, term)
        meaning = own.reason_if_none or utilities.DESCRIPTIONS.get(name, together)
        terms.add_row(name, number(own.value), interval(own), meaning)
    output.out.print(terms)
    output.notes(fit.pooled)
    if fit.identified_costs:
        worth = fit.utilities()
        values = ", ".join(f"{name} {getattr(worth, name):.3g}" for name in COSTS)
        output.out.print(f"utilities for this reader, with a relevant passage worth 1: {values}")
        scaled = [name for name in COSTS if name not in fit.identified_costs]
        if scaled:
            output.note(
                f"{', '.join(scaled)}: not identified, so set in the preset's ratio to the nearest "
                "kind that is"
            )
    else:
        output.out.print("no cost is identified: keep a preset for this reader")
    rows = TextTable(
        *("metric", "AUC>", "interval>", "n>", "meaning, or why no AUC"),
        title="AUC: how often a metric is higher for the right one of two answers to one question "
        "(0.5 is chance)",
    )
    for metric, auc in metrics.items():
        meaning = auc.reason_if_none or predictive_auc.DESCRIPTIONS[metric]
        rows.add_row(metric, number(auc.value), interval(auc), f"{auc.n:,}", meaning)
    output.out.print(rows)
    output.out.print("A term has a value where:")
    output.facts([("-", rule) for rule in utilities.RULES])
