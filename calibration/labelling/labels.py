"""Labelled queries: the data set, its digest, its parts.

Pure: no files here, ``calibration.labelling.datasets`` reads them.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from ctxguard.errors import CalibrationError, ConfigurationError

DistractorKind = Literal["hard_negative", "distractor"]


@dataclass(frozen=True, slots=True)
class Query:
    """A question with an id; ``metadata`` holds the columns that may group or segment it."""

    query_id: str
    text: str
    metadata: Mapping[str, object] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Dataset:
    """Queries and what is known of the passages that answer them.

    Attributes:
        name: For people.
        queries: In the order of the file, ids distinct.
        qrels: Grade of each judged passage, by query id; 0 is judged not relevant, and absence
            is not judged.
        distractors: Passages known to mislead, by query id.
        pools: Passages that belong to a query, in order, where the collection says so.
        notes: What was mended, left out or counted on the way here, one readable line each.
    """

    name: str
    queries: tuple[Query, ...]
    qrels: Mapping[str, Mapping[str, int]]
    distractors: Mapping[str, Mapping[str, DistractorKind]] = field(default_factory=dict)
    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.queries)

    def relevant(self, query_id: str, min_grade: int = 1) -> dict[str, int]:
        """Grades of a query's passages of at least ``min_grade``, in the order of the file.

        >>> Dataset("d", (Query("q", "?"),), {"q": {"a": 2, "b": 0}}).relevant("q")
        {'a': 2}
        """
        grades = self.qrels.get(query_id, {})
        return {passage_id: grade for passage_id, grade in grades.items() if grade >= min_grade}

    @cached_property
    def max_grade(self) -> int | None:
        """The highest grade given to any passage; None where nothing is labelled relevant."""
        highest = max((g for grades in self.qrels.values() for g in grades.values()), default=0)
        return highest if highest > 0 else None

    @cached_property
    def answerable(self) -> tuple[str, ...]:
        """Ids of the queries that have at least one relevant passage (grade 1 or more)."""
        return tuple([query.query_id for query in self.queries if self.relevant(query.query_id)])

    def subset(self, query_ids: Iterable[str]) -> "Dataset":
        """The same collection with these queries only, in its own order.

        Raises:
            ConfigurationError: an id that the collection does not hold.
        """
        wanted = set(query_ids)
        queries = tuple([query for query in self.queries if query.query_id in wanted])
        if len(queries) != len(wanted):
            strangers = sorted(wanted - {query.query_id for query in queries})
            raise ConfigurationError(f"{self.name} has no query {strangers[0]!r}")
        return replace(
            self,
            queries=queries,
            qrels={q: grades for q, grades in self.qrels.items() if q in wanted},
            distractors={q: kinds for q, kinds in self.distractors.items() if q in wanted},
            pools={q: ids for q, ids in self.pools.items() if q in wanted},
        )

    def digest(self) -> str:
        """SHA-256 of the content as hexadecimal: name, notes and the order of lines left out."""
        content = {
            "queries": {q.query_id: [q.text, q.metadata] for q in self.queries},
            "qrels": self.qrels,
            "distractors": self.distractors,
            "pools": self.pools,
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(canonical.encode()).hexdigest()


def unknown_passages(dataset: Dataset, passage_ids: Iterable[str]) -> tuple[str, ...]:
    """Labelled passages that a corpus does not hold, sorted: no retriever can find them.

    Args:
        dataset: Whose qrels, distractors and pools are looked at.
        passage_ids: The corpus.
    """
    labelled: set[str] = set()
    for passages in (*dataset.qrels.values(), *dataset.distractors.values()):
        labelled.update(passages)
    for pool in dataset.pools.values():
        labelled.update(pool)
    return tuple(sorted(labelled.difference(passage_ids)))


def same_text(first: Dataset, second: Dataset) -> tuple[tuple[str, str], ...]:
    """Pairs of query ids, one of each, with the same text but for case and white space.

    Between a split to calibrate on and one to evaluate on there should be none: a pair is a
    question that was seen before.
    """
    by_text = defaultdict(list)
    for query in first.queries:
        by_text[_folded(query.text)].append(query.query_id)
    return tuple(
        [
            (query_id, query.query_id)
            for query in second.queries
            for query_id in by_text.get(_folded(query.text), ())
        ]
    )


def split_by_query(
    dataset: Dataset, shares: Sequence[float], seed: int = 0, group_by: str | None = None
) -> tuple[Dataset, ...]:
    """Parts of a data set with no query, group or question in two of them.

    Groups are ordered by SHA-256 of the seed and their first id, and dealt out in that order,
    so that a seed gives the same parts on every platform. Queries with the same text (but for
    case and white space) are one group, whatever their ids, and are counted in the notes.

    Args:
        dataset: What to split.
        shares: Each part's share of the queries, > 0, summing to 1. Whole groups move, so a
            part's size may differ by a group.
        seed: Any whole number.
        group_by: A metadata column whose equal values stay together; a query without it is a
            group of its own.

    Returns:
        One data set for each share, in the order of the shares.

    Raises:
        ConfigurationError: shares that do not sum to 1, or a column that no query has.
        CalibrationError: too few groups for a query in every part.
    """
    if not shares or min(shares) <= 0.0 or abs(sum(shares) - 1.0) > 1e-9:
        raise ConfigurationError(f"shares {tuple(shares)!r} must each be > 0 and sum to 1")
    groups, notes = _groups(dataset, group_by)
    groups.sort(key=lambda group: hashlib.sha256(f"{seed}\0{min(group)}".encode()).digest())
    bounds = list(accumulate(shares))[:-1]
    parts: list[list[str]] = [[] for _ in shares]
    dealt = 0
    for group in groups:
        # The middle of a group decides, so that sizes are off by half a group at the most.
        middle = (dealt + len(group) / 2) / len(dataset)
        parts[sum(middle > bound for bound in bounds)] += group
        dealt += len(group)
    if not all(parts):
        raise CalibrationError(
            f"{dataset.name}: {len(dataset)} queries in {len(groups)} groups cannot fill "
            f"{len(shares)} parts of shares {tuple(shares)!r}; more labelled queries are needed"
        )
    return tuple(
        [
            replace(part, name=f"{dataset.name} part {n} of {len(shares)}", notes=notes)
            for n, part in enumerate(map(dataset.subset, parts), start=1)
        ]
    )


def _groups(dataset: Dataset, group_by: str | None) -> tuple[list[list[str]], tuple[str, ...]]:
    """Query ids that must stay together, and the data set's notes with what was found."""
    notes = list(dataset.notes)
    leader = {query.query_id: query.query_id for query in dataset.queries}

    def find(query_id: str) -> str:
        while leader[query_id] != query_id:
            leader[query_id] = query_id = leader[leader[query_id]]
        return query_id

    first_with: dict[str, str] = {}

    def join(query_id: str, key: str) -> bool:
        first = first_with.setdefault(key, query_id)
        leader[find(query_id)] = find(first)
        return first != query_id

    repeated = sum([join(q.query_id, "text:" + _folded(q.text)) for q in dataset.queries])
    if repeated:
        notes.append(f"{repeated} queries repeat another's text and stay in its part")
    if group_by is not None:
        columns = {column for query in dataset.queries for column in query.metadata or {}}
        if group_by not in columns:
            raise ConfigurationError(
                f"no query has the metadata column {group_by!r}; the columns are "
                + (", ".join(sorted(columns)) or "none")
            )
        missing = 0
        for query in dataset.queries:
            value = (query.metadata or {}).get(group_by)
            if value is None:
                missing += 1
            else:
                join(query.query_id, "group:" + json.dumps(value, sort_keys=True, default=str))
        if missing:
            notes.append(f"{missing} queries have no {group_by!r} and stand alone")
    members: dict[str, list[str]] = {}
    for query in dataset.queries:
        members.setdefault(find(query.query_id), []).append(query.query_id)
    return list(members.values()), tuple(notes)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
