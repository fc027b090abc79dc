"""Random picks of judged samples for people to grade, and the probability of each sample.

Every sample has a number u in [0, 1), a hash of its request id (``label_order``), and in each pick
a weight w. A pick takes the samples of lowest u/w among those that were not picked yet. Its
threshold T is the lowest u/w that it left: given the others' numbers, a sample is taken if its own
is below T·w, which has the probability min(1, T·w) (priority sampling: Duffield, Lund and Thorup,
"Priority sampling for estimation of arbitrary subset sums", Journal of the ACM, 2007). A sample
that takes part in several picks is picked if any of them takes it, and all compare the same number:
its probability is the highest of theirs. So picks of several days, weighted or not, are one sample.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.judgments import driver_rows, series_id
from ctxguard.monitor.store.part import StorePart, chunks, reads, writes
from ctxguard.monitor.store.types import LabelDepth, PickedSample, Weigh

_judged = schema.judged.c
_picked = schema.picked.c
_HAS_TEXT = sa.exists().where(schema.payloads.c.sample_id == _judged.sample_id)


class Picks(StorePart):
    """Which samples people are asked to grade."""

    @writes
    def pick_for_labels(
        self,
        connection: sa.Connection,
        series: str,
        n: int,
        *,
        depth: LabelDepth = LabelDepth.SERVED,
        weigh: Weigh | None = None,
    ) -> list[int]:
        """Pick judged samples at random, of those not picked to this depth yet, and remember it.

        What is picked to ``LabelDepth.POOL`` is picked to ``LabelDepth.SERVED`` as well. The
        probabilities of samples that were picked before rise to what this pick gives them.
        Samples that an alarm targeted are picked like all others, or the random labels would lack
        them.

        Args:
            series: The series of the judged samples.
            n: How many at most.
            depth: How much of each sample people will grade.
            weigh: Weights of the samples, by their summaries; None for equal ones.

        Returns:
            Sample ids, lowest u/w first; only of samples whose payload is kept.
        """
        self._lock_writers(connection, schema.picked)
        own_series = series_id(connection, series)
        population = _population(connection, own_series, depth, weigh)
        chosen, threshold = _lowest(population, n)
        if not chosen:
            return []
        pick_id = connection.execute(
            sa.insert(schema.label_picks)
            .values(
                series_id=own_series,
                time_seconds=self._clock(),
                depth=depth.value,
                is_weighted=weigh is not None,
                threshold=threshold,
            )
            .returning(schema.label_picks.c.pick_id)
        ).scalar_one()
        connection.execute(
            sa.update(schema.judged)
            .where(_judged.series_id == own_series, _judged.first_pick.is_(None), _HAS_TEXT)
            .values(first_pick=pick_id)
        )
        probability_of = population.probabilities(threshold)
        for each in LabelDepth if depth is LabelDepth.POOL else (depth,):
            before = _probabilities(connection, own_series, each)
            _raise(connection, each, before, probability_of)
            new = [
                {
                    "sample_id": sample_id,
                    "depth": each.value,
                    "pick_id": pick_id,
                    "probability": probability_of[sample_id],
                }
                for sample_id in chosen
                if sample_id not in before
            ]
            if new:
                connection.execute(sa.insert(schema.picked), new)
        return chosen

    @writes
    def ask_for_labels(
        self, connection: sa.Connection, sample_ids: Sequence[int], tenant: str
    ) -> None:
        """Remember that people are asked to grade picked samples, which is the first time.

        Args:
            sample_ids: The samples.
            tenant: The tenant whose file they are in; empty for a file of all tenants.
        """
        for some in chunks(sample_ids):
            connection.execute(
                sa.update(schema.picked)
                .where(_picked.sample_id.in_(some), _picked.asked.is_(None))
                .values(asked=tenant)
            )

    @reads
    def next_for_labels(
        self,
        connection: sa.Connection,
        series: str,
        n: int,
        *,
        depth: LabelDepth = LabelDepth.SERVED,
        weigh: Weigh | None = None,
    ) -> list[int]:
        """What ``pick_for_labels`` would return now, without picking."""
        population = _population(connection, series_id(connection, series), depth, weigh)
        return _lowest(population, n)[0]

    @reads
    def picked(self, connection: sa.Connection, series: str, depth: LabelDepth) -> dict[int, float]:
        """The probability of each sample that was picked to this depth, in the order of picks."""
        return _probabilities(connection, series_id(connection, series), depth)

    @reads
    def picked_samples(
        self, connection: sa.Connection, series: str, depth: LabelDepth
    ) -> list[PickedSample]:
        """What was picked to this depth and has its text still, by sample id."""
        picks, labels = schema.label_picks.c, schema.labels.c
        query = (
            sa.select(
                _picked.sample_id,
                schema.samples.c.request_id,
                sa.func.count(labels.label_id).label("n_labels"),
            )
            .join(schema.label_picks, picks.pick_id == _picked.pick_id)
            .join(schema.samples, schema.samples.c.sample_id == _picked.sample_id)
            .join(schema.payloads, schema.payloads.c.sample_id == _picked.sample_id)
            .outerjoin(schema.labels, labels.request_id == schema.samples.c.request_id)
            .where(picks.series_id == series_id(connection, series), _picked.depth == depth.value)
            .group_by(_picked.sample_id, schema.samples.c.request_id)
            .order_by(_picked.sample_id)
        )
        return [
            PickedSample(row.sample_id, row.request_id, row.n_labels)
            for row in connection.execute(query)
        ]


class _Population(NamedTuple):
    """The judged samples of a series whose payload is kept; shape (n,) each."""

    sample_ids: NDArray[np.int64]
    label_orders: NDArray[np.float64]
    weights: NDArray[np.float64]
    is_picked: NDArray[np.bool_]

    def probabilities(self, threshold: float) -> dict[int, float]:
        """The probability of each sample in a pick with this threshold."""
        chances = np.minimum(threshold * self.weights, 1.0)
        return dict(zip(self.sample_ids.tolist(), chances.tolist(), strict=True))


def _population(
    connection: sa.Connection, own_series: int, depth: LabelDepth, weigh: Weigh | None
) -> _Population:
    columns = [_judged.sample_id, _judged.label_order]
    query = sa.select(*columns, *([_judged.summary] if weigh else [])).where(
        _judged.series_id == own_series, _HAS_TEXT
    )
    rows = driver_rows(connection, query)
    sample_ids = np.array([row[0] for row in rows], np.int64)
    return _Population(
        sample_ids,
        np.array([row[1] for row in rows], np.float64),
        weigh(b"".join([row[2] for row in rows])) if weigh else np.ones(len(rows)),
        np.isin(sample_ids, list(_probabilities(connection, own_series, depth))),
    )


def _lowest(population: _Population, n: int) -> tuple[list[int], float]:
    """The n samples of lowest u/w that are not picked yet, and the threshold.

    The threshold is infinite where these are all that there are.
    """
    is_open = ~population.is_picked
    ids = population.sample_ids[is_open]
    turns = population.label_orders[is_open] / population.weights[is_open]
    in_order = np.lexsort((ids, turns))
    threshold = float(turns[in_order[n]]) if n < len(in_order) else math.inf
    return ids[in_order[:n]].tolist(), threshold


def _probabilities(
    connection: sa.Connection, own_series: int, depth: LabelDepth
) -> dict[int, float]:
    picks = schema.label_picks.c
    query = (
        sa.select(_picked.sample_id, _picked.probability)
        .join(schema.label_picks, picks.pick_id == _picked.pick_id)
        .where(picks.series_id == own_series, _picked.depth == depth.value)
        .order_by(_picked.pick_id, _picked.sample_id)
    )
    return {row.sample_id: row.probability for row in connection.execute(query)}


def _raise(
    connection: sa.Connection,
    depth: LabelDepth,
    before: dict[int, float],
    probability_of: dict[int, float],
) -> None:
    """Raise the probabilities of those picked before, where they take part in this pick."""
    raised = [
        {"raised_id": sample_id, "raised": probability_of[sample_id]}
        for sample_id, probability in before.items()
        if probability_of.get(sample_id, 0.0) > probability
    ]
    if raised:
        connection.execute(
            sa.update(schema.picked)
            .where(_picked.sample_id == sa.bindparam("raised_id"), _picked.depth == depth.value)
            .values(probability=sa.bindparam("raised")),
            raised,
        )
