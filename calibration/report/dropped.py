"""Passages that a policy dropped: irrelevant ones, and relevant ones.

Pure, except that it looks up the passages shown as examples.
"""

from collections.abc import Callable
from contextlib import suppress
from math import floor

import numpy as np

from calibration.data.dataset import Dataset
from calibration.evaluate import bootstrap_ratio
from calibration.pool_labels import PoolLabels
from calibration.replay import Pools
from calibration.report.data import Example, Examples
from ctxguard.core.decision import decide
from ctxguard.core.policies import Policy
from ctxguard.core.render import sanitise
from ctxguard.core.types import FloatArray, Passage, Verdict

SHOWN = 6
_SNIPPET = 240
_PRECISION = 10_000

PassageOf = Callable[[str], Passage]


Candidate = tuple[int, int, Verdict]
"""The row of a query, a position in its pool, and the policy's verdict on the candidate there."""


def dropped_passages(
    pools: Pools,
    labels: PoolLabels,
    dataset: Dataset,
    policy: Policy,
    passage: PassageOf | None,
    *,
    bare_k: int,
    seed: int = 0,
) -> tuple[Examples, Examples]:
    """Count what was dropped rightly and wrongly, with the worst of each as examples.

    Args:
        dataset: The queries of the pools, with their texts.
        policy: The policy of the route.
        passage: Returns a passage by its id, or raises KeyError; None shows ids only.
        bare_k: Irrelevant passages are counted among the retriever's first ``bare_k``.

    Returns:
        Irrelevant passages of the first ``bare_k``, labelled distractors shown first; and
        relevant passages of the baseline of recall loss, the highest grades shown first.
    """
    irrelevant: list[Candidate] = []
    relevant: list[Candidate] = []
    for row, ranking in enumerate(pools.rankings()):
        decision = decide(ranking, policy)
        for position, verdict in zip(decision.order, decision.verdicts, strict=False):
            candidate = (row, position, verdict)
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
        dropped = [candidate for candidate in candidates if not candidate[2].kept]
        # The worst comes last, so that it is the one that a query keeps.
        worst_of = {each[0]: each for each in sorted(dropped, key=worst, reverse=True)}
        shown = sorted(worst_of.values(), key=worst)[:SHOWN]
        return Examples(
            total=len(candidates),
            dropped=len(dropped),
            share=bootstrap_ratio(per_query(dropped), per_query(candidates), seed=seed),
            shown=tuple(_example(c, pools, labels, dataset, passage) for c in shown),
        )

    return examples(irrelevant), examples(relevant)


def _example(
    candidate: Candidate,
    pools: Pools,
    labels: PoolLabels,
    dataset: Dataset,
    passage_of: PassageOf | None,
) -> Example:
    row, position, verdict = candidate
    query_id = pools.query_ids[row]
    passage = None
    if passage_of is not None:
        with suppress(KeyError):
            passage = passage_of(verdict.passage_id)
    text = next(query.text for query in dataset.queries if query.query_id == query_id)
    return Example(
        query_id=_line(query_id),
        query=_line(text),
        passage_id=_line(verdict.passage_id),
        title="" if passage is None else _line(passage.title),
        snippet=None if passage is None else _snippet(passage.text),
        label=_label(labels, row, position),
        retrieved_rank=position + 1,
        rank=0 if verdict.rank is None else verdict.rank,
        relative_score=verdict.relative_score,
        probability=verdict.probability,
        reason="" if verdict.reason is None else verdict.reason.value,
        kept_if=tuple(
            # Rounded down, so that the value shown would keep it.
            (t.setting, floor(t.value * _PRECISION) / _PRECISION)
            for t in verdict.kept_if
        ),
    )


def _label(labels: PoolLabels, row: int, position: int) -> str:
    grade, negative = int(labels.grades[row, position]), labels.negatives[row][position]
    if grade > 0:
        return f"relevant, grade {grade} of {labels.top_grade}"
    if negative is not None:
        return f"labelled {negative.value.replace('_', ' ')}"
    return "judged irrelevant" if labels.judged[row, position] else "not judged"


def _line(text: str) -> str:
    """Text as one line without control characters and lone surrogates."""
    return " ".join(sanitise(text).split())


def _snippet(text: str) -> str:
    line = _line(text)
    return line if len(line) <= _SNIPPET else line[:_SNIPPET].rsplit(" ", 1)[0] + " …"
