"""The sample store: SQLite on one host, PostgreSQL for several.

    writer        stores a sampler's requests
    samples       written with counts, waiting, deleted
    judgments     results, grades, and rows for estimates
    labelling     what people are asked, their labels, and rows with these
    sample_store  SampleStore, the table of all that it does
    types         the values that go in and come out
    database      transactions                  schema        the tables
    engine        URL, connections, creation    errors        database errors as the store's
    ownership     the one monitor that owns a store

The types import without SQLAlchemy, which is imported with ``SampleStore``. Opens nothing.
"""

from typing import TYPE_CHECKING, Any

from ctxguard._support.extras import require
from ctxguard.monitor.store.types import (
    OPENED,
    Batch,
    Counts,
    Finished,
    LabelRow,
    Limits,
    PickedPassage,
    PickedSample,
    PickKind,
    State,
    StoredSample,
)

if TYPE_CHECKING:
    from ctxguard.monitor.store.sample_store import SampleStore

__all__ = [
    "OPENED",
    "Batch",
    "Counts",
    "Finished",
    "LabelRow",
    "Limits",
    "PickKind",
    "PickedPassage",
    "PickedSample",
    "SampleStore",
    "State",
    "StoredSample",
]


def __getattr__(name: str) -> Any:
    if name != "SampleStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("sqlalchemy", "monitor")
    from ctxguard.monitor.store.sample_store import SampleStore

    return SampleStore
