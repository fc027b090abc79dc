"""The sample store: SQLite on one host, PostgreSQL for several.

    types         the values that go in and come out
    schema        the tables                    transactions  what runs in one
    database      connections, creation         errors        database errors as the store's
    samples       written with counts, waiting, finished
    ownership     the one monitor that owns a store
    judgments     judged requests, by time, single, and graded
    labelling     what people are asked, their labels
    retention     deletion
    sample_store  SampleStore, the table of all that it does

The types import without SQLAlchemy, which is imported with ``SampleStore``.
"""

from typing import TYPE_CHECKING, Any

from ctxguard._support.extras import require
from ctxguard.monitor.store.types import (
    OPENED,
    Accounts,
    Counts,
    Entry,
    Finished,
    GradedBlock,
    GradedRows,
    JudgedRows,
    LabelRow,
    Limits,
    LossRow,
    LostReason,
    PickedPassage,
    PickedSample,
    PickKind,
    State,
    StoredSample,
    StoredShares,
    WorkerCounts,
)

if TYPE_CHECKING:
    from ctxguard.monitor.store.sample_store import SampleStore

__all__ = [
    "OPENED",
    "Accounts",
    "Counts",
    "Entry",
    "Finished",
    "GradedBlock",
    "GradedRows",
    "JudgedRows",
    "LabelRow",
    "Limits",
    "LossRow",
    "LostReason",
    "PickKind",
    "PickedPassage",
    "PickedSample",
    "SampleStore",
    "State",
    "StoredSample",
    "StoredShares",
    "WorkerCounts",
]


def __getattr__(name: str) -> Any:
    if name != "SampleStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("sqlalchemy", "monitor")
    from ctxguard.monitor.store.sample_store import SampleStore

    return SampleStore
