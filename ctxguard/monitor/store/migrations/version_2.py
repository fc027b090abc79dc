"""Version 2: labels with probabilities, graded samples, shared budgets, measured pending samples.

Rows of estimates hold one more number, the share of an audit's passages that were judged.
"""

import json
import struct
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_FORMER_ROW_BYTES = 136
_RECIPROCAL_RANK_AT = 16
_AUDIT_PROBABILITY_AT = 112
_SESSION_AT = 128
_AUDITED_SHARE = 0.05
"""Of every audit before version 2."""
_TOLD_LESS_WEIGHT = 2.0
"""The weight in a weighted pick of a sample whose first served passage is not relevant."""

_samples = sa.table("ctxguard_samples", *map(sa.column, ("sample_id", "time_seconds")))
_series = sa.table("ctxguard_series", *map(sa.column, ("series_id", "summary_bytes")))
_judged = sa.table(
    "ctxguard_judged",
    *map(sa.column, ("series_id", "sample_id", "label_order")),
    sa.column("summary", sa.LargeBinary),
)
_workers = sa.table(
    "ctxguard_workers",
    *map(sa.column, ("worker_id", "sampled", "stored", "lost", "pending")),
    sa.column("closed", sa.Boolean),
)
_label_queue = sa.table("ctxguard_label_queue", *map(sa.column, ("sample_id", "reason")))
_state = sa.table("ctxguard_state", *map(sa.column, ("key", "value")))


def upgrade(operations: "Operations") -> None:
    """Add the tables and columns of version 2, and fill them from what version 1 kept."""
    connection = operations.get_bind()
    _count_pending(operations, connection)
    _lengthen_rows(connection)
    _add_graded(operations)
    _move_picks(operations, connection)
    _move_budgets(operations, connection)


