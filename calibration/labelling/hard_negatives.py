"""Hard negatives: what a retriever ranks high and the labels call wrong, as training triplets.

Unjudged is not irrelevant. A passage without a label is a negative only where it is asked for,
and then only where the retriever itself holds it worse than the best relevant one by a margin.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

from calibration.labelling.labels import Dataset, DistractorKind
from calibration.labelling.textfiles import Record, notes_of, read_records
from calibration.labelling.writers import write_lines
from calibration.replay import Pools
from ctxguard.errors import CalibrationError, ConfigurationError, DataError
from ctxguard.scores import is_relative, relative_score
from ctxguard.types import ScoreKind

NegativeKind = Literal["irrelevant", "unjudged"] | DistractorKind

DEFAULT_PER_QUERY = 4
DEFAULT_NEAR = 10
DEFAULT_MARGIN = 0.05
"""Of the positive's score, as in Moreira et al., NV-Retriever (arXiv 2407.15831)."""

_FIELDS = ("query_id", "query", "positive_id", "positive", "negative_id", "negative", "kind")


@dataclass(frozen=True, slots=True)
class HardNegative:
    """A passage that misled the retriever.

    Attributes:
        rank: 1-based, as retrieved.
        best_relevant_rank: Of the first relevant passage; None where none was retrieved.
    """

    query_id: str
    passage_id: str
    kind: NegativeKind
    rank: int
    best_relevant_rank: int | None


@dataclass(frozen=True)
class Mining:
    """Hard negatives, and how many queries gave any.

    Attributes:
        negatives: Query by query, the highest ranked first; unjudged ones after judged ones.
        answerable: Queries that have a relevant passage: the others can teach no order.
        without_negative: Answerable queries that gave none.
    """

    negatives: tuple[HardNegative, ...]
    answerable: int
    without_negative: int


@dataclass(frozen=True, slots=True)
class Triplet:
    """A question, a passage that answers it, and one that only looks as if it did."""

    query_id: str
    query: str
    positive_id: str
    positive: str
    negative_id: str
    negative: str
    kind: str


def mine(
    pools: Pools,
    dataset: Dataset,
    *,
    per_query: int = DEFAULT_PER_QUERY,
    near: int = DEFAULT_NEAR,
    unjudged_margin: float | None = None,
) -> Mining:
    """Find the hard negatives of every answerable query.

    Labelled as not relevant (grade 0, a hard negative, a distractor) and ranked above the first
    relevant passage or at most ``near`` ranks below it; anywhere, where no relevant one was
    retrieved.

    Args:
        pools: The candidates of each query.
        dataset: The labels.
        per_query: The most negatives of one query, ≥ 1.
        near: Ranks below the first relevant passage, ≥ 0.
        unjudged_margin: None takes judged passages only. Otherwise unjudged ones fill up what
            is left of ``per_query``, the highest ranked first, if their relative score against
            the best relevant passage (DESIGN.md §4, T = 1) is at most 1 − margin: on a ratio
            scale, 0.05 takes those of at most 95% of its score. With 0 any unjudged one, also
            above the first relevant. In [0, 1).

    Raises:
        ConfigurationError: a setting out of range, or a margin on scores that carry rank only.
    """
    _check(pools.kind, per_query, near, unjudged_margin)
    found: list[HardNegative] = []
    answerable = without = 0
    for row, query_id in enumerate(pools.query_ids):
        if not dataset.relevant(query_id):
            continue
        answerable += 1
        of_query = _of_query(pools, row, dataset, near, unjudged_margin)[:per_query]
        without += not of_query
        found += of_query
    return Mining(tuple(found), answerable, without)


def _of_query(
    pools: Pools, row: int, dataset: Dataset, near: int, unjudged_margin: float | None
) -> list[HardNegative]:
    query_id, ids = pools.query_ids[row], pools.passage_ids[row]
    relevant = dataset.relevant(query_id)
    first = next((n for n, passage_id in enumerate(ids, start=1) if passage_id in relevant), None)
    judged, others = [], []
    for rank, passage_id in enumerate(ids, start=1):
        if passage_id in relevant:
            continue
        kind = _kind(dataset, query_id, passage_id)
        negative = HardNegative(query_id, passage_id, kind, rank, first)
        if kind != "unjudged":
            if first is None or rank <= first + near:
                judged.append(negative)
        elif unjudged_margin is not None and first is not None:
            top, score = float(pools.scores[row, first - 1]), float(pools.scores[row, rank - 1])
            # A top of zero has no ratio below it.
            apart = top > 0.0 or pools.kind is not ScoreKind.RATIO
            relative = relative_score(pools.kind, top, score) if apart else 1.0
            if relative <= 1.0 - unjudged_margin:
                others.append(negative)
    return judged + others


