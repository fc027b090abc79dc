"""The report's dial: contexts from the leanest to the richest, with some questions that follow.

Pure, except that it looks up the passages shown. At each stop, every question's context comes from
a policy chosen without that question.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.calibrate_route import RouteOutcome
from calibration.data.dataset import Dataset
from calibration.evaluate import contexts, of_contexts
from calibration.objectives import PolicySums
from calibration.pools import IntArray
from calibration.report.before_after import BeforeAfter
from calibration.report.dropped import PassageOf, one_line, passage_or_none, snippet
from calibration.report.summary import Summary
from ctxguard.core.types import FloatArray

STOPS = 16
"""Sizes of context between the named ones; some may coincide."""

_MOST = 3.0
"""Multiples of the passages served today up to which the dial goes."""

_NEAR = 0.1
"""A policy matches a size if it keeps that many passages, give or take this share."""

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
class DialPassage:
    """A passage of a question shown.

    Attributes:
        title: Its title; its id where it has none, or another passage shown has the same.
        mark: ``relevant``, ``misleading`` or ``other``.
    """

    title: str
    snippet: str
    mark: str


@dataclass(frozen=True)
class DialQuestion:
    """A question shown; ``which`` says why: ``gains``, ``typical`` or ``loses``."""

    which: str
    text: str
    passages: tuple[DialPassage, ...]


@dataclass(frozen=True)
class Dial:
    """All positions, ascending by passages kept.

    Attributes:
        today: The place of today's contexts.
        start: The place of the chosen contexts.
    """

    stops: tuple[DialStop, ...]
    today: int
    start: int
    questions: tuple[DialQuestion, ...]


_Contexts = tuple[IntArray, NDArray[np.bool_]]


def dial(
    outcome: RouteOutcome, summary: Summary, dataset: Dataset, passage_of: PassageOf | None
) -> Dial | None:
    """Gather what the dial shows.

    Args:
        outcome: One route's choice.
        summary: Names its options by what they cost.
        dataset: The queries, with their texts.
        passage_of: Returns a passage by its id, or raises KeyError; None shows ids only.

    Returns:
        None where nothing but today's contexts is at hand.
    """
    rows = BeforeAfter.of(outcome).shown()
    options = {each.name: each for each in outcome.options}
    found: list[tuple[DialStop, _Contexts]] = []
    for sizes, name in summary.by_size.items():
        if name in options:  # the first k of equal tokens is a yardstick
            own = options[name].order, options[name].kept
            found.append((_stop(tuple(sizes.split(", ")), own, outcome), own))
    for own in _between(outcome):
        stop = _stop((), own, outcome)
        if all(abs(each.kept - stop.kept) >= _APART * stop.kept for each, _ in found):
            found.append((stop, own))
    if len(found) < 2:
        return None
    found.sort(key=lambda each: each[0].kept)
    ranked = {
        row: [order[row][kept[row]].tolist() for _, (order, kept) in found] for row in rows.values()
    }
    places = {
        row: list(dict.fromkeys(column for own in contexts_of for column in own))
        for row, contexts_of in ranked.items()
    }
    stops = tuple(
        replace(
            stop,
            contexts=tuple(
                tuple(places[row].index(column) for column in contexts_of[at])
                for row, contexts_of in ranked.items()
            ),
        )
        for at, (stop, _) in enumerate(found)
    )

    def place(name: str) -> int:
        return next(at for at, stop in enumerate(stops) if name in stop.names)

    return Dial(
        stops=stops,
        today=place("today"),
        start=place(summary.chosen.split(", ", maxsplit=1)[0]),
        questions=tuple(
            _question(
                which,
                row,
                places[row],
                outcome=outcome,
                dataset=dataset,
                passage_of=passage_of,
            )
            for which, row in rows.items()
        ),
    )


def _between(outcome: RouteOutcome) -> list[_Contexts]:
    """Contexts of sizes between the leanest and the richest policy, each chosen out of fold."""
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
            continue
        found.append(choosing.contexts(rule, serving_k))
    return found


def _of_size(sums: PolicySums, size: float) -> int:
    """Find the policy of highest UDCG among those that keep about so many passages."""
    away = np.abs(sums.mean_kept - size)
    near = away <= max(_NEAR * size, float(away.min()))
    return int(np.where(near, sums.mean_gain, -np.inf).argmax())


def _stop(names: tuple[str, ...], own: _Contexts, outcome: RouteOutcome) -> DialStop:
    values = of_contexts(outcome.route.measured, *own)

    def mean(column: FloatArray) -> float | None:
        known = ~np.isnan(column)
        return float(column[known].mean()) if known.any() else None

    return DialStop(
        names=names,
        kept=mean(values["kept"]) or 0.0,
        recall=mean(values["recall"]),
        misleading=mean(values["misleading"]),
        tokens=mean(values["tokens"]),
        contexts=(),
    )


def _question(
    which: str,
    row: int,
    places: list[int],
    *,
    outcome: RouteOutcome,
    dataset: Dataset,
    passage_of: PassageOf | None,
) -> DialQuestion:
    pools = outcome.route.measured
    query_id, ids = pools.query_ids[row], pools.passage_ids[row]
    text = next(query.text for query in dataset.queries if query.query_id == query_id)

    def shown(column: int) -> DialPassage:
        passage_id = ids[column]
        passage = passage_or_none(passage_id, passage_of)
        mark = "misleading" if pools.misleading[row, column] else "other"
        known: dict[str, Any] = {"title": "", "snippet": ""}
        if passage is not None:
            known = {
                "title": one_line(passage.title),
                "snippet": snippet(passage.text, _SNIPPET),
            }
        return DialPassage(
            title=known["title"] or one_line(passage_id),
            snippet=known["snippet"],
            mark="relevant" if pools.relevant[row, column] else mark,
        )

    found = tuple(map(shown, places))
    titles = Counter(each.title for each in found)
    named = (
        each if titles[each.title] == 1 else replace(each, title=one_line(ids[column]))
        for each, column in zip(found, places, strict=True)
    )
    return DialQuestion(which, one_line(text), tuple(named))
