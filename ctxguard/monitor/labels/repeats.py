"""Has the same passage of the same question graded once, however many requests asked it.

Two requests of one draw and one file share the grade of a passage whose id, title and text are the
same. Another draw asks again, and so does the file of another tenant: a draw counts once its files
have grades of their own (``store.graded``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ctxguard.monitor.labels.files import RowToLabel, rows_to_label
from ctxguard.monitor.labels.human import ALWAYS
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.store import LabelRow, SampleStore

_Key = tuple[object, ...]


def rows_once(samples: Iterable[GradedSample]) -> list[RowToLabel]:
    """List the rows of a file, those that repeat a question and passage once.

    A row that stands for others is graded always, if they disagree on when it is.
    """
    rows: dict[_Key, RowToLabel] = {}
    for sample in samples:
        for row in sample.rows():
            key = _draw(sample)[:1], *_content(row)
            first = rows.setdefault(key, row)
            if first.when != row.when:
                rows[key] = replace(first, when=ALWAYS)
    return list(rows.values())


def repeats(store: SampleStore, labels: Sequence[LabelRow]) -> list[LabelRow]:
    """Return the same labels for the other requests that they stand for.

    A label that takes another back does so for all of them.

    Args:
        labels: Of requests of one file, or of some of them.
    """
    given = {(label.request_id, label.passage_id) for label in labels}
    requests = {label.request_id for label in labels}
    found: dict[tuple[str, ...], LabelRow] = {}
    for series in store.series():
        picked = store.picked_samples(series)
        questions = {one.question for one in picked if one.request_id in requests}
        asking = [one.sample_id for one in picked if one.question in questions]
        same: dict[_Key, list[tuple[str, str]]] = {}
        keys: dict[tuple[str, str], list[_Key]] = {}
        for sample in graded_samples(store, series, asking).values():
            for row in rows_to_label(sample.record, sample.picked, {}):
                own, key = (row.request_id, row.passage_id), (_draw(sample), *_content(row))
                same.setdefault(key, []).append(own)
                keys.setdefault(own, []).append(key)
        for label in labels:
            for key in keys.get((label.request_id, label.passage_id), ()):
                for request_id, passage_id in same[key]:
                    if (request_id, passage_id) not in given:
                        whose = request_id, passage_id, label.annotator
                        found[whose] = replace(label, request_id=request_id)
    return list(found.values())


def _draw(sample: GradedSample) -> tuple[object, ...]:
    """Return the draw that asked about a sample first, and for which file."""
    return (sample.picked[0].pick_id, sample.picked[0].asked) if sample.picked else (0, None)


def _content(row: RowToLabel) -> _Key:
    # A question whose text is not kept is like no other.
    return row.query or (row.request_id,), row.passage_id, row.title, row.text
