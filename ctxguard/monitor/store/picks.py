"""Which passages of judged samples people are asked to grade, and with what probability."""

from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.transactions import Transaction, chunks, reads, record, writes
from ctxguard.monitor.store.types import OPENED, PickedPassage, PickedSample, PickKind, ToPick

_judged = schema.judged.c
_picked = schema.picked.c
_picks = schema.label_picks.c
_HAS_TEXT = sa.exists().where(schema.payloads.c.sample_id == _judged.sample_id)


@reads
def to_pick(db: Transaction, series: str) -> ToPick:
    """Read which judged samples a draw can open, in their order."""
    opened = sa.exists().where(_picked.sample_id == _judged.sample_id, _picked.kind.in_(OPENED))
    query = (
        sa.select(_judged.sample_id)
        .where(_of_series(db, series), _HAS_TEXT, ~opened)
        .order_by(_judged.label_order, _judged.sample_id)
    )
    return ToPick(db.scalars(query), _last_pick(db))


def _of_series(db: Transaction, series: str) -> sa.ColumnElement[bool]:
    return sa.and_(_judged.series_id == db.series_id(series), _judged.is_counted)


def _last_pick(db: Transaction) -> int:
    last: int | None = db.execute(sa.select(sa.func.max(_picks.pick_id))).scalar()
    return last or 0


@writes
def save_pick(
    db: Transaction, series: str, passages: Sequence[PickedPassage], last_pick: int
) -> bool:
    """Remember a draw, and which judged samples it could have taken.

    Args:
        series: The series of the judged samples.
        passages: The drawn passages and opened requests.
        last_pick: From the ``ToPick`` that they were drawn from.

    Returns:
        False if another draw was saved meanwhile; nothing is written then.
    """
    db.lock_writers(schema.picked)
    if _last_pick(db) != last_pick:
        return False
    pick_id = db.execute(
        sa.insert(schema.label_picks)
        .values(series_id=db.series_id(series), time_seconds=db.store.clock())
        .returning(_picks.pick_id)
    ).scalar_one()
    db.execute(
        sa.update(schema.judged)
        .where(_of_series(db, series), _judged.first_pick.is_(None), _HAS_TEXT)
        .values(first_pick=pick_id)
    )
    rows = [asdict(one) | {"pick_id": pick_id, "kind": one.kind.value} for one in passages]
    db.execute(sa.insert(schema.picked), rows)
    for some in chunks(sorted({one.sample_id for one in passages})):
        # Grades that were there before count in this draw too.
        db.execute(
            sa.update(schema.judged).where(_judged.sample_id.in_(some)).values(last_label_id=-1)
        )
    return True


@writes
def ask_for_labels(db: Transaction, sample_ids: Sequence[int], tenant: str) -> None:
    """Remember that people are asked to grade picked samples, which is the first time.

    Args:
        tenant: The tenant whose file they are in; empty for a file of all tenants.
    """
    for some in chunks(sample_ids):
        db.execute(
            sa.update(schema.picked)
            .where(_picked.sample_id.in_(some), _picked.asked.is_(None))
            .values(asked=tenant)
        )


@reads
def picked(
    db: Transaction, series: str | None, sample_ids: Sequence[int] | None = None
) -> dict[int, list[PickedPassage]]:
    """Read what people are asked about by sample, in the order of draws.

    Args:
        series: From whose judged samples it was drawn; None for any.
        sample_ids: None for all.
    """
    query = sa.select(schema.picked).order_by(_picked.pick_id, _picked.sample_id, _picked.position)
    if series is not None:
        query = query.join(schema.label_picks, _picks.pick_id == _picked.pick_id).where(
            _picks.series_id == db.series_id(series)
        )
    rows = (
        db.execute(query)
        if sample_ids is None
        else db.rows_with(query, _picked.sample_id, sorted(set(sample_ids)))
    )
    found: dict[int, list[PickedPassage]] = {}
    for row in rows:
        passage = record(PickedPassage, row, kind=PickKind(row.kind))
        found.setdefault(row.sample_id, []).append(passage)
    return found


@reads
def picked_samples(db: Transaction, series: str) -> list[PickedSample]:
    """Read the picked samples whose text is kept, by sample id."""
    labels = schema.labels.c
    own = (
        sa.select(_picked.sample_id, _picked.question)
        .join(schema.label_picks, _picks.pick_id == _picked.pick_id)
        .where(_picks.series_id == db.series_id(series))
        .distinct()
        .subquery()
    )
    query = (
        sa.select(
            schema.samples.c.sample_id,
            schema.samples.c.request_id,
            own.c.question,
            sa.func.count(labels.label_id).label("n_labels"),
        )
        .join(own, own.c.sample_id == schema.samples.c.sample_id)
        .join(schema.payloads, schema.payloads.c.sample_id == schema.samples.c.sample_id)
        .outerjoin(schema.labels, labels.request_id == schema.samples.c.request_id)
        .group_by(schema.samples.c.sample_id, schema.samples.c.request_id, own.c.question)
        .order_by(schema.samples.c.sample_id)
    )
    return [record(PickedSample, row) for row in db.execute(query)]
