"""Hard negatives: passages ranked high but labelled not relevant, as training triplets.

Only labelled passages are taken: an unlabelled one may be relevant.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Literal, NamedTuple

from calibration.data.dataset import Dataset, DistractorKind
from calibration.data.text_files import write_lines
from calibration.replay import Pools
from ctxguard.errors import CalibrationError, ConfigurationError


class HardNegative(NamedTuple):
    """A passage that is not relevant but ranked high.

    Attributes:
        rank: Its 1-based rank in the retriever's order.
    """

    passage_id: str
    kind: Literal["irrelevant"] | DistractorKind
    rank: int


def mine(
    pools: Pools, dataset: Dataset, *, per_query: int = 4, near: int = 10
) -> dict[str, list[HardNegative]]:
    """Find the hard negatives of every answerable query.

    A hard negative is labelled not relevant (grade 0, ``hard_negative`` or ``distractor``) and
    ranked above the first relevant passage or at most ``near`` ranks below it. If no relevant
    passage was retrieved, its rank does not matter.

    Args:
        per_query: Maximum number of negatives per query, ≥ 1.
        near: Ranks below the first relevant passage to search, ≥ 0.

    Returns:
        The hard negatives of each query with a relevant passage by rank, by query id; empty for a
        query without any.

    Raises:
        ConfigurationError: a setting is out of range.
    """
    if per_query < 1 or near < 0:
        raise ConfigurationError(
            f"per_query {per_query} must be at least 1, and near {near} at least 0"
        )
    mined = {}
    for query_id, ids in zip(pools.query_ids, pools.passage_ids, strict=True):
        if relevant := dataset.relevant(query_id):
            kinds = dataset.distractors.get(query_id, {})
            first = next((rank for rank, each in enumerate(ids, 1) if each in relevant), len(ids))
            judged = dataset.judged(query_id, ids[: first + near])
            mined[query_id] = [
                HardNegative(passage_id, kinds.get(passage_id, "irrelevant"), rank)
                for rank, (passage_id, is_judged) in enumerate(zip(ids, judged, strict=False), 1)
                if is_judged and passage_id not in relevant
            ][:per_query]
    return mined


def triplets(
    mined: Mapping[str, Sequence[HardNegative]],
    dataset: Dataset,
    text_of: Callable[[str], str | None],
    counts: Counter[str],
) -> Iterator[dict[str, str]]:
    """Pair the negatives of each query with its relevant passages, one object for each pair.

    Each negative and each relevant passage of a query occurs at least once: the shorter list is
    repeated until the longer one ends.

    Args:
        mined: The negatives, from ``mine``.
        dataset: The data set in which they were found.
        text_of: Returns the text that a reranker would read; None for a passage without text here.
        counts: Receives the number of relevant passages without text.
    """
    questions = {query.query_id: query.text for query in dataset.queries}
    for query_id, wrong in mined.items():
        relevant = dataset.relevant(query_id) if wrong else {}
        texts = [(passage_id, text_of(passage_id)) for passage_id in relevant]
        right = [(passage_id, text) for passage_id, text in texts if text is not None]
        missing = len(relevant) - len(right)
        counts["relevant passages are not in the index and are left out"] += missing
        if not right:
            continue
        pairs = zip(cycle(right), cycle(wrong), strict=True)
        for (positive_id, positive), negative in islice(pairs, max(len(right), len(wrong))):
            text = text_of(negative.passage_id)
            if text is not None:
                yield {
                    "query_id": query_id,
                    "query": questions[query_id],
                    "positive_id": positive_id,
                    "positive": positive,
                    "negative_id": negative.passage_id,
                    "negative": text,
                    "kind": negative.kind,
                }


def write_triplets(path: Path, rows: Iterable[Mapping[str, str]]) -> int:
    """Write triplets as JSONL, one object per line.

    Returns:
        Number of written triplets.

    Raises:
        CalibrationError: there are no triplets; no file is written.
        OSError: the file cannot be written.
    """
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if not lines:
        raise CalibrationError(
            "no hard negative was found: label more of the retrieved passages (`ctxguard golden "
            "coverage --out` lists them)"
        )
    write_lines(path, lines)
    return len(lines)
