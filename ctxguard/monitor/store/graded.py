"""Samples that people have graded, with the probability with which each was picked for that.

What people say of a sample is kept as the rows that estimates need, which hold no text and outlive
the sample.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.judgments import JUDGED, judged_rows
from ctxguard.monitor.store.transactions import Transaction, chunks, reads, writes
from ctxguard.monitor.store.types import (
    MOST_UNCOVERED,
    NO_PICK,
    GradedRow,
    GradedRows,
    JudgedRows,
    PickKind,
)

_judged = schema.judged.c
_graded = schema.graded.c
_verdicts = schema.verdicts.c
_picked = schema.picked.c
_targeted = schema.label_queue.c.sample_id


@reads
def to_grade(db: Transaction, series: str) -> dict[int, int]:
    """Return the judged samples with labels that their graded row lacks, or without such a row.

    Those that another series judged first count once they were judged again.

    Returns:
        By sample, the id of its newest label.
    """
    newest = sa.func.max(schema.labels.c.label_id)
    own = db.series_id(series)
    again = sa.and_(_verdicts.sample_id == _judged.sample_id, _verdicts.series_id == own)
    of_sample = sa.and_(_graded.sample_id == _judged.sample_id, _graded.series_id == own)
    query = (
        sa.select(_judged.sample_id, newest.label("newest"))
        .join(schema.samples, schema.samples.c.sample_id == _judged.sample_id)
        .join(schema.labels, schema.labels.c.request_id == schema.samples.c.request_id)
        .outerjoin(schema.verdicts, again)
        .outerjoin(schema.graded, of_sample)
        .where(sa.or_(_judged.series_id == own, _verdicts.sample_id.is_not(None)))
        .group_by(_judged.sample_id, _graded.last_label_id)
        .having(newest > sa.func.coalesce(_graded.last_label_id, -1))
    )
    return {row.sample_id: row.newest for row in db.execute(query)}


@reads
def labelled(db: Transaction, series: str) -> dict[int, bool]:
    """Return the samples that draws asked about, people labelled, and whose text is kept.

    Returns:
        By sample, whether the series has judged it, first or again.
    """
    own = db.series_id(series)
    again = sa.and_(_verdicts.sample_id == _picked.sample_id, _verdicts.series_id == own)
    samples, labels = schema.samples.c, schema.labels.c
    rows = db.execute(
        sa.select(_picked.sample_id, _verdicts.sample_id.is_not(None).label("is_judged"))
        .join(schema.samples, samples.sample_id == _picked.sample_id)
        .join(schema.payloads, schema.payloads.c.sample_id == _picked.sample_id)
        .outerjoin(schema.verdicts, again)
        .where(sa.exists().where(labels.request_id == samples.request_id))
        .distinct()
    )
    return {row.sample_id: bool(row.is_judged) for row in rows}


@reads
def first_verdicts(db: Transaction, sample_ids: Sequence[int]) -> dict[int, str]:
    """Return the verdicts of the series that judged each sample first, as ``verdicts``."""
    first = sa.and_(
        _verdicts.sample_id == _judged.sample_id, _verdicts.series_id == _judged.series_id
    )
    query = sa.select(_judged.sample_id, _verdicts.verdicts).join(schema.verdicts, first)
    return db.by_sample(query, sample_ids)


@reads
def judged_samples(db: Transaction, sample_ids: Sequence[int]) -> JudgedRows:
    """Return the judged rows of some samples, by ascending id, without those that were deleted."""
    query = sa.select(*JUDGED).order_by(_judged.sample_id)
    wanted = sorted(set(sample_ids))
    return judged_rows(list(db.rows_with(query, _judged.sample_id, wanted)))


@writes
def save_graded(db: Transaction, series: str, rows: Sequence[GradedRow]) -> None:
    """Save a series' graded rows in place of its former ones of their samples."""
    own_series = db.series_id(series)
    for some in chunks(rows):
        ids = [row.sample_id for row in some]
        former = sa.and_(_graded.series_id == own_series, _graded.sample_id.in_(ids))
        db.execute(sa.delete(schema.graded).where(former))
        db.execute(
            sa.insert(schema.graded), [asdict(row) | {"series_id": own_series} for row in some]
        )


@reads
def graded(db: Transaction, series: str) -> GradedRows:
    """Read all samples of a series that people have graded, by ascending id.

    Those whose text or judged row was deleted since are among them.
    """
    own_series = db.series_id(series)
    rows = db.execute(
        sa.select(
            schema.graded,
            sa.func.coalesce(_judged.first_pick, NO_PICK).label("first"),
            _targeted.is_not(None).label("is_targeted"),
        )
        .outerjoin(schema.judged, _judged.sample_id == _graded.sample_id)
        .outerjoin(schema.label_queue, _targeted == _graded.sample_id)
        .where(_graded.series_id == own_series, sa.func.length(_graded.judge) > 0)
        .order_by(_graded.sample_id)
    ).all()
    return GradedRows(
        sample_ids=np.array([row.sample_id for row in rows], np.int64),
        time_seconds=np.array([row.time_seconds for row in rows], np.float64),
        first_pick=np.array([row.first for row in rows], np.int64),
        routes=tuple([row.route for row in rows]),
        passages=tuple([row.passages for row in rows]),
        judge=b"".join([row.judge for row in rows]),
        human=tuple([row.human for row in rows]),
        is_targeted=np.array([row.is_targeted for row in rows], np.bool_),
        asked=_asked(db, own_series),
        disagreements=sum(row.disagreements for row in rows),
    )


def _asked(db: Transaction, own_series: int) -> dict[tuple[int, PickKind, bool], int]:
    """Count what draws asked about, of those draws of which every tenants' part has grades.

    A draw from what another series judged counts as far as the samples were judged again. People
    grade the samples of a file in random order, so those that they got to stand for the
    others of the same file. But one tenant's graded file says nothing of the other tenants: until
    theirs has grades, no label of the draw counts.
    """
    is_graded = sa.func.length(sa.func.coalesce(_graded.passages, b"")) > 0
    kinds = (_picked.pick_id, _picked.kind, _picked.asked)
    rows = db.execute(
        sa.select(
            *kinds,
            is_graded.label("is_graded"),
            _targeted.is_not(None).label("is_targeted"),
            sa.func.count().label("n"),
        )
        .outerjoin(
            schema.graded,
            sa.and_(_graded.sample_id == _picked.sample_id, _graded.series_id == own_series),
        )
        .outerjoin(schema.label_queue, _targeted == _picked.sample_id)
        .group_by(*kinds, sa.text("4"), sa.text("5"))
    ).all()
    graded_files = {(row.pick_id, row.asked) for row in rows if row.is_graded}
    whole, missed = Counter[int](), Counter[int]()
    asked = Counter[tuple[int, PickKind, bool]]()
    for row in rows:
        whole[row.pick_id] += row.n
        missed[row.pick_id] += row.n * ((row.pick_id, row.asked) not in graded_files)
        asked[row.pick_id, PickKind(row.kind), bool(row.is_targeted)] += row.n
    return {key: n for key, n in asked.items() if missed[key[0]] <= MOST_UNCOVERED * whole[key[0]]}
