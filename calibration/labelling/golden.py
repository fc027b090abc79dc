"""Golden sets: labels that say where they come from, and one rule for those that disagree.

Pure: ``calibration.labelling.snapshots`` reads and writes the files.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal

from calibration.labelling.labels import Dataset, DistractorKind, Query

Source = Literal["human", "authored", "traffic", "llm"]
SOURCES: tuple[Source, ...] = ("human", "authored", "traffic", "llm")

Value = int | DistractorKind
"""A grade, or the kind of a passage known to mislead, which is not relevant either."""

Settlement = Literal["agreed", "people", "majority", "latest", "lowest"]
SETTLEMENTS: tuple[Settlement, ...] = ("agreed", "people", "majority", "latest", "lowest")

RULES = (
    "an annotator has one vote on a passage, the latest; one without a date is the oldest",
    "where people voted (human, authored), votes of traffic and of llm do not count",
    "relevant or not goes by majority, then the grade or kind among those votes likewise",
    "a tie goes to the latest vote, and then to the lowest: distractor, hard_negative, 0, 1, …",
)
"""How labels that disagree become one, in the order of use."""

_PEOPLE: tuple[Source, ...] = ("human", "authored")
_BEFORE_ANY_DATE = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Judgment:
    """What one annotator said of one passage for one query.

    Attributes:
        value: A grade ≥ 0, or the kind of a distractor.
        source: Who or what labelled: a person, the question's author, behaviour in traffic, or a
            language model.
        annotator: A name; None where the data gives none.
        date: ISO 8601, as the data gives it; None where it gives none.
        note: Anything worth keeping.
    """

    query_id: str
    passage_id: str
    value: Value
    source: Source
    annotator: str | None = None
    date: str | None = None
    note: str | None = None

    @property
    def is_relevant(self) -> bool:
        return isinstance(self.value, int) and self.value > 0


@dataclass(frozen=True, slots=True)
class Asked:
    """That a question was asked, in traffic or by an author, whether or not it has labels.

    Attributes:
        count: How many times, ≥ 1.
    """

    query_id: str
    source: Source
    count: int = 1
    annotator: str | None = None
    date: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class GoldenSet:
    """Questions with every label they were given; no order of files shows in it.

    Attributes:
        queries: By id, ids distinct.
        judgments: Sorted, without repeats; those that disagree are all here.
        asked: Sorted, added up where all but the count is equal.
        notes: What was mended or left out on the way here, one readable line each.
    """

    queries: tuple[Query, ...]
    judgments: tuple[Judgment, ...]
    asked: tuple[Asked, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def times_asked(self) -> Mapping[str, int]:
        """How often traffic asked each query that it asked at all."""
        times: Counter[str] = Counter()
        for asked in self.asked:
            if asked.source == "traffic":
                times[asked.query_id] += asked.count
        return times


@dataclass(frozen=True, slots=True)
class Settled:
    """The one label of a passage, and what settled it.

    Attributes:
        value: A grade ≥ 0, or the kind of a distractor.
        by: The last rule that was needed; ``agreed`` where no two labels differ.
        judgments: Every label given, whether it counted or not.
    """

    query_id: str
    passage_id: str
    value: Value
    by: Settlement
    judgments: tuple[Judgment, ...]

    @property
    def disputed(self) -> bool:
        """Whether two of its labels differ."""
        return len(_values(self.judgments)) > 1

    @property
    def relevance_disputed(self) -> bool:
        """Whether one label says relevant and another not."""
        return len({judgment.is_relevant for judgment in self.judgments}) > 1


def instant(date: str) -> datetime:
    """A date of the data as a moment, for comparison; without a time zone it is UTC.

    Raises:
        ValueError: not a date in ISO 8601.

    >>> instant("2026-03-01") < instant("2026-03-01T09:30:00+02:00")
    True
    """
    moment = datetime.fromisoformat(date)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def settle(judgments: Sequence[Judgment]) -> Settled:
    """One label from all that a passage was given for a query, by ``RULES``.

    Args:
        judgments: At least one, all of one query and passage, in any order.

    >>> ann = Judgment("q", "p", 2, "human", "ann", "2026-01-01")
    >>> ben = Judgment("q", "p", 0, "human", "ben", "2026-02-01")
    >>> model = Judgment("q", "p", 2, "llm", "judge-1", "2026-03-01")
    >>> settled = settle([ann, ben, model])
    >>> settled.value, settled.by
    (0, 'latest')
    """
    votes = _latest_of_each(judgments)
    needed: list[Settlement] = ["latest" if _values(votes) < _values(judgments) else "agreed"]
    people = [vote for vote in votes if vote.source in _PEOPLE]
    if people:
        needed.append("people" if _values(people) < _values(votes) else "agreed")
        votes = people
    for key in (_relevance, _standing):
        votes, rule = _majority(votes, key)
        needed.append(rule)
    return Settled(
        query_id=judgments[0].query_id,
        passage_id=judgments[0].passage_id,
        value=votes[0].value,
        by=max(needed, key=SETTLEMENTS.index),
        judgments=tuple(judgments),
    )


def _values(judgments: Iterable[Judgment]) -> set[Value]:
    return {judgment.value for judgment in judgments}


def _latest_of_each(judgments: Iterable[Judgment]) -> list[Judgment]:
    """One vote for each annotator of a source; each nameless label is a vote of its own."""
    votes: list[Judgment] = []
    named: dict[tuple[Source, str], Judgment] = {}
    for judgment in judgments:
        if judgment.annotator is None:
            votes.append(judgment)
        else:
            voter = (judgment.source, judgment.annotator)
            named[voter] = max(named.get(voter, judgment), judgment, key=_late_and_low)
    return [*votes, *named.values()]


def _majority(
    votes: list[Judgment], key: Callable[[Judgment], int]
) -> tuple[list[Judgment], Settlement]:
    """The votes for the value of ``key`` that wins, and the rule that it needed to win."""
    tally = Counter(key(vote) for vote in votes)
    most = max(tally.values())
    tied = [vote for vote in votes if tally[key(vote)] == most]
    chosen = max(tied, key=_late_and_low)
    rule: Settlement = "agreed" if len(tally) == 1 else "majority"
    if len({key(vote) for vote in tied}) > 1:
        rivals = {key(vote) for vote in tied if _when(vote) == _when(chosen)}
        rule = "latest" if len(rivals) == 1 else "lowest"
    return [vote for vote in votes if key(vote) == key(chosen)], rule


def _when(judgment: Judgment) -> datetime:
    return _BEFORE_ANY_DATE if judgment.date is None else instant(judgment.date)


def _late_and_low(judgment: Judgment) -> tuple[datetime, int]:
    return _when(judgment), -_standing(judgment)


def _relevance(judgment: Judgment) -> int:
    return int(judgment.is_relevant)


def _standing(judgment: Judgment) -> int:
    """Grades in their order, above hard negatives, above distractors."""
    if isinstance(judgment.value, int):
        return judgment.value
    return -1 if judgment.value == "hard_negative" else -2


@dataclass(frozen=True)
class Merged:
    """A golden set with one label for each passage.

    Attributes:
        dataset: Every question of the set; those without a label have no entry in its qrels.
        settled: In the order of query and passage.
    """

    golden: GoldenSet
    dataset: Dataset
    settled: tuple[Settled, ...]

    @property
    def disputed(self) -> tuple[Settled, ...]:
        """Passages whose labels disagreed."""
        return tuple(settled for settled in self.settled if settled.disputed)

    def counts(self) -> dict[str, int]:
        """What the set holds and where its labels come from, by name."""
        values = Counter(
            settled.value
            if isinstance(settled.value, str)
            else ("relevant" if settled.value > 0 else "irrelevant")
            for settled in self.settled
        )
        sources = Counter(judgment.source for judgment in self.golden.judgments)
        labelled = {settled.query_id for settled in self.settled}
        rules = Counter(settled.by for settled in self.disputed)
        return {
            "queries": len(self.golden.queries),
            "labelled_queries": len(labelled),
            "answerable_queries": len(self.dataset.answerable),
            "times_asked_in_traffic": sum(self.golden.times_asked.values()),
            "labels": len(self.golden.judgments),
            **{f"labels_{source}": sources[source] for source in SOURCES},
            "annotators": len({j.annotator for j in self.golden.judgments} - {None}),
            "labelled_passages": len(self.settled),
            **{
                name: values[name]
                for name in ("relevant", "irrelevant", "hard_negative", "distractor")
            },
            "labelled_more_than_once": sum(len(s.judgments) > 1 for s in self.settled),
            "disagreements": len(self.disputed),
            "disagreements_on_relevance": sum(s.relevance_disputed for s in self.settled),
            **{f"settled_by_{rule}": rules[rule] for rule in SETTLEMENTS[1:]},
        }


def merge(golden: GoldenSet, name: str = "golden") -> Merged:
    """Settle every passage's labels, and make a data set of them.

    A distractor has grade 0 too, so that tools which read qrels alone see that it is judged.

    Args:
        golden: All labels.
        name: The data set's, for people.
    """
    by_passage: dict[tuple[str, str], list[Judgment]] = {}
    for judgment in golden.judgments:
        by_passage.setdefault((judgment.query_id, judgment.passage_id), []).append(judgment)
    settled = tuple(settle(judgments) for _, judgments in sorted(by_passage.items()))
    qrels: dict[str, dict[str, int]] = {}
    distractors: dict[str, dict[str, DistractorKind]] = {}
    for label in settled:
        grade = label.value if isinstance(label.value, int) else 0
        qrels.setdefault(label.query_id, {})[label.passage_id] = grade
        if not isinstance(label.value, int):
            distractors.setdefault(label.query_id, {})[label.passage_id] = label.value
    dataset = Dataset(name, golden.queries, qrels, distractors, notes=golden.notes)
    return Merged(golden, dataset, settled)
