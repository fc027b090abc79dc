"""Judges all passages of a sample in one call, by a model that answers about a list."""

import random
from collections.abc import Sequence

import numpy as np

from ctxguard.core.types import FloatArray, Passage
from ctxguard.endpoints.assessors import ModelAssessor
from ctxguard.errors import (
    ConfigurationError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.resilience import UnansweredError
from ctxguard.retrieval.index.passages import searchable_text

_QUESTION = "relevant"
_RELEVANT = 0.5
_MOST_AT_ONCE = 50


class PoolJudge:
    """Grades 1 if a model's probability that a passage is relevant is at least one half, else 0.

    One call has up to 50 passages, so it costs a fraction of a call for each. In a
    list a verdict depends on the others and on its place: the order is drawn at random for each
    call. People's grades correct what that does to verdicts, as any error of a judge.

    Args:
        assessor: The model and how it is asked, with the question ``relevant``.

    Raises:
        ConfigurationError: the assessor does not answer that question.
    """

    name = "pool"
    max_grade = 1
    judges_pools = True

    def __init__(self, assessor: ModelAssessor) -> None:
        if _QUESTION not in assessor.names:
            raise ConfigurationError(
                f"the assessor answers {', '.join(assessor.names)}; a judge asks {_QUESTION!r}"
            )
        self.version = assessor.fingerprint
        self.ledger = assessor.ledger
        self._assessor = assessor

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """Return one verdict per passage, in their order; None if there is no valid answer.

        Raises:
            StageError: the endpoint could not be asked; a reply that is no answer is counted.
        """
        order = list(range(len(passages)))
        random.shuffle(order)
        found: dict[int, Judgment | None] = {}
        for start in range(0, len(order), _MOST_AT_ONCE):
            some = order[start : start + _MOST_AT_ONCE]
            chances = self._chances(query, [passages[one] for one in some])
            for one, chance in zip(some, chances.tolist(), strict=True):
                found[one] = _judgment(passages[one].passage_id, chance)
        return [found[one] for one in range(len(passages))]

    def _chances(self, query: str, passages: Sequence[Passage]) -> FloatArray:
        texts = [searchable_text(passage) for passage in passages]
        try:
            return self._assessor.assess(query, texts)[_QUESTION]
        except (UnansweredError, OverloadedError, StageUnavailableError):
            raise
        except StageError:
            return np.full(len(texts), np.nan)

    def close(self) -> None:
        """Close the connections; judging again opens new ones."""
        self._assessor.close()


def _judgment(passage_id: str, chance: float) -> Judgment | None:
    if not 0.0 <= chance <= 1.0:
        return None
    return Judgment(passage_id, int(chance >= _RELEVANT), score=chance)
