"""Samples that people have graded: their blocks, and what draws asked about them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.transactions import Transaction, reads, writes
from ctxguard.monitor.store.types import (
    MOST_UNCOVERED,
    NO_PICK,
    OPENED,
    GradedBlock,
    GradedRows,
)

_judged = schema.judged.c
_verdicts = schema.verdicts.c
_picked = schema.picked.c
_targeted = schema.label_queue.c.sample_id


@reads
def to_grade(db: Transaction, series: str) -> dict[int, int]:
    """Return the judged samples with labels that their block of the series lacks.

    Those that another series judged first count once they were judged again.

    Returns:
        By sample, the id of its newest label.
    """
    newest = sa.func.max(schema.labels.c.label_id)
    own, block = db.series_id(series), schema.judged.alias()
    again = sa.and_(_verdicts.sample_id == _judged.sample_id, _verdicts.series_id == own)
    of_sample = sa.and_(block.c.sample_id == _judged.sample_id, block.c.series_id == own)
    query = (
        sa.select(_judged.sample_id, newest.label("newest"))
        .join(schema.samples, schema.samples.c.sample_id == _judged.sample_id)
        .join(schema.labels, schema.labels.c.request_id == schema.samples.c.request_id)
        .outerjoin(schema.verdicts, again)
        .outerjoin(block, of_sample)
        .where(
            _judged.is_counted,
            sa.or_(_judged.series_id == own, _verdicts.sample_id.is_not(None)),
        )
        .group_by(_judged.sample_id, block.c.last_label_id)
        .having(newest > sa.func.coalesce(block.c.last_label_id, -1))
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
        _verdicts.sample_id == _judged.sample_id,
        _verdicts.series_id == _judged.series_id,
        _judged.is_counted,
    )
    query = sa.select(_judged.sample_id, _verdicts.verdicts).join(schema.verdicts, first)
    return db.by_sample(query, sample_ids)


@reads
def blocks(db: Transaction, sample_ids: Sequence[int]) -> dict[int, bytes]:
    """Return the block of each sample by its first series, without those that were deleted."""
    query = sa.select(_judged.sample_id, _judged.block).where(_judged.is_counted)
    return db.by_sample(query, sorted(set(sample_ids)))


@writes
def save_graded(db: Transaction, series: str, rows: Sequence[GradedBlock]) -> None:
    """Save the blocks of a series in place of its former ones of their samples."""
    own = db.series_id(series)
    first = sa.select(
        sa.literal(own), _judged.time_seconds, _judged.sample_id, _judged.label_order
    ).where(_judged.is_counted)
    for row in rows:
        values = asdict(row)
        is_own = sa.and_(_judged.series_id == own, _judged.sample_id == values.pop("sample_id"))
        updated = db.execute(sa.update(schema.judged).where(is_own).values(values))
        if not updated.rowcount:
            given = {**values, "is_counted": False}
            copied = first.where(_judged.sample_id == row.sample_id)
            literals = [sa.literal(value, _judged[name].type) for name, value in given.items()]
            columns = ["series_id", "time_seconds", "sample_id", "label_order", *given]
            db.execute(sa.insert(schema.judged).from_select(columns, copied.add_columns(*literals)))


@reads
def graded(db: Transaction, series: str) -> GradedRows:
    """Read all samples of a series that people have graded, by ascending id.

    Those whose text or sample was deleted since are among them.
    """
    own = db.series_id(series)
    rows = db.execute(
        sa.select(schema.judged, _targeted.is_not(None).label("is_targeted"))
        .outerjoin(schema.label_queue, _targeted == _judged.sample_id)
        .where(_judged.series_id == own, _judged.is_graded)
        .order_by(_judged.sample_id)
    ).all()
    firsts = [NO_PICK if row.first_pick is None else row.first_pick for row in rows]
    return GradedRows(
        sample_ids=np.array([row.sample_id for row in rows], np.int64),
        time_seconds=np.array([row.time_seconds for row in rows], np.float64),
        first_pick=np.array(firsts, np.int64),
        routes=tuple([row.route for row in rows]),
        blocks=tuple([row.block for row in rows]),
        is_targeted=np.array([row.is_targeted for row in rows], np.bool_),
        asked=_asked(db, own),
        disagreements=sum(row.disagreements for row in rows),
    )


def _asked(db: Transaction, own: int) -> dict[tuple[int, bool], int]:
    """Count the requests that draws opened, of those draws of which every tenants' part has grades.

    A draw from what another series judged counts as far as the samples were judged again. People
    grade the samples of a file in random order, so those that they got to stand for the
    others of the same file. But one tenant's graded file says nothing of the other tenants: until
    theirs has grades, no label of the draw counts.
    """
    is_graded = sa.func.coalesce(_judged.is_graded, sa.false())
    rows = db.execute(
        sa.select(
            _picked.pick_id,
            _picked.asked,
            is_graded.label("is_graded"),
            _targeted.is_not(None).label("is_targeted"),
            sa.func.count().label("n"),
        )
        .outerjoin(
            schema.judged,
            sa.and_(_judged.sample_id == _picked.sample_id, _judged.series_id == own),
        )
        .outerjoin(schema.label_queue, _targeted == _picked.sample_id)
        .where(_picked.kind.in_(OPENED))
        .group_by(_picked.pick_id, _picked.asked, sa.text("3"), sa.text("4"))
    ).all()
    graded_files = {(row.pick_id, row.asked) for row in rows if row.is_graded}
    whole, missed = Counter[int](), Counter[int]()
    asked = Counter[tuple[int, bool]]()
    for row in rows:
        whole[row.pick_id] += row.n
        missed[row.pick_id] += row.n * ((row.pick_id, row.asked) not in graded_files)
        asked[row.pick_id, bool(row.is_targeted)] += row.n
    return {key: n for key, n in asked.items() if missed[key[0]] <= MOST_UNCOVERED * whole[key[0]]}
