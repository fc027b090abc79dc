"""Judges that err, by a truth that a test knows."""

import random
from collections.abc import Callable, Mapping, Sequence

from ctxguard.core.types import Passage
from ctxguard.endpoints.usage import Ledger
from ctxguard.monitor.judges import Judgment, LabelJudge

Truth = Callable[[str, str], bool]
"""Whether a passage, by its id, is relevant to a query."""


class ErringJudge:
    """Sees relevance with some sensitivity and specificity, and errs the same way every time.

    Args:
        truth: A function, or the relevant passages by query.
        rates: Sensitivity and specificity.
        luck: Another text errs about other passages.
    """

    name, version, max_grade = "erring", "1", 1

    def __init__(
        self,
        truth: Truth | Mapping[str, set[str]],
        rates: tuple[float, float] = (0.85, 0.9),
        luck: str = "",
    ) -> None:
        self._truth = truth if callable(truth) else lambda query, name: name in truth[query]
        self.rates = rates
        self._luck = luck
        self.n_judged = 0
        self.fails_on = ""

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        if query == self.fails_on:
            raise ConnectionError("not this one")
        self.n_judged += len(passages)
        return [Judgment(one.passage_id, self._grade(query, one.passage_id)) for one in passages]

    def _grade(self, query: str, name: str) -> int:
        sensitivity, specificity = self.rates
        says_yes = sensitivity if self._truth(query, name) else 1.0 - specificity
        return int(random.Random(f"{self._luck}{query} {name}").random() < says_yes)


class PaidOpinion(LabelJudge):
    """Known labels as those of a judge that errs, and is paid."""

    exact = False

    def __init__(self, qrels: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(qrels)
        self.ledger = Ledger((2.0, 8.0))
