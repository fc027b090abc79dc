"""Passages that a policy dropped: irrelevant ones, and relevant ones.

Pure, except that it looks up the passages shown as examples.
"""

import numpy as np

from calibration.calibrate_route import RouteOutcome
from calibration.data.dataset import Dataset
from calibration.evaluate import bootstrap_ratio
from calibration.pool_labels import PoolLabels
from calibration.report.data import Example, Examples
from calibration.report.passages import PassageOf, one_line, passage_or_none, snippet
from ctxguard.core.types import FloatArray

SHOWN = 6

Candidate = tuple[int, int, int]
"""The row of a query, a position in its pool, and the candidate's rank in the policy's order."""


def dropped_passages(
    outcome: RouteOutcome,
    dataset: Dataset,
    passage: PassageOf | None,
    *,
    bare_k: int,
    seed: int = 0,
) -> tuple[Examples, Examples]:
    """Count what was dropped rightly and wrongly, with the worst of each as examples.

    Args:
        outcome: Its chosen contexts, of queries that had no part in the choice.
        dataset: The queries, with their texts.
        passage: Returns a passage by its id, or raises KeyError; None shows ids only.
        bare_k: Irrelevant passages are counted among the retriever's first ``bare_k``.

    Returns:
        Irrelevant passages of the first ``bare_k``, labelled distractors shown first; and
        relevant passages of the baseline of recall loss, the highest grades shown first.
    """
    pools, labels = outcome.route.measured
    order, kept = outcome.chosen.order, outcome.chosen.kept
    irrelevant: list[Candidate] = []
    relevant: list[Candidate] = []
    for row, n in enumerate(pools.lengths.tolist()):
        for rank, position in enumerate(order[row, :n].tolist(), 1):
            candidate = (row, position, rank)
            if labels.relevant[row, position]:
                if labels.in_baseline[row, position]:
                    relevant.append(candidate)
            elif position < bare_k:
                irrelevant.append(candidate)

    def worst(candidate: Candidate) -> tuple[float, int, int, str]:
        row, position, _ = candidate
        grade = int(labels.grades[row, position])
        # The utility of an irrelevant passage is lower if it is labelled as misleading.
        severity = -grade if grade else float(labels.utilities[row, position])
        return severity, -int(labels.judged[row, position]), position, pools.query_ids[row]

    def per_query(candidates: list[Candidate]) -> FloatArray:
        counts = np.bincount([row for row, *_ in candidates], minlength=len(pools))
        return counts.astype(float)

    def examples(candidates: list[Candidate]) -> Examples:
        dropped = [each for each in candidates if not kept[each[0], each[2] - 1]]
        # The worst comes last, so that it is the one that a query keeps.
        worst_of = {each[0]: each for each in sorted(dropped, key=worst, reverse=True)}
        shown = sorted(worst_of.values(), key=worst)[:SHOWN]
        return Examples(
            total=len(candidates),
            dropped=len(dropped),
            share=bootstrap_ratio(per_query(dropped), per_query(candidates), seed=seed),
            shown=tuple(_example(each, outcome, dataset, passage) for each in shown),
        )

    return examples(irrelevant), examples(relevant)


def _example(
    candidate: Candidate, outcome: RouteOutcome, dataset: Dataset, passage_of: PassageOf | None
) -> Example:
    row, position, rank = candidate
    (pools, labels), chances = outcome.route.measured, outcome.route.chances
    query_id, passage_id = pools.query_ids[row], pools.passage_ids[row][position]
    passage = passage_or_none(passage_id, passage_of)
    text = next(query.text for query in dataset.queries if query.query_id == query_id)
    return Example(
        query_id=one_line(query_id),
        query=one_line(text),
        passage_id=one_line(passage_id),
        title="" if passage is None else one_line(passage.title),
        snippet=None if passage is None else snippet(passage.text),
        label=_label(labels, row, position),
        retrieved_rank=position + 1,
        rank=rank,
        probability=None if chances is None else float(chances[row, position]),
    )


def _label(labels: PoolLabels, row: int, position: int) -> str:
    grade, negative = int(labels.grades[row, position]), labels.negatives[row][position]
    if grade > 0:
        return f"relevant, grade {grade} of {labels.top_grade}"
    if negative is not None:
        return f"labelled {negative.value.replace('_', ' ')}"
    return "judged irrelevant" if labels.judged[row, position] else "not judged"
