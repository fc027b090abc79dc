"""Simulated readers with known costs, for tests of what answers can tell about them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calibration.data.dataset import Dataset, Query
from calibration.reader.answers import Answer, mark, term_columns


@dataclass(frozen=True)
class Reader:
    """Log odds of a right answer: by column of ``term_columns``, and by question."""

    weights: Mapping[str, float]
    intercept: float = -2.0
    question_spread: float = 0.5

    def true_costs(self, needed: np.ndarray) -> dict[str, float]:
        """The terms that ``fit_utilities`` estimates, for questions that need so many passages."""
        whole = self.weights["relevant"] + self.weights.get("completeness", 0.0)
        unit = whole * float(np.mean(1.0 / needed))
        return {
            "relevant": unit,
            "irrelevant": -self.weights.get("irrelevant", 0.0) / unit,
            "hard_negative": -self.weights.get("hard_negative", 0.0) / unit,
            "position": -self.weights.get("position", 0.0) / whole,
            "completeness": self.weights.get("completeness", 0.0) / whole,
        }


def simulate(
    reader: Reader,
    *,
    seed: int,
    n_queries: int = 200,
    n_pipelines: int = 3,
    sizes: tuple[int, int] = (1, 8),
    hard_negatives: bool = True,
    max_needed: int = 3,
    lean: float = 0.0,
) -> tuple[tuple[Answer, ...], Dataset]:
    """Answers to random contexts, and the labels of their questions.

    Args:
        reader: Who answers.
        sizes: Smallest and largest context.
        hard_negatives: Whether some passages that are not relevant are labelled.
        max_needed: The most relevant passages that a question has.
        lean: How much an easy question gets more passages, relevant and not, than a hard one.
    """
    random = np.random.default_rng(seed)
    needed = random.integers(1, max_needed + 1, n_queries)
    qrels = {f"q{q}": {f"q{q}-r{i}": 1 for i in range(needed[q])} for q in range(n_queries)}
    hard = {f"q{q}": {f"q{q}-h{i}": "hard_negative" for i in range(3)} for q in range(n_queries)}
    judged = {
        query_id: {**relevant, **{f"{query_id}-x{i}": 0 for i in range(8)}}
        for query_id, relevant in qrels.items()
    }
    dataset = Dataset(
        name="simulated",
        queries=tuple(Query(query_id, f"question {query_id}") for query_id in qrels),
        qrels=judged if hard_negatives else qrels,
        distractors=hard if hard_negatives else {},
    )
    ease = random.normal(0.0, 1.0, n_queries)
    answers = []
    for (query_id, relevant), own in zip(qrels.items(), ease, strict=True):
        others = [f"{query_id}-h{i}" for i in range(3)] + [f"{query_id}-x{i}" for i in range(8)]
        for pipeline in range(n_pipelines):
            size = int(random.integers(sizes[0], sizes[1] + 1) + 2 * lean * own)
            size = min(max(size, sizes[0]), sizes[1])
            held = int(random.binomial(min(len(relevant), size), 1.0 / (1.0 + np.exp(-lean * own))))
            chosen = list(relevant)[:held] + list(random.permutation(others))[: size - held]
            context = tuple(str(passage_id) for passage_id in random.permutation(chosen))
            answers.append(Answer(query_id, context, False, f"pipeline {pipeline}"))
    marked = mark(answers, dataset)
    columns = term_columns(marked.contexts)
    log_odds = reader.intercept + sum(
        weight * columns[name] for name, weight in reader.weights.items()
    )
    of_query = np.array([ease[int(query_id.removeprefix("q"))] for query_id in marked.query_ids])
    log_odds += reader.question_spread * of_query[marked.question]
    correct = random.random(len(answers)) < 1.0 / (1.0 + np.exp(-log_odds))
    return (
        tuple(
            Answer(answer.query_id, answer.passage_ids, bool(right), answer.pipeline)
            for answer, right in zip(answers, correct, strict=True)
        ),
        dataset,
    )
