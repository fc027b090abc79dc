"""From a sample to what the estimates need of it: which passages are judged, and the verdicts.

All served passages are judged, and dropped ones with known probabilities, chosen by hashes of
the ids, so that judging again asks about the same passages (DESIGN.md §8). A verdict that is
missing, misplaced or out of range is counted and never imputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ctxguard.errors import ConfigurationError
from ctxguard.metrics import Utilities, strict_utilities
from ctxguard.monitor.chance import Chance
from ctxguard.monitor.estimates import JudgedRequest
from ctxguard.monitor.judges import Judge, Judgment
from ctxguard.monitor.sampler import Sample
from ctxguard.types import Mode, Passage, PassageSource


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one sample.

    Attributes:
        request: None where a served passage got no valid verdict: the sample is left out.
        asked: Passages that a verdict was wanted of.
        invalid: Those among them without a valid one, unreadable passages included.
    """

    request: JudgedRequest | None
    asked: int
    invalid: int


@dataclass(frozen=True, slots=True)
class JudgingRates:
    """How much of what was dropped is judged, beside all that was served. All in [0, 1].

    Attributes:
        dropped: The probability with which each dropped passage is judged. Recall rests on it.
        pool: The probability with which all of a request's are. Recall per request rests on it.
        unanswered_pool: The same for a request that was served nothing relevant, no lower than
            ``pool``. MRR rests on it: whether such a request counts as 0 or not at all can only
            be told from its whole pool, and these requests are few.
    """

    dropped: float = 0.2
    pool: float = 0.05
    unanswered_pool: float = 0.5

    def __post_init__(self) -> None:
        for name in ("dropped", "pool", "unanswered_pool"):
            rate = getattr(self, name)
            if not 0.0 <= rate <= 1.0:
                raise ConfigurationError(
                    f"judging rate {name} {rate!r} must lie in [0, 1]: it is a probability"
                )
        if self.unanswered_pool < self.pool:
            raise ConfigurationError(
                f"judging rate unanswered_pool {self.unanswered_pool!r} must be at least "
                f"pool {self.pool!r}"
            )


DEFAULT_RATES = JudgingRates()


class Judging:
    """Has samples judged.

    Args:
        judge: Who grades passages.
        rates: How much of what was dropped is judged.
        utilities: What a passage is worth; every served passage that is not relevant costs.
        seed: Of the choices.
    """

    def __init__(
        self, judge: Judge, rates: JudgingRates, *, utilities: Utilities, seed: str = ""
    ) -> None:
        self.judge = judge
        self.rates = rates
        self.utilities = utilities
        self._dropped = Chance(rates.dropped, purpose="dropped", seed=seed)
        self._pool = Chance(rates.pool, purpose="pool", seed=seed)
        self._unanswered_pool = Chance(rates.unanswered_pool, purpose="pool", seed=seed)

    def __call__(self, sample: Sample) -> Judged:
        """Judge one sample; raises whatever the judge raises."""
        context = sample.context
        request_id = context.request_id
        served, dropped = _pool(sample)
        of_served = self._verdicts(context.query, served)
        if len(of_served) < len(served):
            return Judged(None, len(served), len(served) - len(of_served))
        answered = any(verdict.grade > 0 for verdict in of_served)
        pool = self._pool if answered else self._unanswered_pool
        whole_pool = pool.chooses(request_id)
        picked = [
            position
            for passage_id, position in dropped.items()
            if whole_pool or self._dropped.chooses(f"{request_id}\0{passage_id}")
        ]
        passages = context.decision.ranking.passages
        of_dropped = self._verdicts(context.query, _readable(passages, picked))
        relevant = sum(verdict.grade > 0 for verdict in of_dropped)
        certain = not dropped or self.rates.dropped == 1.0
        pool_probability = 1.0 if certain else pool.probability
        # Each dropped passage is judged if its whole pool is, or if it is picked by itself.
        probability = pool_probability + (1.0 - pool_probability) * self.rates.dropped
        complete = len(of_dropped) == len(picked)
        if not complete:
            # Those with a verdict stand for those without.
            probability *= len(of_dropped) / len(picked)
        grades = tuple([verdict.grade for verdict in of_served])
        request = JudgedRequest(
            probability=sample.probability,
            grades=grades,
            utilities=self._utilities(of_served),
            dropped_relevant=relevant / probability if probability > 0.0 else None,
            dropped_probability=probability,
            pool_relevant=(
                sum(grade > 0 for grade in grades) + relevant
                if complete and (certain or whole_pool)
                else None
            ),
            pool_probability=pool_probability,
            unanswered_probability=1.0 if certain else self.rates.unanswered_pool,
        )
        asked = len(served) + len(picked)
        return Judged(request, asked, asked - len(of_served) - len(of_dropped))

    def _utilities(self, verdicts: Sequence[Judgment]) -> tuple[float, ...]:
        return tuple(
            strict_utilities(
                [verdict.grade for verdict in verdicts],
                top_grade=self.judge.max_grade,
                negatives=[verdict.negative for verdict in verdicts],
                utilities=self.utilities,
            )
        )

    def _verdicts(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        """The valid verdicts: not those missing, misplaced or out of range."""
        verdicts = self.judge.judge(query, passages) if passages else ()
        if len(verdicts) != len(passages):
            return []
        highest = self.judge.max_grade
        return [
            verdict
            for verdict, passage in zip(verdicts, passages, strict=True)
            if verdict is not None
            and verdict.passage_id == passage.passage_id
            and isinstance(verdict.grade, int)
            and 0 <= verdict.grade <= highest
        ]


def _pool(sample: Sample) -> tuple[list[Passage], dict[str, int]]:
    """The served passages best first, and the positions of the pool's others by id.

    Best first is the decision's order, also where assembly puts the best at both ends; where the
    bare retriever's passages were served (shadow, off) it is the retriever's. Candidates that
    were neither served nor usable (garbage scores) are no part of the pool.
    """
    context = sample.context
    decision = context.decision
    passage_ids = decision.ranking.passage_ids
    by_id = {passage.passage_id: passage for passage in context.passages}
    if context.mode is Mode.ENFORCE:
        order = decision.order
    else:
        usable = set(decision.order)
        everything = enumerate(passage_ids)
        order = [place for place, name in everything if place in usable or name in by_id]
    served: dict[str, Passage] = {}
    dropped: dict[str, int] = {}
    for position in order:
        passage_id = passage_ids[position]
        if passage_id in by_id:
            served.setdefault(passage_id, by_id[passage_id])
        else:
            dropped.setdefault(passage_id, position)
    return list(served.values()), dropped


def _readable(passages: PassageSource, positions: Sequence[int]) -> list[Passage]:
    found = []
    for position in positions:
        try:
            found.append(passages[position])
        except Exception:  # noqa: S112 - left without a verdict, which is counted
            continue
    return found