def _count_pending(operations: "Operations", connection: sa.Connection) -> None:
    for column in (
        sa.Column("pending", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("batch", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("heard_at", sa.Double),
    ):
        operations.add_column(_workers.name, column)
    for row in connection.execute(sa.select(_workers).where(sa.not_(_workers.c.closed))).all():
        pending = row.sampled - row.stored - sum(json.loads(row.lost).values())
        connection.execute(
            sa.update(_workers)
            .where(_workers.c.worker_id == row.worker_id)
            .values(pending=max(pending, 0))
        )


def _lengthen_rows(connection: sa.Connection) -> None:
    """Insert the audited share before the session of each row."""
    former = _series.c.summary_bytes == _FORMER_ROW_BYTES
    lengthened = sa.select(_series.c.series_id).where(former)

    def part(start: int, size: int) -> sa.ColumnElement[Any]:
        return sa.func.substr(_judged.c.summary, start + 1, size, type_=sa.LargeBinary)

    nothing = sa.literal(struct.pack("<d", 0.0), sa.LargeBinary)
    share = sa.case(
        (part(_AUDIT_PROBABILITY_AT, 8) == nothing, nothing),
        else_=sa.literal(struct.pack("<d", _AUDITED_SHARE), sa.LargeBinary),
    )
    joined = part(0, _SESSION_AT).op("||")(share).op("||")(part(_SESSION_AT, 8))
    connection.execute(
        sa.update(_judged)
        .where(_judged.c.series_id.in_(lengthened))
        .values(summary=sa.cast(joined, sa.LargeBinary))
    )
    connection.execute(sa.update(_series).where(former).values(summary_bytes=_FORMER_ROW_BYTES + 8))


def _add_graded(operations: "Operations") -> None:
    operations.create_table(
        "ctxguard_graded",
        sa.Column("sample_id", _Id, primary_key=True, autoincrement=False),
        sa.Column("series_id", _Id, nullable=False, index=True),
        sa.Column("time_seconds", sa.Double, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("depth", sa.Text, nullable=False),
        sa.Column("human", sa.LargeBinary, nullable=False),
        sa.Column("judge", sa.LargeBinary, nullable=False),
        sa.Column("disagreements", sa.Integer, nullable=False),
        sa.Column("last_label_id", sa.BigInteger, nullable=False),
    )


def _move_picks(operations: "Operations", connection: sa.Connection) -> None:
    """Picks for labelling get a threshold each, and their samples a probability.

    Version 1 kept which samples were picked, not from how many: the threshold of a pick is taken
    to be the highest number in it, which is right up to one factor for all of its samples.
    """
    picks = operations.create_table(
        "ctxguard_label_picks",
        sa.Column("pick_id", _Id, primary_key=True),
        sa.Column("series_id", _Id, nullable=False),
        sa.Column("time_seconds", sa.Double, nullable=False),
        sa.Column("depth", sa.Text, nullable=False),
        sa.Column("is_weighted", sa.Boolean, nullable=False),
        sa.Column("threshold", sa.Double, nullable=False),
        sa.Column("since_seconds", sa.Double, nullable=False),
        sa.Column("until_seconds", sa.Double, nullable=False),
    )
    picked = operations.create_table(
        "ctxguard_picked",
        sa.Column("sample_id", _Id, primary_key=True, autoincrement=False),
        sa.Column("depth", sa.Text, primary_key=True),
        sa.Column("pick_id", _Id, nullable=False),
        sa.Column("probability", sa.Double, nullable=False),
    )
    is_pick = _label_queue.c.reason.in_(("random", "weighted"))
    rows = connection.execute(
        sa.select(_label_queue.c.reason, _samples, _judged)
        .join_from(_label_queue, _samples, _samples.c.sample_id == _label_queue.c.sample_id)
        .join(_judged, _judged.c.sample_id == _samples.c.sample_id)
        .where(is_pick)
    ).all()
    best: dict[int, tuple[float, int]] = {}
    for series_id, is_weighted in sorted(
        {(row.series_id, row.reason == "weighted") for row in rows}
    ):
        of_series = [row for row in rows if row.series_id == series_id]
        weights = {row.sample_id: _weight(row.summary) if is_weighted else 1.0 for row in of_series}
        own = [row for row in of_series if (row.reason == "weighted") is is_weighted]
        threshold = max(row.label_order / weights[row.sample_id] for row in own)
        since, until = (end(row.time_seconds for row in own) for end in (min, max))
        values = {
            "series_id": series_id,
            "time_seconds": until,
            "depth": "pool",
            "is_weighted": is_weighted,
            "threshold": threshold,
            "since_seconds": since,
            "until_seconds": until,
        }
        new_id = sa.insert(picks).values(values).returning(picks.c.pick_id)
        pick_id: int = connection.execute(new_id).scalar_one()
        # Both picks of a series could have taken each of its samples.
        for sample_id, weight in weights.items():
            one = (min(1.0, threshold * weight), pick_id)
            best[sample_id] = max(one, best.get(sample_id, one))
    if best:
        connection.execute(
            sa.insert(picked),
            [
                {
                    "sample_id": sample_id,
                    "depth": "pool",
                    "pick_id": pick_id,
                    "probability": probability,
                }
                for sample_id, (probability, pick_id) in sorted(best.items())
            ],
        )
    connection.execute(sa.delete(_label_queue).where(is_pick))


def _weight(summary: bytes) -> float:
    """A sample's weight in a weighted pick, by its judged row."""
    return (
        1.0
        if struct.unpack_from("<d", summary, _RECIPROCAL_RANK_AT)[0] == 1.0
        else _TOLD_LESS_WEIGHT
    )


def _move_budgets(operations: "Operations", connection: sa.Connection) -> None:
    """What each judge has spent in the current hour and day."""
    budgets = operations.create_table(
        "ctxguard_budgets",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("calls", sa.Double, nullable=False),
        sa.Column("cost", sa.Double, nullable=False),
    )
    key = _state.c.key.startswith("budget ")
    for name, value in connection.execute(sa.select(_state).where(key)).all():
        try:
            rows = [
                {
                    "name": name.removeprefix("budget "),
                    "period": f"{kind} {int(number)}",
                    "calls": float(calls),
                    "cost": float(cost),
                }
                for kind, (number, calls, cost) in json.loads(value).items()
            ]
        except (AttributeError, OverflowError, TypeError, ValueError):
            continue  # as before: what cannot be read was not spent
        if rows:
            connection.execute(sa.insert(budgets), rows)
    connection.execute(sa.delete(_state).where(key))
