"""What a policy dropped: irrelevant passages that it kept out, and relevant ones that it lost.

Pure, but for the look-up of the passages that are shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import floor

import numpy as np

from calibration.labelling.labels import Dataset
from calibration.losses import Labels
from calibration.replay import Pools
from calibration.report.data import Example, Examples, KeptIf
from calibration.report.reliability import ratio_interval
from ctxguard.policy import Policy, decide
from ctxguard.render import sanitise
from ctxguard.types import Passage, Verdict

SHOWN = 6
_SNIPPET = 240
_PRECISION = 10_000

PassageOf = Callable[[str], Passage]


@dataclass(frozen=True)
class _Candidate:
    """A candidate of one of the two sorts, and what became of it."""

    row: int
    position: int
    verdict: Verdict


def dropped_passages(
    pools: Pools,
    labels: Labels,
    dataset: Dataset,
    policy_of: Callable[[str], Policy],
    passage: PassageOf | None,
    *,
    bare_k: int,
    seed: int = 0,
) -> tuple[Examples, Examples]:
    """What was rightly and what was wrongly dropped, with the worst of both as examples.

    Args:
        pools: The replay of one route.
        labels: Their labels.
        dataset: The queries and what is known of their passages.
        policy_of: The policy that serves a query, by query id.
        passage: A passage by its id, raising KeyError where it is gone; None shows ids alone.
        bare_k: Irrelevant passages count where the bare retriever would have served them among
            its first this many.
        seed: Of the bootstrap.

    Returns:
        Irrelevant passages of the bare first ``bare_k``, known distractors shown first; and
        relevant passages of the baseline of recall loss, the highest grades shown first.
    """
    irrelevant: list[_Candidate] = []
    relevant: list[_Candidate] = []
    for row, (query_id, ranking) in enumerate(zip(pools.query_ids, pools.rankings(), strict=True)):
        decision = decide(ranking, policy_of(query_id))
        for position, verdict in zip(decision.order, decision.verdicts, strict=False):
            found = _Candidate(row, position, verdict)
            if labels.relevant[row, position]:
                if labels.in_baseline[row, position]:
                    relevant.append(found)
            elif position < bare_k:
                irrelevant.append(found)

    def worst(candidate: _Candidate) -> tuple[float, int, int, str]:
        grade = int(labels.grades[candidate.row, candidate.position])
        known = labels.utilities[candidate.row, candidate.position]
        judged = bool(labels.judged[candidate.row, candidate.position])
        # For an irrelevant one the worth says how misleading it is known to be.
        severity = -grade if grade else float(known)
        return severity, -int(judged), candidate.position, pools.query_ids[candidate.row]

    def examples(candidates: list[_Candidate]) -> Examples:
        n_queries = len(pools)
        totals = np.bincount([c.row for c in candidates], minlength=n_queries)
        gone = [c for c in candidates if not c.verdict.kept]
        dropped = np.bincount([c.row for c in gone], minlength=n_queries)
        shown = list(_one_per_query(sorted(gone, key=worst)))[:SHOWN]
        return Examples(
            total=len(candidates),
            dropped=len(gone),
            share=ratio_interval(dropped.astype(float), totals.astype(float), seed=seed),
            shown=tuple(_example(c, pools, labels, dataset, passage) for c in shown),
        )

    return examples(irrelevant), examples(relevant)


def _one_per_query(candidates: list[_Candidate]) -> Iterator[_Candidate]:
    seen: set[int] = set()
    for candidate in candidates:
        if candidate.row not in seen:
            seen.add(candidate.row)
            yield candidate


def _example(
    candidate: _Candidate,
    pools: Pools,
    labels: Labels,
    dataset: Dataset,
    passage_of: PassageOf | None,
) -> Example:
    verdict, row, position = candidate.verdict, candidate.row, candidate.position
    query_id = pools.query_ids[row]
    passage = None
    if passage_of is not None:
        try:
            passage = passage_of(verdict.passage_id)
        except KeyError:
            passage = None
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
            # Rounded down, so that the value shown would indeed keep it.
            KeptIf(setting=t.setting, value=floor(t.value * _PRECISION) / _PRECISION)
            for t in verdict.kept_if
        ),
    )


def _label(labels: Labels, row: int, position: int) -> str:
    grade, negative = int(labels.grades[row, position]), labels.negatives[row][position]
    if grade > 0:
        return f"relevant, grade {grade} of {labels.top_grade}"
    if negative is not None:
        return f"known {negative.value.replace('_', ' ')}"
    return "judged irrelevant" if labels.judged[row, position] else "not judged"


def _line(text: str) -> str:
    """Text as one line without control characters and lone surrogates."""
    return " ".join(sanitise(text).split())


def _snippet(text: str) -> str:
    line = _line(text)
    return line if len(line) <= _SNIPPET else line[:_SNIPPET].rsplit(" ", 1)[0] + " …"
