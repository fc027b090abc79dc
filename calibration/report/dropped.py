"""Collects relevant passages that a policy dropped.

Pure, except that it looks up the passages shown as examples.
"""

from dataclasses import dataclass

import numpy as np

from calibration.calibrate_route import RouteOutcome
from calibration.data.dataset import Dataset
from calibration.replay import PassageOf
from ctxguard.core.render import one_line
from ctxguard.measure.interval import Interval, bootstrap_ratio

_SHOWN = 6
_SNIPPET = 240


@dataclass(frozen=True)
class Example:
    """One dropped passage.

    Attributes:
        snippet: The beginning of the text; None if the passage could not be looked up.
        label: The label, in words.
        retrieved_rank: Rank in the retriever's order, from 1.
        rank: Rank in the policy's order, from 1.
        probability: P(relevant), by a model that did not see the query's labels; None without.
    """

    query_id: str
    query: str
    passage_id: str
    title: str
    snippet: str | None
    label: str
    retrieved_rank: int
    rank: int
    probability: float | None


@dataclass(frozen=True)
class Dropped:
    """The relevant passages among those served today, and which of them were dropped.

    Attributes:
        total: How many there are.
        dropped: How many of them were dropped.
        share: dropped / total, with an interval clustered by query; its n counts queries.
        shown: Examples, at most one per query, the highest grades first, then by rank.
    """

    total: int
    dropped: int
    share: Interval
    shown: tuple[Example, ...]


def dropped_passages(outcome: RouteOutcome, dataset: Dataset, passage_of: PassageOf) -> Dropped:
    """Count the wrongly dropped passages, with the worst as examples.

    The contexts are of queries that had no part in the choice.
    """
    pools, order = outcome.route.measured, outcome.chosen.order
    counted = np.take_along_axis(pools.at_stake, order, axis=1)
    grades, probabilities = np.take_along_axis(pools.grades, order, axis=1), pools.probabilities
    lost = counted & ~outcome.chosen.kept
    texts = {query.query_id: query.text for query in dataset.queries}
    worst: dict[int, Example] = {}
    for _, column, row, rank in sorted(
        (-int(grades[row, rank]), int(order[row, rank]), row, rank)
        for row, rank in np.argwhere(lost).tolist()
    ):
        if row in worst:
            continue
        query_id, passage_id = pools.query_ids[row], pools.passage_ids[row][column]
        title, snippet = title_and_snippet(passage_id, passage_of, _SNIPPET)
        worst[row] = Example(
            query_id=one_line(query_id),
            query=one_line(texts[query_id]),
            passage_id=one_line(passage_id),
            title=title,
            snippet=snippet,
            label=f"grade {grades[row, rank]} of {pools.top_grade}",
            retrieved_rank=column + 1,
            rank=rank + 1,
            probability=None if probabilities is None else float(probabilities[row, column]),
        )
        if len(worst) == _SHOWN:
            break
    return Dropped(
        total=int(counted.sum()),
        dropped=int(lost.sum()),
        share=bootstrap_ratio(
            lost.sum(axis=1, dtype=np.float64),
            counted.sum(axis=1, dtype=np.float64),
            seed=outcome.route.settings.seed,
        ),
        shown=tuple(worst.values()),
    )


def title_and_snippet(passage_id: str, passage_of: PassageOf, most: int) -> tuple[str, str | None]:
    """Return a passage's title and the beginning of its text, at most this many characters.

    The title is empty and the text None where the passage cannot be looked up.
    """
    try:
        passage = passage_of(passage_id)
    except KeyError:
        return "", None
    line = one_line(passage.text)
    short = line if len(line) <= most else line[:most].rsplit(" ", 1)[0] + " …"
    return one_line(passage.title), short
