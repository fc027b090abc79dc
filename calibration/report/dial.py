"""Collects the report's dial: contexts from leanest to richest, with some questions that follow.

Pure, except that it looks up the passages shown. At each stop, every question's context comes from
a policy chosen without that question.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np

from calibration.calibrate_route import RouteOutcome
from calibration.choice import PolicySums
from calibration.data.dataset import Dataset
from calibration.evaluate import contexts, of_contexts
from calibration.pools import LabelledPools
from calibration.replay import PassageOf
from calibration.report.before_after import BeforeAfter
from calibration.report.dropped import title_and_snippet
from calibration.report.summary import Summary
from ctxguard.core.render import one_line
from ctxguard.measure.rows import BoolArray, IntArray

STOPS = 16
"""The number of context sizes between the named ones; some may coincide."""

_MOST = 3.0
"""The largest size on the dial, as a multiple of the passages served today."""

_NEAR = 0.1
"""A policy matches a size if it keeps that many passages to within this share."""

_APART = 0.03
"""The smallest share of passages by which two stops differ."""

_SNIPPET = 110


@dataclass(frozen=True)
class DialStop:
    """One position of the dial; means over the measured queries.

    Attributes:
        names: Those of ``today``, ``leaner``, ``balanced``, ``richer`` and ``chosen`` that apply;
            usually empty.
        kept: Passages per question.
        recall: None where no query has a relevant passage.
        misleading: Misleading passages per question; None where none is labelled so.
        tokens: Per question; None where the texts are not known.
        contexts: For each question shown, its passages by their places, best first.
    """

    names: tuple[str, ...]
    kept: float
    recall: float | None
    misleading: float | None
    tokens: float | None
    contexts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DialQuestion:
    """A question shown.

    Attributes:
        which: Why it is shown: ``gains``, ``typical`` or ``loses``.
        passages: For each its title (its id where it has none, or another passage shown has the
            same), the beginning of its text, and ``relevant``, ``misleading`` or ``other``.
    """

    which: str
    text: str
    passages: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Dial:
    """All positions, by passages kept; ``today`` and ``start`` (the choice) are places in them."""

    stops: tuple[DialStop, ...]
    today: int
    start: int
    questions: tuple[DialQuestion, ...]


_Contexts = tuple[IntArray, BoolArray]


def dial(
    outcome: RouteOutcome, summary: Summary, dataset: Dataset, passage_of: PassageOf
) -> Dial | None:
    """Gather the dial of a route; None if only today's contexts are available.

    The summary names the route's options by what they cost.
    """
    options = {each.name: (each.order, each.kept) for each in outcome.options}
    found: list[tuple[tuple[str, ...], dict[str, float | None], _Contexts]] = []
    for sizes, name in summary.by_size.items():
        if name in options:  # the first k of equal tokens is a yardstick
            found.append((tuple(sizes.split(", ")), _means(options[name], outcome), options[name]))
    for own in _between(outcome):
        means = _means(own, outcome)
        kept = means["kept"] or 0.0
        if all(abs((each["kept"] or 0.0) - kept) >= _APART * kept for _, each, _ in found):
            found.append(((), means, own))
    if len(found) < 2:
        return None
    found.sort(key=lambda each: each[1]["kept"] or 0.0)
    pools, shown = outcome.route.measured, BeforeAfter.of(outcome).shown()
    texts = {query.query_id: query.text for query in dataset.queries}
    # The passages of each question shown at each stop, and all of them in order of appearance.
    columns = {
        row: [order[row][kept[row]].tolist() for _, _, (order, kept) in found]
        for row in shown.values()
    }
    places = {
        row: list(dict.fromkeys(column for own in stops for column in own))
        for row, stops in columns.items()
    }
    stops = tuple(
        DialStop(
            names=names,
            kept=means["kept"] or 0.0,
            recall=means["recall"],
            misleading=means["misleading"],
            tokens=means["tokens"],
            contexts=tuple(tuple(map(places[row].index, own[at])) for row, own in columns.items()),
        )
        for at, (names, means, _) in enumerate(found)
    )
    named = {name: at for at, stop in enumerate(stops) for name in stop.names}
    return Dial(
        stops=stops,
        today=named["today"],
        start=named[summary.chosen.split(", ", maxsplit=1)[0]],
        questions=tuple(
            DialQuestion(
                which=which,
                text=one_line(texts[pools.query_ids[row]]),
                passages=_passages(pools, row, places[row], passage_of),
            )
            for which, row in shown.items()
        ),
    )


def _between(outcome: RouteOutcome) -> list[_Contexts]:
    """Choose contexts of sizes between the leanest and the richest policy, each out of fold."""
    route = outcome.route
    choosing, serving_k = route.choosing, route.settings.serving_k
    kept = choosing.sums.mean_kept
    low, high = max(float(kept.min()), 0.5), min(float(kept.max()), _MOST * serving_k)
    found = []
    for size in np.geomspace(low, max(low, high), STOPS).tolist():
        rule = partial(_of_size, size=size)
        index = choosing.chosen(rule)
        if route.held_out and index is not None:
            found.append(contexts(route.measured, choosing.grid.policy(index)))
        else:
            found.append(choosing.contexts(choosing.by_others(rule), serving_k))
    return found


def _of_size(sums: PolicySums, size: float) -> int:
    """Find the policy with the highest UDCG among those that keep about this many passages."""
    away = np.abs(sums.mean_kept - size)
    near = away <= max(_NEAR * size, float(away.min()))
    return int(np.where(near, sums.mean_gain, -np.inf).argmax())


def _means(own: _Contexts, outcome: RouteOutcome) -> dict[str, float | None]:
    values = of_contexts(outcome.route.measured, *own)
    means: dict[str, float | None] = {}
    for name in ("kept", "recall", "misleading", "tokens"):
        known = values[name][~np.isnan(values[name])]
        means[name] = float(known.mean()) if known.size else None
    return means


def _passages(
    pools: LabelledPools, row: int, columns: list[int], passage_of: PassageOf
) -> tuple[tuple[str, str, str], ...]:
    ids = [pools.passage_ids[row][column] for column in columns]
    known = [title_and_snippet(passage_id, passage_of, _SNIPPET) for passage_id in ids]
    n_titled = Counter(title or one_line(one) for one, (title, _) in zip(ids, known, strict=True))
    passages = []
    for column, passage_id, (title, snippet) in zip(columns, ids, known, strict=True):
        name = title if n_titled[title] == 1 else one_line(passage_id)
        mark = "misleading" if pools.misleading[row, column] else "other"
        if pools.relevant[row, column]:
            mark = "relevant"
        passages.append((name, snippet or "", mark))
    return tuple(passages)
