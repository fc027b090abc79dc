"""Golden sets: labels with their provenance, adjudicated where they disagree.

Pure: ``golden_sources`` reads the files that a set is made from, ``frozen_sets`` writes it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal

from calibration.data.dataset import Dataset, DistractorKind, Query
from ctxguard.core import adjudication
from ctxguard.core.metrics import Negative

Source = Literal["human", "authored", "traffic", "llm"]
SOURCES: tuple[Source, ...] = ("human", "authored", "traffic", "llm")

Value = int | DistractorKind
"""A grade ≥ 0, or the kind of a passage known to mislead, whose grade is 0."""

RULES = (
    "where people labelled a passage (human, authored), labels of traffic and llm do not count",
    *adjudication.RULES,
    "a label without a date is the oldest; of labels with one date, the least relevant is latest",
)
"""The rules that make one label of a passage's several."""

_VALUES = ("relevant", "irrelevant", "hard_negative", "distractor")
_PEOPLE: tuple[Source, ...] = ("human", "authored")


@dataclass(frozen=True, slots=True)
class Annotation:
    """One label of one passage for one query, or a question that was asked, with its provenance.

    Attributes:
        passage_id: None for a question alone, asked in traffic or by an author.
        value: A grade ≥ 0, or the kind of a distractor; 0 without a passage.
        source: Origin of the label: a person, the author of the question, behaviour in traffic,
            or a language model.
        annotator: A name; None if the data gives none.
        date: ISO 8601, as in the data; None if the data gives none.
        note: Any remark.
        count: How many times a question was asked, ≥ 1; 1 for a label.
    """

    query_id: str
    passage_id: str | None
    value: Value
    source: Source
    annotator: str | None = None
    date: str | None = None
    note: str | None = None
    count: int = 1

    @property
    def grade(self) -> int:
        """The grade; 0 for a distractor."""
        return self.value if isinstance(self.value, int) else 0

    @property
    def negative(self) -> Negative | None:
        """The kind of a distractor; None for a grade."""
        return None if isinstance(self.value, int) else Negative(self.value)


@dataclass(frozen=True, slots=True)
class AdjudicatedLabel:
    """The final label of a passage, with all labels that it was given.

    Attributes:
        value: A grade ≥ 0, or the kind of a distractor.
        annotations: Every label given, including those that did not count.
    """

    query_id: str
    passage_id: str
    value: Value
    annotations: tuple[Annotation, ...]

    @property
    def disputed(self) -> bool:
        """Whether two of its labels differ."""
        return len({annotation.value for annotation in self.annotations}) > 1

    @property
    def relevance_disputed(self) -> bool:
        """Whether one label says relevant and another does not."""
        return len({annotation.grade > 0 for annotation in self.annotations}) > 1


def moment(date: str) -> datetime:
    """Parse a date as a moment, for comparison; without a time zone it is UTC.

    Raises:
        ValueError: not a date in ISO 8601.

    >>> moment("2026-03-01") < moment("2026-03-01T09:30:00+02:00")
    True
    """
    parsed = datetime.fromisoformat(date)
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)


def adjudicate(annotations: tuple[Annotation, ...]) -> AdjudicatedLabel:
    """Reduce all labels of a passage for a query to one, by ``RULES``.

    Args:
        annotations: At least one, all of one query and passage, in any order.

    >>> ann = Annotation("q", "p", 2, "human", "ann", "2026-01-01")
    >>> ben = Annotation("q", "p", 0, "human", "ben", "2026-02-01")
    >>> model = Annotation("q", "p", 2, "llm", "judge-1", "2026-03-01")
    >>> adjudicate((ann, ben, model)).value
    0
    """
    people = [annotation for annotation in annotations if annotation.source in _PEOPLE]
    # Grades stand above hard negatives, and those above distractors.
    ranks = {"hard_negative": -1, "distractor": -2}
    counted = sorted(
        people or annotations, key=lambda each: ranks.get(str(each.value), each.grade), reverse=True
    )
    label = adjudication.adjudicate(
        adjudication.Vote(
            annotation.grade,
            annotation.negative,
            None if annotation.annotator is None else f"{annotation.source} {annotation.annotator}",
            float("-inf") if annotation.date is None else moment(annotation.date).timestamp(),
        )
        for annotation in counted
    )
    value: Value = label.grade if label.negative is None else label.negative.value
    first = annotations[0]
    return AdjudicatedLabel(first.query_id, first.passage_id or "", value, annotations)


@dataclass(frozen=True)
class GoldenSet:
    """Questions with every label that they were given, whatever files they came from.

    Attributes:
        queries: The queries by id; ids are distinct.
        annotations: All labels and questions that were asked, sorted and without repeats, with
            labels that disagree; questions asked that are equal but for the count are added up.
        notes: Repairs and omissions made in reading, one readable line each.
    """

    queries: tuple[Query, ...]
    annotations: tuple[Annotation, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def times_asked(self) -> Mapping[str, int]:
        """Number of times that traffic asked each query; queries never asked are absent."""
        times: Counter[str] = Counter()
        for each in self.annotations:
            if each.passage_id is None and each.source == "traffic":
                times[each.query_id] += each.count
        return times

    @cached_property
    def labels(self) -> tuple[AdjudicatedLabel, ...]:
        """One label per labelled passage, ordered by query and passage."""
        by_passage: dict[tuple[str, str], list[Annotation]] = {}
        for annotation in self.annotations:
            if annotation.passage_id is not None:
                key = (annotation.query_id, annotation.passage_id)
                by_passage.setdefault(key, []).append(annotation)
        return tuple([adjudicate(tuple(given)) for _, given in sorted(by_passage.items())])

    @property
    def disputed(self) -> tuple[AdjudicatedLabel, ...]:
        """Passages whose labels disagreed."""
        return tuple([label for label in self.labels if label.disputed])

    def dataset(self, name: str = "golden") -> Dataset:
        """Build a data set of every question with one label per passage; unlabelled have no qrels.

        A distractor has grade 0 too, so that tools that read only qrels see that it is judged.
        """
        qrels: dict[str, dict[str, int]] = {}
        distractors: dict[str, dict[str, DistractorKind]] = {}
        for label in self.labels:
            grade = label.value if isinstance(label.value, int) else 0
            qrels.setdefault(label.query_id, {})[label.passage_id] = grade
            if not isinstance(label.value, int):
                distractors.setdefault(label.query_id, {})[label.passage_id] = label.value
        return Dataset(name, self.queries, qrels, distractors, notes=self.notes)

    def counts(self) -> dict[str, int]:
        """Count the content of the set and the sources of its labels, by name."""
        values = Counter(
            label.value
            if isinstance(label.value, str)
            else ("relevant" if label.value > 0 else "irrelevant")
            for label in self.labels
        )
        given = [annotation for label in self.labels for annotation in label.annotations]
        sources = Counter(annotation.source for annotation in given)
        return {
            "queries": len(self.queries),
            "labelled_queries": len({label.query_id for label in self.labels}),
            "answerable_queries": len(self.dataset().answerable),
            "times_asked_in_traffic": sum(self.times_asked.values()),
            "labels": len(given),
            **{f"labels_{source}": sources[source] for source in SOURCES},
            "annotators": len({annotation.annotator for annotation in given} - {None}),
            "labelled_passages": len(self.labels),
            **{name: values[name] for name in _VALUES},
            "labelled_more_than_once": sum(len(label.annotations) > 1 for label in self.labels),
            "disagreements": len(self.disputed),
            "disagreements_on_relevance": sum(label.relevance_disputed for label in self.labels),
        }
