"""Samples that people have graded, with the probability with which each was picked for that.

What people say of a sample is kept as the rows that estimates need, which hold no text and outlive
the sample.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.judgments import series_id
from ctxguard.monitor.store.part import StorePart, chunks, reads, rows_with, writes
from ctxguard.monitor.store.types import (
    MOST_UNCOVERED,
    NO_PICK,
    GradedRow,
    GradedRows,
    JudgedRows,
    LabelDepth,
)

_judged = schema.judged.c
_graded = schema.graded.c
_picked = schema.picked.c


class Graded(StorePart):
    """What monitors do with the labels of people."""

    @reads
    def to_grade(self, connection: sa.Connection, series: str) -> dict[int, int]:
        """The judged samples with labels that their graded row lacks, or without such a row.

        Returns:
            By sample, the id of its newest label.
        """
        newest = sa.func.max(schema.labels.c.label_id)
        query = (
            sa.select(_judged.sample_id, newest.label("newest"))
            .join(schema.samples, schema.samples.c.sample_id == _judged.sample_id)
            .join(schema.labels, schema.labels.c.request_id == schema.samples.c.request_id)
            .outerjoin(schema.graded, _graded.sample_id == _judged.sample_id)
            .where(_judged.series_id == series_id(connection, series))
            .group_by(_judged.sample_id, _graded.last_label_id)
            .having(newest > sa.func.coalesce(_graded.last_label_id, -1))
        )
        return {row.sample_id: row.newest for row in connection.execute(query)}

    @reads
    def judged_samples(
        self, connection: sa.Connection, series: str, sample_ids: Sequence[int]
    ) -> JudgedRows:
        """The judged rows of some samples, by ascending id, without those that were deleted."""
        query = (
            sa.select(
                _judged.sample_id,
                _judged.time_seconds,
                sa.func.coalesce(_judged.first_pick, NO_PICK).label("first_pick"),
                _judged.summary,
            )
            .where(_judged.series_id == series_id(connection, series))
            .order_by(_judged.sample_id)
        )
        wanted = sorted(set(sample_ids))
        rows = list(rows_with(connection, query, _judged.sample_id, wanted))
        return JudgedRows(
            np.array([row.sample_id for row in rows], np.int64),
            np.array([row.time_seconds for row in rows], np.float64),
            np.array([row.first_pick for row in rows], np.int64),
            b"".join([row.summary for row in rows]),
        )

    @writes
    def save_graded(
        self, connection: sa.Connection, series: str, rows: Sequence[GradedRow]
    ) -> None:
        """Save graded rows in place of the former ones of their samples."""
        own_series = series_id(connection, series)
        for some in chunks(rows):
            ids = [row.sample_id for row in some]
            connection.execute(sa.delete(schema.graded).where(_graded.sample_id.in_(ids)))
            connection.execute(
                sa.insert(schema.graded),
                [
                    {
                        "sample_id": row.sample_id,
                        "series_id": own_series,
                        "time_seconds": row.time_seconds,
                        "route": row.route,
                        "depth": "" if row.depth is None else row.depth.value,
                        "human": row.human,
                        "judge": row.judge,
                        "disagreements": row.disagreements,
                        "last_label_id": row.last_label_id,
                    }
                    for row in some
                ],
            )

    @reads
    def graded(self, connection: sa.Connection, series: str) -> GradedRows:
        """All samples of a series that people have graded, by ascending id.

        Those whose text or judged row was deleted since are among them.
        """
        own_series = series_id(connection, series)
        rows = connection.execute(
            sa.select(schema.graded)
            .where(_graded.series_id == own_series, _graded.depth != "")
            .order_by(_graded.sample_id)
        ).all()
        served, pool, last_pick = _probabilities(connection, own_series)
        nothing = float("nan")
        return GradedRows(
            sample_ids=np.array([row.sample_id for row in rows], np.int64),
            time_seconds=np.array([row.time_seconds for row in rows], np.float64),
            routes=tuple([row.route for row in rows]),
            is_pool=np.array([row.depth == LabelDepth.POOL.value for row in rows], np.bool_),
            human=b"".join([row.human for row in rows]),
            judge=b"".join([row.judge for row in rows]),
            served_probability=np.array([served.get(row.sample_id, nothing) for row in rows]),
            pool_probability=np.array([pool.get(row.sample_id, nothing) for row in rows]),
            last_pick=last_pick,
            disagreements=sum(row.disagreements for row in rows),
        )


def _probabilities(
    connection: sa.Connection, own_series: int
) -> tuple[dict[int, float], dict[int, float], dict[LabelDepth, int]]:
    """By sample, the probability with which it was picked and graded to each depth; and the picks.

    Part of a pick's samples are graded: a chance of its own, the same for all of them (weighting
    classes: Särndal, Swensson and Wretman, "Model Assisted Survey Sampling", 1992, §15.6), since
    people grade them in random order. Samples that an alarm has asked for as well are graded more
    often, and those of one tenant's file apart from the others: they are classes by themselves.
    If nothing of another tenants' part is graded, the pick stands for nothing: no label of it
    counts until some is.
    """
    targeted = schema.label_queue.c.sample_id
    rows = connection.execute(
        sa.select(
            schema.picked,
            _graded.depth.label("graded_to"),
            targeted.is_not(None).label("is_targeted"),
        )
        .join(schema.label_picks, schema.label_picks.c.pick_id == _picked.pick_id)
        .outerjoin(schema.graded, _graded.sample_id == _picked.sample_id)
        .outerjoin(schema.label_queue, targeted == _picked.sample_id)
        .where(schema.label_picks.c.series_id == own_series)
    ).all()
    to_pool = [row for row in rows if row.depth == LabelDepth.POOL.value]
    # What is graded to the pool is graded as far as what was served, too.
    to_served = {row.sample_id: row for row in sorted(rows, key=lambda row: row.probability)}
    served, last_served = _with_response(
        list(to_served.values()), {each.value for each in LabelDepth}
    )
    pool, last_pool = _with_response(to_pool, {LabelDepth.POOL.value})
    last_pick = {LabelDepth.SERVED: last_served, LabelDepth.POOL: last_pool}
    return served, pool, last_pick


def _with_response(
    rows: Sequence[sa.Row[tuple[object, ...]]], enough: set[str]
) -> tuple[dict[int, float], int]:
    """Probabilities of the graded samples of picks that stand for all, and the last such pick."""
    usable = [row for row in rows if row.graded_to in enough]
    graded_files = {(row.pick_id, row.asked) for row in usable}
    per_pick = Counter(row.pick_id for row in rows)
    missed = Counter(row.pick_id for row in rows if (row.pick_id, row.asked) not in graded_files)
    whole = {pick for pick, n in per_pick.items() if missed[pick] <= MOST_UNCOVERED * n}
    picked = Counter((row.pick_id, row.asked, row.is_targeted) for row in rows)
    graded = Counter((row.pick_id, row.asked, row.is_targeted) for row in usable)
    return {
        row.sample_id: row.probability
        * graded[row.pick_id, row.asked, row.is_targeted]
        / picked[row.pick_id, row.asked, row.is_targeted]
        for row in usable
        if row.pick_id in whole
    }, max(whole, default=0)
