"""Holds labelled queries: the data set, its digest, its parts.

Pure: ``calibration.data.readers`` reads the files.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeVar

from ctxguard._support.words import count
from ctxguard.core.types import id_text
from ctxguard.errors import CalibrationError, ConfigurationError

DistractorKind = Literal["hard_negative", "distractor"]

_Label = TypeVar("_Label")


@dataclass(frozen=True, slots=True)
class Query:
    """A question with an id, which may be given as a whole number or a UUID.

    Attributes:
        metadata: Columns of the question, such as its known answers.
    """

    query_id: str
    text: str
    metadata: Mapping[str, object] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "query_id", id_text(self.query_id))


@dataclass(frozen=True)
class Dataset:
    """Queries, with labels of the passages that answer them.

    Attributes:
        queries: In the order of the file, ids distinct.
        qrels: Grade of each judged passage, by query id. 0 is judged not relevant; an absent
            passage is not judged. An empty entry says that no passage answers the query.
        distractors: Passages known to mislead, by query id.
        keywords: Words and phrases that an answer to a query needs, by query id.
        notes: Repairs, omissions and counts made in reading, one readable line each.

    Ids that are whole numbers or UUIDs become their texts (`ctxguard.core.types.id_text`).

    Raises:
        ConfigurationError: at construction, if an id has another type.
    """

    name: str
    queries: tuple[Query, ...]
    qrels: Mapping[str, Mapping[str, int]]
    distractors: Mapping[str, Mapping[str, DistractorKind]] = field(default_factory=dict)
    keywords: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("qrels", "distractors"):
            object.__setattr__(self, name, _by_ids(getattr(self, name)))
        keywords = {id_text(query_id): words for query_id, words in self.keywords.items()}
        object.__setattr__(self, "keywords", keywords)

    def __len__(self) -> int:
        return len(self.queries)

    def relevant(self, query_id: str) -> dict[str, int]:
        """Return the grades of a query's relevant passages: 1 or more, in order of the file."""
        grades = self.qrels.get(query_id, {})
        return {passage_id: grade for passage_id, grade in grades.items() if grade > 0}

    @cached_property
    def max_grade(self) -> int | None:
        """The highest grade of any passage; None if no passage is labelled relevant."""
        highest = max((g for grades in self.qrels.values() for g in grades.values()), default=0)
        return highest if highest > 0 else None

    @cached_property
    def positives_only(self) -> bool:
        """Whether all labels are of relevant passages: no grade 0, no distractor, no empty entry.

        Then an unlabelled passage may be irrelevant or unjudged; otherwise it was not judged.
        """
        return not any(self.distractors.values()) and all(
            grades and min(grades.values()) > 0 for grades in self.qrels.values()
        )

    def is_labelled(self, query_id: str) -> bool:
        """Return whether a query has a labelled passage, or an empty entry in the qrels."""
        return query_id in self.qrels or bool(self.distractors.get(query_id))

    @cached_property
    def answerable(self) -> tuple[str, ...]:
        """Ids of the queries with at least one relevant passage."""
        ids = [query.query_id for query in self.queries]
        return tuple([each for each in ids if self.relevant(each)])

    @cached_property
    def groups(self) -> Mapping[str, str]:
        """The group of nearly equal questions to which each query belongs, by query id.

        Questions whose sets of words have a Jaccard similarity of 0.8 or more are in one group,
        named after its first id. They share a fold wherever some queries measure what others chose.

        >>> texts = ["what is BM25?", "What is BM25", "who wrote it?"]
        >>> Dataset("d", tuple(map(Query, "abc", texts)), {}).groups
        {'a': 'a', 'b': 'a', 'c': 'c'}
        """
        return _nearly_equal([(query.query_id, query.text) for query in self.queries])

    def subset(self, query_ids: Iterable[str]) -> "Dataset":
        """Return this data set with only these queries, in its own order.

        Raises:
            ConfigurationError: the collection does not hold an id.
        """
        wanted = set(query_ids)
        queries = tuple([query for query in self.queries if query.query_id in wanted])
        if len(queries) != len(wanted):
            unknown = sorted(wanted - {query.query_id for query in queries})
            raise ConfigurationError(f"{self.name} has no query {unknown[0]!r}")
        return replace(
            self,
            queries=queries,
            qrels={q: grades for q, grades in self.qrels.items() if q in wanted},
            distractors={q: kinds for q, kinds in self.distractors.items() if q in wanted},
            keywords={q: words for q, words in self.keywords.items() if q in wanted},
        )

    def digest(self) -> str:
        """Return the SHA-256 of the content, regardless of name, notes and order of lines."""
        content = {
            "queries": {q.query_id: [q.text, q.metadata] for q in self.queries},
            "qrels": self.qrels,
            "distractors": self.distractors,
            **({"keywords": self.keywords} if self.keywords else {}),
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(canonical.encode()).hexdigest()


def _by_ids(labels: Mapping[str, Mapping[str, _Label]]) -> dict[str, dict[str, _Label]]:
    return {
        id_text(query_id): {id_text(passage_id): label for passage_id, label in own.items()}
        for query_id, own in labels.items()
    }


def named_passages(dataset: Dataset) -> frozenset[str]:
    """Return every passage that the qrels or the distractors name."""
    tables = (dataset.qrels, dataset.distractors)
    return frozenset(one for table in tables for passages in table.values() for one in passages)


def unknown_passages(dataset: Dataset, passage_ids: Container[str]) -> tuple[str, ...]:
    """Return labelled passages missing from a corpus's ids, sorted: no retriever can find them."""
    return tuple(sorted(one for one in named_passages(dataset) if one not in passage_ids))


def same_text(first: Dataset, second: Dataset) -> tuple[tuple[str, str], ...]:
    """Pair the ids of both sets' queries whose texts differ only in case and white space.

    Calibration and evaluation splits should have no such pair: it is a question seen before.
    """
    by_text = _ids_by_text(first)
    return tuple(
        [
            (query_id, query.query_id)
            for query in second.queries
            for query_id in by_text.get(folded(query.text), ())
        ]
    )


def split_by_query(dataset: Dataset, shares: Sequence[float], seed: int = 0) -> tuple[Dataset, ...]:
    """Split a data set into parts, so that no query and no question is in more than one.

    Queries with the same text (apart from case and white space) are one group, whatever their
    ids, and are counted in the notes. Groups are ordered by SHA-256 of the seed and their first
    id, and dealt out in that order, so that a seed gives the same parts on every platform.

    Args:
        shares: Each part's share of the queries, > 0, summing to 1. Groups are not divided, so a
            part's size may differ by a group.

    Raises:
        ConfigurationError: the shares do not sum to 1.
        CalibrationError: there are too few groups to put a query into every part.
    """
    if not shares or min(shares) <= 0.0 or abs(sum(shares) - 1.0) > 1e-9:
        raise ConfigurationError(f"shares {tuple(shares)!r} must each be > 0 and sum to 1")
    groups = list(_ids_by_text(dataset).values())
    notes = list(dataset.notes)
    repeated = len(dataset) - len(groups)
    if repeated:
        notes.append(
            f"{count(repeated, 'query')} with the same text as another: kept in the same part"
        )
    groups.sort(key=lambda group: hashlib.sha256(f"{seed}\0{min(group)}".encode()).digest())
    bounds = list(accumulate(shares))[:-1]
    parts: list[list[str]] = [[] for _ in shares]
    dealt = 0
    for group in groups:
        # The middle of a group decides, so a size is off by at most half a group.
        middle = (dealt + len(group) / 2) / len(dataset)
        parts[sum(middle > bound for bound in bounds)] += group
        dealt += len(group)
    if not all(parts):
        raise CalibrationError(
            f"{dataset.name}: {len(dataset)} queries in {len(groups)} groups cannot fill "
            f"{len(shares)} parts with shares {tuple(shares)!r}; more labelled queries are needed"
        )
    return tuple(
        [
            replace(part, name=f"{dataset.name} part {n} of {len(shares)}", notes=tuple(notes))
            for n, part in enumerate(map(dataset.subset, parts), start=1)
        ]
    )


def _ids_by_text(dataset: Dataset) -> dict[str, list[str]]:
    """Group the ids of the queries by folded text, in the order of the data set."""
    by_text = defaultdict(list)
    for query in dataset.queries:
        by_text[folded(query.text)].append(query.query_id)
    return dict(by_text)


_NEARLY_EQUAL = 0.8


def _nearly_equal(questions: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the first id of each question's group.

    Two sets with this similarity share one of their rarest words, so few pairs are compared
    (prefix filtering; Bayardo, Ma and Srikant, Scaling up all pairs similarity search, WWW 2007).
    """
    words = {query_id: frozenset(re.findall(r"\w+", folded(text))) for query_id, text in questions}
    common = Counter(word for own in words.values() for word in own)
    place = {query_id: at for at, query_id in enumerate(words)}
    group, seen = dict[str, str](), defaultdict[str, list[str]](list)
    for query_id, own in words.items():
        rarest = sorted(own, key=lambda word: (common[word], word))
        prefix = rarest[: len(own) - math.ceil(_NEARLY_EQUAL * len(own)) + 1]
        near = {other for word in prefix for other in seen[word]}
        joined = {
            group[other]
            for other in near
            if len(own & words[other]) >= _NEARLY_EQUAL * len(own | words[other])
        }
        group[query_id] = min(joined, key=place.__getitem__, default=query_id)
        if len(joined) > 1:
            group |= {other: group[query_id] for other, its in group.items() if its in joined}
        for word in prefix:
            seen[word].append(query_id)
    return group


def folded(text: str) -> str:
    """Fold case and white space; questions with equal results count as one."""
    return " ".join(text.casefold().split())
