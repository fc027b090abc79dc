"""Mines hard negatives, passages ranked high but labelled not relevant, as training triplets.

An unlabelled passage may be relevant. It is taken as a negative only on request, and only if its
score is below that of the best relevant passage by a margin. `write_triplets` writes a file; all
else is pure, but for the texts that it looks up.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Literal, NamedTuple

from calibration.data.dataset import Dataset, DistractorKind
from calibration.data.text_files import write_lines
from calibration.pools import Pools
from ctxguard._support.checks import check_at_least
from ctxguard.core.scores import relative_scores
from ctxguard.core.types import ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError

NegativeKind = Literal["irrelevant", "unjudged"] | DistractorKind


class HardNegative(NamedTuple):
    """A passage ranked high, counted from 1 in the retriever's order, although not relevant."""

    passage_id: str
    kind: NegativeKind
    rank: int


def mine(
    pools: Pools,
    dataset: Dataset,
    *,
    per_query: int = 4,
    near: int = 10,
    unjudged_margin: float | None = None,
) -> dict[str, list[HardNegative]]:
    """Find the hard negatives of every answerable query.

    A hard negative is labelled not relevant (grade 0, ``hard_negative`` or ``distractor``) and
    ranked above the first relevant passage or at most ``near`` ranks below it. If no relevant
    passage was retrieved, its rank does not matter.

    Args:
        per_query: Maximum number of negatives per query.
        near: Ranks below the first relevant passage to search.
        unjudged_margin: In [0, 1); None takes labelled passages only. Otherwise unlabelled
            passages fill up the rest of ``per_query``, best rank first, if their relative score
            against the best relevant passage (DESIGN.md §4, T = 1) is at most 1 − margin: on a
            ratio scale, 0.05 takes those with at most 95% of its score (Moreira et al.,
            NV-Retriever, arXiv 2407.15831). 0 takes any unlabelled passage, even above the first
            relevant one.

    Returns:
        The hard negatives of each query with a relevant passage, by query id, labelled passages
        before unlabelled ones, then by rank; empty for a query without any.

    Raises:
        ConfigurationError: a setting is out of range, or a margin is set on scores of rank only.
    """
    margin = unjudged_margin or 0.0
    check_at_least(1, per_query=per_query)
    check_at_least(0, near=near)
    if not 0.0 <= margin < 1.0:
        raise ConfigurationError(f"margin {margin} must be in [0, 1)")
    if margin and pools.kind is ScoreKind.RANK:
        raise ConfigurationError(
            f"scores of kind {pools.kind.value!r} carry only rank, so no margin between two of "
            "them can be measured; use convex fusion"
        )
    return {
        query_id: _of_query(pools, row, dataset, near, unjudged_margin)[:per_query]
        for row, query_id in enumerate(pools.query_ids)
        if dataset.relevant(query_id)
    }


def _of_query(
    pools: Pools, row: int, dataset: Dataset, near: int, unjudged_margin: float | None
) -> list[HardNegative]:
    query_id, ids = pools.query_ids[row], pools.passage_ids[row]
    relevant, kinds = dataset.relevant(query_id), dataset.distractors.get(query_id, {})
    labelled = pools.labelled_ids(row, {*dataset.qrels[query_id], *kinds})
    are_relevant = [not relevant.keys().isdisjoint(names) for names in labelled]
    first = next((n for n, is_relevant in enumerate(are_relevant, start=1) if is_relevant), None)
    top = None if first is None else float(pools.scores[row, first - 1])
    judged, others = [], []
    candidates = zip(ids, labelled, are_relevant, pools.scores[row].tolist(), strict=False)
    for rank, (passage_id, names, is_relevant, score) in enumerate(candidates, start=1):
        if is_relevant:
            continue
        if names:
            if first is None or rank <= first + near:
                own = (kinds[name] for name in names if name in kinds)
                kind: NegativeKind = next(own, "irrelevant")
                judged.append(HardNegative(passage_id, kind, rank))
        elif unjudged_margin is not None and top is not None:
            # No ratio exists below a top score of zero.
            apart = top > 0.0 or pools.kind is not ScoreKind.RATIO
            relative = relative_scores(pools.kind, (top, score))[1] if apart else 1.0
            if relative <= 1.0 - unjudged_margin:
                others.append(HardNegative(passage_id, "unjudged", rank))
    return judged + others


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
        mined: From ``mine``.
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
    """Write triplets as JSONL, and return their number.

    Raises:
        CalibrationError: there are no triplets; no file is written.
        OSError: the file cannot be written.
    """
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if not lines:
        raise CalibrationError(
            "no hard negative was found: label more of the retrieved passages, or also take "
            "unlabelled ones, some of which may be relevant (the key unjudged-margin)"
        )
    write_lines(path, lines)
    return len(lines)
