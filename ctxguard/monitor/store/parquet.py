"""Export to Parquet, in short reads, so that an export holds up nobody and fits in memory."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError, StoreError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Database

Content = Literal["samples", "judged", "labels"]

_ROWS = 1_000
_samples = schema.samples.c
_judged = schema.judged.c


def export(database: Database, path: Path, what: Content) -> int:
    """Write one kind of rows to a file, replacing one that is there; returns how many.

    Raises:
        ConfigurationError: another kind of rows.
        MissingExtraError: pyarrow is not installed.
        StoreError: the store or the file cannot be used.
    """
    arrow = require("pyarrow", "parquet")
    writing = require("pyarrow.parquet", "parquet")
    queries = _queries()
    if what not in queries:
        raise ConfigurationError(f"cannot export {what!r}; use one of {', '.join(queries)}")
    query = queries[what]
    columns = arrow.schema(
        [
            (column.name, _type(arrow, column.type))
            for column in query.selected_columns
            if column.name != "place"
        ]
    )
    unfinished = path.with_name(path.name + ".partial")
    n = 0
    try:
        with writing.ParquetWriter(unfinished, columns, compression="zstd") as writer:
            for rows in _batches(database, query):
                n += len(rows)
                writer.write_table(arrow.Table.from_pylist(rows, columns))
        unfinished.replace(path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror or type(error).__name__}); name a file in "
            "a folder that exists and has room"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return n


def _batches(database: Database, query: sa.Select[Any]) -> Iterator[list[Mapping[str, Any]]]:
    place = query.selected_columns["place"]
    last = -1
    while True:
        some = query.where(place > last).order_by(place).limit(_ROWS)
        rows = database.read(partial(_rows, query=some))
        if not rows:
            return
        yield rows
        last = rows[-1]["place"]


def _rows(connection: sa.Connection, query: sa.Select[Any]) -> list[Mapping[str, Any]]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _queries() -> dict[str, sa.Select[Any]]:
    """Each with its key as ``place``, by which it is read on."""
    payload = schema.payloads.c
    return {
        "samples": sa.select(
            _samples.sample_id.label("place"),
            _samples.sample_id,
            _samples.request_id,
            _samples.time_seconds,
            _samples.probability,
            _samples.session_id,
            _samples.state,
            _samples.attempts,
            payload.payload,
        ).join(schema.payloads, payload.sample_id == _samples.sample_id, isouter=True),
        "judged": sa.select(
            _judged.sample_id.label("place"),
            _judged.sample_id,
            schema.series.c.name.label("series"),
            _samples.request_id,
            _judged.time_seconds,
            _samples.probability,
            _samples.session_id,
            _judged.summary,
            schema.grades.c.grades,
            schema.verdicts.c.verdicts,
        )
        .join(schema.series, schema.series.c.series_id == _judged.series_id)
        .join(schema.samples, _samples.sample_id == _judged.sample_id)
        .join(schema.grades, schema.grades.c.sample_id == _judged.sample_id, isouter=True)
        .join(schema.verdicts, schema.verdicts.c.sample_id == _judged.sample_id, isouter=True),
        "labels": sa.select(
            schema.labels.c.label_id.label("place"),
            *(column for column in schema.labels.c if column.name != "label_id"),
        ),
    }


def _type(arrow: Any, column: sa.types.TypeEngine[Any]) -> Any:
    if isinstance(column, sa.LargeBinary):
        return arrow.binary()
    if isinstance(column, sa.Float):
        return arrow.float64()
    return arrow.int64() if isinstance(column, sa.Integer) else arrow.string()
