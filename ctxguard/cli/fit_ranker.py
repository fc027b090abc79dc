"""``ctxguard fit ranker``: fit the pooled ranker to labelled queries, with held-out evidence."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.settings import optional
from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable, interval, number
from ctxguard.cli._inputs import read_labelled
from ctxguard.cli._pools import replayed
from ctxguard.cli._results import signed_interval
from ctxguard.cli._system import open_index
from ctxguard.cli._tables import TextTable
from ctxguard.core.fusion import Fusion
from ctxguard.core.interval import Interval
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.server.settings import IndexSystem

if TYPE_CHECKING:
    from calibration.results import Difference

_ORDERS = {
    "reciprocal_rank": "reciprocal ranks",
    "shipped": "shipped ranker",
    "fitted": "fitted ranker",
}
_BEFORE = ("reciprocal_rank", "shipped")
"""Orders that the others are compared with."""
_SEED = 0


class FitRanker(IndexSystem):
    """Settings of ``ctxguard fit ranker``."""

    data: _options.LabelledQueries
    out: Path | None = optional(
        "Write the fitted ranker here, for ranker in --system.", "FILE", default="not written"
    )
    as_json: _options.AsJson = False


def fit_ranker(settings: FitRanker) -> None:
    """Fit the ranker that orders an index's candidates to labelled queries.

    The fit starts from the ranker that ctxguard comes with and moves from it as far as the labels
    say. Prints nDCG@10 of reciprocal ranks, of the shipped ranker and of fitted ones, each measured
    on queries that it was not fitted on, and says which is better.
    """
    from calibration.evaluate import bootstrap_interval
    from calibration.pool_labels import label
    from calibration.ranker import fit, levels
    from calibration.results import paired_differences
    from ctxguard.retrieval.signals.ranker import Ranker

    out = settings.out
    check_writable(out, "--out")
    output = Output(as_json=settings.as_json)
    labelled = read_labelled(settings.data, "train")
    with output.doing("opening the index"):
        retriever = open_index(settings)
    if not retriever.has_signals:
        raise ConfigurationError(
            f"the index {settings.index} has no signals, which the ranker reads: build it again "
            "with `ctxguard index`"
        )
    retriever = retriever.with_fusion(Fusion("ranker")).on_route(Route.HYBRID)
    labelled, counts = labelled.against(retriever)
    dataset = labelled.dataset
    pools = replayed(retriever, dataset, output, depth=DEFAULT_DEPTH)
    with output.doing("fitting"):
        labels = label(pools, dataset)
        ranker, ndcg = fit(Ranker.default(), dataset.name, pools, labels)
        means = {
            order: bootstrap_interval(values, labels.weights, seed=_SEED)
            for order, values in ndcg.items()
        }
        differences = {
            order: {
                other: paired_differences(
                    {"ndcg": (ndcg[order], ndcg[other])}, labels.weights, seed=_SEED
                )["ndcg"]
                for other in _BEFORE[:position]
            }
            for position, order in enumerate(_ORDERS)
        }
    if out is not None:
        ranker.save(out)
    verdict = _verdict(differences["fitted"]["shipped"], out)
    notes = [*labelled.notes, *(f"left out: {line}" for line in pools.skipped)]
    document = {
        "out": out,
        "ranker": ranker.digest(),
        "levels": levels(pools),
        **counts,
        "ndcg_at_10": means,
        "differences": differences,
        "verdict": verdict,
        "data": dataset.name,
        "split": labelled.split,
        "dataset_digest": dataset.digest(),
        "depth": DEFAULT_DEPTH,
        "seed": _SEED,
    }

    def show() -> None:
        measured = "fitted rankers on queries that they were not fitted to"
        queries = labelled.described(counts)
        output.facts([("queries", queries), ("signals", levels(pools)[0]), ("measured", measured)])
        output.out.print(_shown(means, differences))
        output.facts([("verdict", verdict)])

    output.result(document, show, notes)


def _shown(
    means: "Mapping[str, Interval]", differences: "Mapping[str, Mapping[str, Difference]]"
) -> TextTable:
    others = [f"less {_ORDERS[other]}>" for other in _BEFORE]
    rows = TextTable("order", "nDCG@10>", "95% interval>", "n>", *others)
    for order, each in means.items():
        rows.add_row(
            _ORDERS[order],
            number(each.value),
            interval(each),
            f"{each.n:,}",
            *[
                signed_interval(differences[order][other]) if other in differences[order] else ""
                for other in _BEFORE
            ],
        )
    return rows


def _verdict(gain: "Difference", out: Path | None) -> str:
    """Says which ranker to serve, and how."""
    if gain.outcome == "better":
        use = (
            f'name it in a file --system: ranker = "{out}"'
            if out is not None
            else "write it with --out FILE"
        )
        return f"the fitted ranker is better than the shipped one: {use}"
    if gain.outcome == "worse":
        return "the fitted ranker is worse than the shipped one: keep the shipped one"
    written = "" if out is None else f"; {out} need not be used"
    return (
        "these labels do not show that the fitted ranker is better than the shipped one: keep the "
        f"shipped one, or label more queries{written}"
    )