def _kind(dataset: Dataset, query_id: str, passage_id: str) -> NegativeKind:
    kind = dataset.distractors.get(query_id, {}).get(passage_id)
    if kind is not None:
        return kind
    return "irrelevant" if passage_id in dataset.qrels.get(query_id, {}) else "unjudged"


def _check(kind: ScoreKind, per_query: int, near: int, unjudged_margin: float | None) -> None:
    if per_query < 1:
        raise ConfigurationError(f"per_query {per_query} must be at least 1")
    if near < 0:
        raise ConfigurationError(f"near {near} must be at least 0")
    if unjudged_margin is None:
        return
    if not 0.0 <= unjudged_margin < 1.0:
        raise ConfigurationError(f"margin {unjudged_margin} must be in [0, 1)")
    if unjudged_margin > 0.0 and not is_relative(kind):
        raise ConfigurationError(
            f"scores of kind {kind.value!r} carry rank only, so there is no margin between two; "
            "use convex fusion"
        )


def triplets(
    mining: Mining, dataset: Dataset, text_of: Callable[[str], str | None], counts: Counter[str]
) -> Iterator[Triplet]:
    """Negatives beside positives, with their text.

    Each negative and each relevant passage of a query is there at least once: the shorter list
    is gone through again until the longer is at its end.

    Args:
        mining: The negatives.
        dataset: That they were mined with.
        text_of: The text that a reranker would read; None for a passage that is not at hand.
        counts: Where relevant passages without text are counted.
    """
    questions = {query.query_id: query.text for query in dataset.queries}
    negatives: dict[str, list[HardNegative]] = {}
    for negative in mining.negatives:
        negatives.setdefault(negative.query_id, []).append(negative)
    for query_id, wrong in negatives.items():
        right = [
            (passage_id, text)
            for passage_id in dataset.relevant(query_id)
            if (text := text_of(passage_id)) is not None
        ]
        counts["relevant passages are not at hand and are left out"] += len(
            dataset.relevant(query_id)
        ) - len(right)
        if not right:
            continue
        pairs = zip(cycle(right), cycle(wrong), strict=True)
        for (positive_id, positive), negative in islice(pairs, max(len(right), len(wrong))):
            text = text_of(negative.passage_id)
            if text is not None:
                yield Triplet(
                    query_id,
                    questions[query_id],
                    positive_id,
                    positive,
                    negative.passage_id,
                    text,
                    negative.kind,
                )


def write_triplets(path: Path, rows: Iterable[Triplet]) -> int:
    """Write triplets as JSONL, and return how many there were.

    ``query``, ``positive`` and ``negative`` are text; the other fields say whose it is.

    Raises:
        CalibrationError: there is none; nothing is written then.
        OSError: the file cannot be written.
    """
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    if not lines:
        raise CalibrationError(
            "no hard negative was found: label more of what is retrieved "
            "(`ctxguard golden coverage --out` lists it), or take unjudged passages as well, "
            "some of which may be relevant (--include-unjudged)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, lines)
    return len(lines)


def read_triplets(path: Path | str) -> tuple[tuple[Triplet, ...], tuple[str, ...]]:
    """Triplets of a JSONL file, and notes on what was mended.

    ``query``, ``positive`` and ``negative`` are needed; ids may be missing and are then empty.

    Raises:
        DataError: a line that cannot be read, a text that is empty, or no triplet.
    """
    counts: Counter[str] = Counter()
    rows = tuple(_triplet(record) for record in read_records(Path(path), counts))
    if not rows:
        raise DataError("holds no triplet", path=path)
    return rows, notes_of(counts)


def _triplet(record: Record) -> Triplet:
    texts = {name: record.text(name) for name in ("query", "positive", "negative")}
    for name, text in texts.items():
        if not text.strip():
            raise record.error(f"{name} is empty")
    others = {name: record.text(name, default="") for name in _FIELDS if name not in texts}
    return Triplet(**texts, **others)
