"""The sample store: SQLite on one host, PostgreSQL for a fleet.

    types       what goes in and comes out
    schema      the tables
    database    connections and transactions      faults      errors, in words
    sqlite      how SQLite is set up              files       what lies beside its file
    forking     no connection crosses a fork
    queue       written, claimed, finished        judged      read by window
    labels      what people said                  retention   deleted
    sql         SampleStore, which does all of it

The types import without SQLAlchemy; it is imported when ``SampleStore`` is first asked for.
"""

from typing import TYPE_CHECKING, Any

from ctxguard._extras import require
from ctxguard.monitor.store.types import (
    FEEDBACK_KINDS,
    PICKED,
    RANDOM,
    WEIGHED,
    Claimed,
    Cleaned,
    Entry,
    FeedbackAdded,
    FeedbackRow,
    Finished,
    FinishedEach,
    JudgedRows,
    LabelRow,
    LabelsAdded,
    Limits,
    State,
    WorkerCounts,
    WorkerRow,
)

if TYPE_CHECKING:
    from ctxguard.monitor.store.sql import SampleStore

__all__ = [
    "FEEDBACK_KINDS",
    "PICKED",
    "RANDOM",
    "WEIGHED",
    "Claimed",
    "Cleaned",
    "Entry",
    "FeedbackAdded",
    "FeedbackRow",
    "Finished",
    "FinishedEach",
    "JudgedRows",
    "LabelRow",
    "LabelsAdded",
    "Limits",
    "SampleStore",
    "State",
    "WorkerCounts",
    "WorkerRow",
]


def __getattr__(name: str) -> Any:
    if name != "SampleStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("sqlalchemy", "monitor")
    from ctxguard.monitor.store.sql import SampleStore

    return SampleStore
