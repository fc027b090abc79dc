"""Stores the judges' results on samples, with counts, grades, and rows for estimates.

A result is stored once, with what it counts. Grades are kept as JSON beside the text that they may
quote, rows as blocks that outlive it. Touches the database and the clock, and logs.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from pydantic import TypeAdapter

from ctxguard.errors import StoreError
from ctxguard.measure.rows import FAILED, NO_PICK, Rows, hash_number, to_blocks
from ctxguard.monitor.sampling.record import Judgment
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Store, Transaction, reads, writes
from ctxguard.monitor.store.samples import shares_at, stored_shares
from ctxguard.monitor.store.types import Counts, Finished, State

_log = logging.getLogger(__name__)

PAGE_ROWS = 5_000
_samples = schema.samples.c
_judged = schema.judged.c
_grades = schema.grades.c
_JSON = TypeAdapter(list[Judgment])
_UNFINISHED = (State.PENDING.value, State.INCOMPLETE.value)
_NOTHING: Mapping[Any, Any] = {}
_OF_SAMPLE = ("sample_id", "time_seconds", "first_pick")
"""Columns of a row that are in the table and not in its block."""
COLUMNS = (
    _judged.sample_id,
    _judged.time_seconds,
    sa.func.coalesce(_judged.first_pick, NO_PICK),
    _judged.block,
)
"""The columns that ``rows_of`` reads."""


@reads
def series(db: Transaction) -> list[str]:
    """Return all series of judgments, in the order in which they began."""
    table = schema.series.c
    return db.scalars(sa.select(table.name).order_by(table.series_id))


def finish(
    store: Store,
    series: str,
    finished: Sequence[Finished],
    counts: Counts = _NOTHING,
    values: Mapping[str, str] = _NOTHING,
) -> dict[int, Exception]:
    """Store the results of samples with their counts, each independently of the others.

    One transaction for all of them, or one for each where something in them cannot be stored.
    Samples that are finished already stay as they are, unless a call of the judge had failed, and
    so do those that were deleted or forced.

    Args:
        counts: The monitor's other counts, to add to those of the series.
        values: Values to keep, by key.

    Returns:
        By sample, why a result could not be stored.

    Raises:
        StoreError: nothing can be stored at present, and nothing was.
    """
    if not (finished or counts or values):
        return {}
    try:
        _finish(store, series, finished, counts, values)
        return {}
    except StoreError:
        raise
    except Exception as error:
        if not finished:
            raise
        finish(store, series, [], counts, values)
        if len(finished) == 1:
            return {finished[0].sample_id: error}
    refused: dict[int, Exception] = {}
    for one in finished:
        refused |= finish(store, series, [one])
    return refused


@writes
def _finish(
    db: Transaction,
    series: str,
    finished: Sequence[Finished],
    counts: Counts,
    values: Mapping[str, str],
) -> None:
    """Store the results of samples that were not finished before."""
    last = {one.sample_id: one for one in reversed(finished)}
    unfinished = sa.select(_samples.sample_id, _samples.time_seconds).where(
        _samples.state.in_(_UNFINISHED)
    )
    time_of: dict[int, float] = db.by_sample(unfinished, sorted(last))
    accepted = [last[sample_id] for sample_id in time_of]
    _add_counts(db, series, [counts, *[one.counts for one in accepted]])
    for key, value in values.items():
        db.set_state(key, value)
    if not accepted:
        return
    series_id = _begun(db, series)
    db.execute(
        sa.update(schema.samples)
        .where(_samples.sample_id == sa.bindparam("finished_id"))
        .values(state=sa.bindparam("outcome"), rejected=sa.bindparam("replies")),
        [
            {
                "finished_id": one.sample_id,
                "outcome": one.state.value,
                "replies": json.dumps(one.rejected) if one.rejected else None,
            }
            for one in accepted
        ],
    )
    judged, grades = [], []
    for one in accepted:
        if one.rows is None:
            continue
        own = {"sample_id": one.sample_id, "series_id": series_id}
        [block], profile = to_blocks(one.rows), int(one.rows.requests["profile"][0])
        of_table = {"time_seconds": time_of[one.sample_id], "is_counted": True}
        # People's grades are added to a new block anew.
        of_block = {"block": block, "profile": profile or None, "is_graded": False}
        judged.append({**own, **of_table, **of_block, "last_label": -1})
        n_failed = int(np.count_nonzero(one.rows.passages["judge_grade"] == FAILED))
        grades.append({**own, "grades": _as_json(one.grades), "n_failed": n_failed})
    db.replace(schema.judged, judged)
    db.replace(schema.grades, grades)


def _add_counts(db: Transaction, series: str, more: Iterable[Counts]) -> None:
    """Add to the counts of a series, which never fall."""
    added = Counter[tuple[str, ...]]()
    for counts in more:
        for name, n in counts.items():
            added[tuple(map(str, name))] += n  # type: ignore[assignment]
    if any(added.values()):
        totals = Counter(counts_of(db, series))
        totals.update(added)
        text = json.dumps([[*name, n] for name, n in totals.items()])
        db.set_state(f"counts {series}", text)


def counts_of(db: Transaction, series: str) -> dict[tuple[str, ...], float]:
    """Return the counts since a series began, by name and label values."""
    kept = json.loads(db.state(f"counts {series}") or "[]")
    return {tuple(name): n for *name, n in kept}


@writes
def save_again(
    db: Transaction, series: str, sample_id: int, grades: Mapping[str, Judgment], n_failed: int
) -> None:
    """Store the grades of a series on a sample that another series judged first.

    Nothing is stored where its text was deleted.
    """
    own = {"sample_id": sample_id, "series_id": _begun(db, series)}
    payload = schema.payloads.c.sample_id
    if db.scalars(sa.select(payload).where(payload == sample_id)):
        db.replace(schema.grades, [{**own, "grades": _as_json(grades), "n_failed": n_failed}])


def _begun(db: Transaction, series: str) -> int:
    """Return the id of a series, which begins with its first grades."""
    db.execute(db.insertion(schema.series).on_conflict_do_nothing().values(name=series))
    return db.series_id(series)


@reads
def failed(db: Transaction, series: str) -> list[int]:
    """Return the samples that a series judged first and on which calls of the judge failed.

    Only those whose text is kept, oldest first: the judge can be asked about them again.
    """
    payload = schema.payloads.c.sample_id
    query = (
        sa.select(_grades.sample_id)
        .join(schema.samples, _samples.sample_id == _grades.sample_id)
        .join(schema.payloads, payload == _grades.sample_id)
        .where(_samples.state == State.INCOMPLETE.value, *_has_failed(db, series))
    )
    return db.scalars(query.order_by(_grades.sample_id))


@reads
def n_failed(db: Transaction, series: str) -> tuple[int, int]:
    """Count the requests and the passages on which calls of the judge failed."""
    counted = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_grades.n_failed), 0))
    requests, passages = db.execute(counted.where(*_has_failed(db, series))).one()
    return requests, int(passages)


def _has_failed(db: Transaction, series: str) -> tuple[sa.ColumnElement[bool], ...]:
    # Worded as in the index, or it is not used.
    return _grades.series_id == db.series_id(series), sa.literal_column("n_failed > 0", sa.Boolean)


@reads
def grades(
    db: Transaction, series: str | None, sample_ids: Sequence[int]
) -> dict[int, dict[str, Judgment]]:
    """Return grades by sample and passage id, except deleted, damaged or missing ones.

    Args:
        series: The series; None for the one that judged each sample first.
    """
    query = sa.select(_grades.sample_id, _grades.grades)
    if series is None:
        first = sa.and_(
            _judged.sample_id == _grades.sample_id,
            _judged.series_id == _grades.series_id,
            _judged.is_counted,
        )
        query = query.join(schema.judged, first)
    else:
        query = query.where(_grades.series_id == db.series_id(series))
    found = {}
    texts: dict[int, str] = db.by_sample(query, sample_ids)
    for sample_id, text in texts.items():
        try:
            found[sample_id] = {one.passage_id: one for one in _JSON.validate_json(text)}
        except ValueError as error:
            _log.warning(
                "sample %d is left out: its grades cannot be read: %s",
                sample_id,
                type(error).__name__,
            )
    return found


def _as_json(grades: Mapping[str, Judgment]) -> str:
    return _JSON.dump_json(list(grades.values()), exclude_defaults=True).decode()


def judged_pages(
    store: Store,
    series: str,
    *,
    since: float | None = None,
    until: float | None = None,
    profile_id: str | None = None,
) -> Iterator[Rows]:
    """Read the judged requests of a series by time, page by page, each in its own transaction.

    Memory holds one page. Requests that are judged meanwhile may or may not be read.

    Args:
        since, until: In seconds since the epoch, ``until`` excluded; None for no bound.
        profile_id: Only those that alarms compare with this profile's promises; None for all.
    """
    query = sa.select(*COLUMNS).where(_judged.is_counted)
    if profile_id is not None:
        query = query.where(_judged.profile == hash_number(profile_id))
    if until is not None:
        query = query.where(_judged.time_seconds < until)
    last_id: int | None = None
    while True:
        page = _page(store, series, query, since, last_id)
        if n := len(page.requests):
            yield page
        if n < PAGE_ROWS:
            return
        last = page.requests[-1]
        since, last_id = float(last["time_seconds"]), int(last["sample_id"])


@reads
def _page(
    db: Transaction, series: str, query: sa.Select[Any], since: float | None, last_id: int | None
) -> Rows:
    """Read the first rows after a time and sample id, by time and then id; None for no bound."""
    query = query.where(_judged.series_id == db.series_id(series))
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    if last_id is not None:
        # No second lower bound on the time, or SQLite may search from that one.
        query = query.where(sa.or_(_judged.time_seconds > since, _judged.sample_id > last_id))
    in_order = query.order_by(_judged.time_seconds, _judged.sample_id).limit(PAGE_ROWS)
    return rows_of(db, db.raw_rows(in_order))


def rows_of(db: Transaction, found: Sequence[Any]) -> Rows:
    """Make rows from values of ``COLUMNS``.

    Each stands for those of its hour that were lost: its probability is multiplied by the share of
    them that was stored.
    """
    *columns, blocks = zip(*found, strict=True) if found else ((), (), (), ())
    rows = Rows.read(blocks)
    requests = rows.requests
    for name, values in zip(_OF_SAMPLE, columns, strict=True):
        requests[name] = values
    requests["probability"] *= shares_at(stored_shares(db), requests["time_seconds"])
    return rows


@reads
def first_rows(db: Transaction, sample_ids: Sequence[int]) -> dict[int, np.void]:
    """Return the ``REQUEST`` of each sample, as judged by the series that judged it first.

    Without those that were deleted; its probability is that of its being sampled and then judged.
    """
    query = sa.select(_judged.sample_id, _judged.block).where(_judged.is_counted)
    found: dict[int, bytes] = db.by_sample(query, sample_ids)
    return dict(zip(found, Rows.read(list(found.values())).requests, strict=True))


@reads
def first_loss_seconds(
    db: Transaction, series: str, profile_id: str, *, since: float | None
) -> float | None:
    """Return the time of the first request with a loss from ``since`` on; None if there is none."""
    first_of = sa.func.min(_judged.time_seconds)
    query = sa.select(first_of).where(
        _judged.series_id == db.series_id(series), _judged.profile == hash_number(profile_id)
    )
    if since is not None:
        query = query.where(_judged.time_seconds >= since)
    first: float | None = db.execute(query).scalar()
    return first
