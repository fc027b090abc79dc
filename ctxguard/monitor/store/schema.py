"""Defines the tables, for SQLite and PostgreSQL alike.

Large columns and texts are in tables apart from those that are scanned: an estimate reads
``judged`` alone, and a change of state rewrites no payload. There are no foreign keys: only
``samples.clean`` deletes, and it deletes what belongs together. Pure: it connects to nothing.
"""

from typing import Any

import sqlalchemy as sa

from ctxguard.monitor.sampling.sampler import LostReason

SCHEMA_VERSION = 14

metadata = sa.MetaData()

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def storable(text: str) -> str:
    r"""Escape characters that UTF-8 or PostgreSQL cannot hold, so that every database accepts the
    text.

    >>> storable("a\x00b\ud800")
    'a\\x00b\\ud800'
    """
    if "\0" in text:
        text = text.replace("\0", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class StorableText(sa.TypeDecorator[str]):
    """Text from outside, which is made ``storable`` before it is stored or compared."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        """Escape a string; None stays None."""
        return None if value is None else storable(value)


def _columns(kind: Any, *names: str) -> list[sa.Column[Any]]:
    """Make columns of one type that cannot be null."""
    return [sa.Column(name, kind, nullable=False) for name in names]


def _key(*names: str, kind: Any = _Id) -> list[sa.Column[Any]]:
    """Make the columns of a primary key whose values are given."""
    return [sa.Column(name, kind, primary_key=True, autoincrement=False) for name in names]


schema_version = sa.Table(
    "ctxguard_schema", metadata, sa.Column("version", sa.Integer, primary_key=True)
)

samples = sa.Table(
    "ctxguard_samples",
    metadata,
    sa.Column("sample_id", _Id, primary_key=True),
    sa.Column("request_id", StorableText, nullable=False),
    *_columns(sa.Double, "time_seconds", "probability"),
    sa.Column("label_order", sa.Double, nullable=False),
    sa.Column("payload_bytes", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # JSON of replies without a grade; deleted with the text.
    sa.Column("rejected", sa.Text),
    # The state comes first: this index counts samples by state, and finds the oldest waiting one.
    sa.Index("ctxguard_samples_queue", "state", "sample_id"),
    sa.Index("ctxguard_samples_request", "request_id"),
    sa.Index("ctxguard_samples_time", "time_seconds"),
    # A deleted sample's id never comes back, so that its labels cannot become another's.
    sqlite_autoincrement=True,
)

payloads = sa.Table(
    "ctxguard_payloads",
    metadata,
    *_key("sample_id"),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)

series = sa.Table(
    "ctxguard_series",
    metadata,
    sa.Column("series_id", _Id, primary_key=True),
    sa.Column("name", StorableText, nullable=False, unique=True),
)

# A block for each series that judged a sample, first or again; one with grades outlives the sample.
judged = sa.Table(
    "ctxguard_judged",
    metadata,
    *_key("series_id"),
    sa.Column("time_seconds", sa.Double, primary_key=True),
    *_key("sample_id"),
    sa.Column("first_pick", sa.BigInteger),
    sa.Column("block", sa.LargeBinary, nullable=False),
    # Whether the series judged it first and the sample is kept: estimates are about these.
    sa.Column("is_counted", sa.Boolean, nullable=False, server_default=sa.false()),
    # As in the block, for queries; the profile is null where alarms compare nothing.
    sa.Column("is_graded", sa.Boolean, nullable=False),
    sa.Column("last_label", sa.BigInteger, nullable=False),
    sa.Column("profile", sa.BigInteger),
    sa.Index("ctxguard_judged_sample", "sample_id"),
    sa.Index(
        "ctxguard_judged_losses",
        *("series_id", "profile", "time_seconds"),
        sqlite_where=sa.text("profile IS NOT NULL"),
        postgresql_where=sa.text("profile IS NOT NULL"),
    ),
    # Clustered by its key: a window of a series lies in one run of pages.
    sqlite_with_rowid=False,
)

# Of the judge that the sample waited for, and of later ones that judged what people graded again.
grades = sa.Table(
    "ctxguard_grades",
    metadata,
    *_key("sample_id", "series_id"),
    sa.Column("grades", StorableText, nullable=False),
    # Passages without a grade, because a call of the judge failed: they are asked about again.
    sa.Column("n_failed", sa.Integer, nullable=False),
    sa.Index(
        "ctxguard_grades_failed",
        *("series_id", "sample_id"),
        sqlite_where=sa.text("n_failed > 0"),
        postgresql_where=sa.text("n_failed > 0"),
    ),
)

# What a process sampled, stored and lost in one hour.
accounts = sa.Table(
    "ctxguard_accounts",
    metadata,
    sa.Column("worker_id", StorableText, primary_key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    *_columns(sa.BigInteger, "sampled", "stored"),
    *[sa.Column(f"lost_{reason.value}", sa.BigInteger, nullable=False) for reason in LostReason],
    # In the process's memory when it last reported; 0 once it reported in a later hour.
    sa.Column("pending", sa.BigInteger, nullable=False),
    # Number of the batch stored last: one that is sent again is stored once.
    sa.Column("batch", sa.BigInteger, nullable=False),
)

labels = sa.Table(
    "ctxguard_labels",
    metadata,
    sa.Column("label_id", _Id, primary_key=True),
    *_columns(StorableText, "request_id", "passage_id"),
    # Null takes the annotator's label back.
    sa.Column("grade", sa.Integer),
    sa.Column("negative", StorableText),
    sa.Column("annotator", StorableText, nullable=False),
    sa.Column("time_seconds", sa.Double, nullable=False),
    sa.Index("ctxguard_labels_request", "request_id", "passage_id"),
)

# The passages a draw asks people about; see ``PickedPassage``.
picked = sa.Table(
    "ctxguard_picked",
    metadata,
    *_key("sample_id", "pick_id"),
    sa.Column("kind", StorableText, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    # The series whose judged samples were drawn from.
    sa.Column("series_id", _Id, nullable=False),
    sa.Column("probability", sa.Double, nullable=False),
    sa.Column("asked", StorableText),
    sa.Column("question", sa.Double, nullable=False),
)

# State the monitor keeps across restarts: counts, the budget's spending, the alarms.
state = sa.Table(
    "ctxguard_state",
    metadata,
    sa.Column("key", StorableText, primary_key=True),
    sa.Column("value", StorableText, nullable=False),
)
