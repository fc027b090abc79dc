"""``ctxguard fit``: the utilities of a reader from answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, as_json, interval, number
from ctxguard.cli._inputs import read_labelled

if TYPE_CHECKING:
    from calibration.reader.utilities import ReaderEstimate, ReaderFit

_SEED = 0


class UtilitiesCommand(SettingsModel):
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
        "Write the utilities as JSON, for the key utilities of `ctxguard calibrate`.",
        "FILE",
        writes=True,
    )
    as_json: _options.AsJson = False

    def __call__(self, output: Output) -> None:
        """Answers to one question are compared with each other, so each question needs answers to
        several contexts. The output says which costs the answers identify, and how often each
        metric gives the right one of two answers the higher value.
        """
        from calibration.reader.answers import of_reader, read_answers
        from calibration.reader.predictive_auc import predictive_aucs
        from calibration.reader.utilities import fit_utilities, utilities_document

        marked = of_reader(read_answers(self.answers), self.reader)
        labelled = read_labelled(self.data, "test")
        fit = fit_utilities(marked, labelled.dataset)
        metrics = predictive_aucs(marked, labelled.dataset, fit, seed=_SEED)
        document = {**utilities_document(fit, marked[0].reader), "predictive_auc": metrics}
        if self.out is not None:
            with atomic_write(self.out) as stream:
                stream.write((as_json(document, indent=2) + "\n").encode())
        notes = [*labelled.notes, *fit.notes]
        output.result(document, lambda: _print(fit, metrics, output, self.out), notes)


def _print(
    fit: "ReaderFit", metrics: "Mapping[str, ReaderEstimate]", output: Output, out: Path | None
) -> None:
    from calibration.reader import predictive_auc, utilities
    from calibration.reader.answers import COSTS

    output.out.print(
        f"{fit.n_answers:,} answers to {fit.n_queries:,} questions; {fit.n_compared:,} of these "
        "have answers to different contexts, which are compared with each other. Intervals of "
        f"{fit.confidence:.0%}, clustered by question"
    )
    rows = []
    together = "one cost for kinds that are not told apart"
    for name, term in {**fit.terms, **fit.costs}.items():
        own = fit.terms.get(name, term)
        meaning = own.reason_if_none or utilities.DESCRIPTIONS.get(name, together)
        rows.append((name, number(term.value), interval(term), meaning))
    output.table(("term", "value>", "interval>", "meaning, or why there is no value"), rows)
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
    output.table(
        ("metric", "AUC>", "interval>", "n>", "meaning, or why no AUC"),
        (
            (
                metric,
                number(auc.value),
                interval(auc),
                f"{auc.n:,}",
                auc.reason_if_none or predictive_auc.DESCRIPTIONS[metric],
            )
            for metric, auc in metrics.items()
        ),
        "AUC: how often a metric is higher for the right one of two answers to one question "
        "(0.5 is chance)",
    )
    output.out.print("A term has a value where:")
    output.facts(*[("-", rule) for rule in utilities.RULES])
    output.facts(("wrote", None if out is None else str(out)))
