"""Reads samples for people to grade: candidates, people's grades so far, and the judge's.

The same passage of the same question is graded once, however many requests asked it. Two requests
of one draw and one file share the grade of a passage whose id, title and text are the same. Another
draw asks again, and so does the file of another tenant: a draw counts once its files have grades of
their own (``store.labelling.draws``). Reads the store.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.files import RowToLabel, in_file_order, rows_to_label
from ctxguard.monitor.labels.human import ALWAYS, human_grades, rows_left
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow, PickedPassage, SampleStore

_MOST_OVER = 1.25
"""Grades that were asked for earlier may add up to this multiple of a budget."""
_LIKELY = {False: 0.2, True: 0.8}
"""Roughly how likely a passage is to be relevant, by whether the judge says it is."""

_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class GradedSample:
    """One judged sample, which people have graded wholly, in part or not at all.

    Attributes:
        people: The grades of people so far, by passage id.
        judge: The grades of the judge, by passage id.
        picked: The passages people are asked about.
        disagreements: Passages on whose relevance annotators disagree.
    """

    sample_id: int
    record: SampleRecord
    people: Mapping[str, Judgment]
    judge: Mapping[str, Judgment]
    picked: tuple[PickedPassage, ...] = ()
    disagreements: int = 0

    def is_of_tenant(self, tenant: str) -> bool:
        """Return whether the request could see only passages with this value of a field.

        It is False where its filter allows others as well, or is not known.

        Args:
            tenant: ``FIELD=VALUE``, or a value of the field ``tenant``.
        """
        field, equals, value = tenant.partition("=")
        field, value = (field, value) if equals else ("tenant", tenant)
        where = self.record.where
        allowed = [] if where is None else where.allowed.get(field, [])
        return bool(allowed) and all(str(one) == value for one in allowed)

    def grade(self, position: int) -> int:
        """Return a candidate's grade, preferring people's to the judge's; 0 without one."""
        name = self.record.passage_ids[position]
        judgment = self.people.get(name) or self.judge.get(name)
        return 0 if judgment is None else judgment.grade

    @property
    def is_graded(self) -> bool:
        """Whether people have graded everything that draws ask about."""
        return not rows_left(self.record, self.picked, self.people)

    def rows(self) -> list[RowToLabel]:
        """Return the rows still to be graded: an upper bound on those that will be needed."""
        return rows_to_label(self.record, self.picked, self.people)

    @property
    def expected_passages(self) -> float:
        """Predict how many passages people will still grade, going from top to bottom."""
        passages, none_above = 0.0, 1.0
        for row in self.rows():
            passages += 1.0 if row.when == ALWAYS else none_above
            none_above *= 1.0 - self._likely(row.passage_id)
        return passages

    def _likely(self, passage_id: str) -> float:
        judgment = self.judge.get(passage_id)
        return _LIKELY[judgment is not None and judgment.grade > 0]


def graded_samples(
    store: SampleStore,
    series: str,
    sample_ids: Sequence[int],
    picked: Mapping[int, Sequence[PickedPassage]] | None = None,
) -> dict[int, GradedSample]:
    """Read samples in the given order, without those that are unjudged or cannot be read.

    Old ones have lost their text.

    Args:
        picked: The passages people are asked about; None for those of the saved draws.
    """
    grades = store.grades(series, sample_ids)
    records = store.records(list(grades))
    people = human_grades(store.labels(list(records)))
    picked = store.picked(series, sample_ids) if picked is None else picked
    found = {}
    for sample_id in sample_ids:
        if sample_id not in records:
            continue
        by_people, disagreements = people.get(sample_id, ({}, 0))
        found[sample_id] = GradedSample(
            sample_id,
            records[sample_id],
            by_people,
            grades[sample_id],
            tuple(picked.get(sample_id, ())),
            disagreements,
        )
    return found


def unfinished(
    samples: Iterable[GradedSample], n: float = math.inf, *, tenant: str | None = None
) -> list[GradedSample]:
    """Return the samples that lack grades, in random order, since not all may be graded.

    Args:
        n: About how many passages are to be graded at most.
        tenant: As ``GradedSample.is_of_tenant`` takes it; None for all.
    """
    lacking = [
        sample
        for sample in samples
        if not sample.is_graded and (tenant is None or sample.is_of_tenant(tenant))
    ]
    chosen, passages = [], 0.0
    for sample in sorted(lacking, key=_in_file_order):
        if passages >= _MOST_OVER * n:
            break
        chosen.append(sample)
        passages += sample.expected_passages
    return chosen


def _in_file_order(sample: GradedSample) -> tuple[float, float]:
    question = sample.picked[0].question if sample.picked else 0.0
    return in_file_order(question, sample.record.request_id)


def distinct_rows(samples: Iterable[GradedSample]) -> list[RowToLabel]:
    """List the rows of a file, with each pair of question and passage only once.

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
    """Copy labels to the other requests that they stand for.

    A label that takes another back does so for all of them.

    Args:
        labels: Labels of all or some requests of one file.
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
    """Return the draw that first asked about a sample, and for which file."""
    return (sample.picked[0].pick_id, sample.picked[0].asked) if sample.picked else (0, None)


def _content(row: RowToLabel) -> _Key:
    # A question without a kept text equals no other.
    return row.query or (row.request_id,), row.passage_id, row.title, row.text
