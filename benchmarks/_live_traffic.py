"""Simulated traffic whose true quality is known, a judge that errs, and a person who does not.

Every question has a pool of passages of hidden relevance, of which the first five are served. The
truth of a metric is over all requests of a window, sampled or not, by the definitions of
``ctxguard.core.metrics``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from string import ascii_lowercase

import numpy as np

from benchmarks._traffic import BoolArray, metric_terms
from calibration.pool_labels import IntArray
from ctxguard.core.context import Context
from ctxguard.core.decision import Decision, decide
from ctxguard.core.metrics import DEFAULT_UTILITIES, Negative
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_K, FloatArray, Hit, Mode, Passage, Ranking, Route, ScoreKind
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import DEFAULT_RATES

DAY_SECONDS = 86_400.0
DEPTH = 20
"""Candidates of a request."""
BEYOND = 180
"""Passages beyond the pool that an audit's search finds."""
_SPREAD = 2.0
"""Questions differ: their precisions have a beta distribution whose parameters add up to this."""
_MISLEADING_SHARE = 0.2
"""Of the passages that are not relevant."""
_ORDERS = 16
"""Ways in which the retriever's own order differs from that of the decision."""
_PERIODS = 10
"""Quiet and busy times that alternate."""


@dataclass(frozen=True)
class Shape:
    """What some traffic is like.

    Attributes:
        n: Requests.
        seconds: How long they take to arrive.
        precision: Mean precision of what is served, at the beginning and at the end.
        popular: How many questions are asked again and again; 0 for none.
        popular_share: Share of the requests that ask one of these.
        popular_precision: Their mean precision.
        session_length: Requests of a session, which are about as good as each other; 1 for none.
        busy: How many times as many requests arrive in busy times as in quiet ones.
        busy_precision: Mean precision in busy times; None where it is that of quiet ones.
        missed: Share of the relevant passages that lie beyond the pool.
    """

    n: int = 16_000
    seconds: float = 10 * DAY_SECONDS
    precision: tuple[float, float] = (0.6, 0.6)
    popular: int = 0
    popular_share: float = 0.6
    popular_precision: float = 0.35
    session_length: int = 1
    busy: float = 1.0
    busy_precision: float | None = None
    missed: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Requests and the questions that they ask; ranks are those of the decision.

    Attributes:
        relevant: Shape (q, DEPTH), by question.
        misleading: Shape (q, DEPTH), never where relevant.
        beyond: Shape (q, BEYOND), the relevant ones beyond the pool; (q, 0) where there are none.
        asked: Shape (n,), the question of each request.
        seconds: Shape (n,), when each was answered, ascending from 0.
        session: Shape (n,), 0 for none.
    """

    relevant: BoolArray
    misleading: BoolArray
    beyond: BoolArray
    asked: IntArray
    seconds: FloatArray
    session: IntArray

    def truths(self, since: float, until: float) -> dict[Metric, float]:
        """Every metric over the requests with since ≤ seconds ≤ until; at least one."""
        first, last = (
            np.searchsorted(self.seconds, since),
            np.searchsorted(self.seconds, until, side="right"),
        )
        times_asked = np.bincount(self.asked[first:last], minlength=len(self.relevant))
        found = {}
        for metric, columns in self._terms.items():
            a, b = times_asked @ columns
            # Nobody looks beyond the pool where nothing lies there.
            if b > 0.0 and (a > 0.0 or metric is not Metric.RETRIEVER_MISS):
                found[metric] = float(a / b)
        return found

    @cached_property
    def _terms(self) -> dict[Metric, FloatArray]:
        """Numerator and denominator that each question adds to each metric, shape (q, 2)."""
        served, pool = self.relevant[:, :DEFAULT_K], self.relevant.sum(axis=1)
        worth = DEFAULT_UTILITIES
        kept, answerable = served.sum(axis=1), pool > 0
        utilities = np.where(
            served,
            worth.relevant,
            np.where(self.misleading[:, :DEFAULT_K], worth.distractor, worth.irrelevant),
        )
        orders = np.array([_first_by_retriever(order) for order in range(_ORDERS)])
        at_first = orders[np.arange(len(pool)) % _ORDERS]
        first = (self.relevant & at_first).sum(axis=1)
        first_kept = (served & at_first[:, :DEFAULT_K]).sum(axis=1)
        missed = self.beyond.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            loss = np.where(first > 0, 1.0 - first_kept / first, 0.0)
        return metric_terms(
            served, utilities, pool_weight=answerable * 1.0, dropped=pool - kept
        ) | {
            Metric.RECALL_LOSS: np.column_stack([loss, first > 0]),
            Metric.RETRIEVER_MISS: np.column_stack([missed, missed + pool]),
        }


def draw_traffic(shape: Shape, rng: np.random.Generator) -> Traffic:
    """Draw traffic of a shape; every question that is not popular is asked once."""
    seconds, is_busy = _arrivals(shape, rng)
    share = seconds / shape.seconds
    precision = shape.precision[0] + share * (shape.precision[1] - shape.precision[0])
    if shape.busy_precision is not None:
        precision = np.where(is_busy, shape.busy_precision, precision)
    if shape.popular:
        precision = np.concatenate([precision, np.full(shape.popular, shape.popular_precision)])
    quality = rng.beta(_SPREAD * precision, _SPREAD * (1.0 - precision))
    session = np.zeros(shape.n, np.int64)
    if shape.session_length > 1:
        first = np.arange(shape.n) // shape.session_length * shape.session_length
        session = 1 + first
        quality[: shape.n] = 0.25 * quality[: shape.n] + 0.75 * quality[first]
    asked = np.arange(shape.n)
    if shape.popular:
        asks_popular = rng.random(shape.n) < shape.popular_share
        asked[asks_popular] = shape.n + rng.integers(shape.popular, size=int(asks_popular.sum()))
    relevant = rng.random((len(quality), DEPTH)) < quality[:, None] * _by_rank()
    misleading = ~relevant & (rng.random(relevant.shape) < _MISLEADING_SHARE)
    beyond = np.zeros((len(quality), 0), np.bool_)
    if shape.missed:
        per_pool = relevant.sum(axis=1, keepdims=True) * shape.missed / (1.0 - shape.missed)
        beyond = rng.random((len(quality), BEYOND)) < per_pool / BEYOND
    return Traffic(relevant, misleading, beyond, asked, seconds, session)


def _arrivals(shape: Shape, rng: np.random.Generator) -> tuple[FloatArray, BoolArray]:
    """When requests arrive, ascending, and which of them in busy times."""
    half = shape.seconds / _PERIODS / 2.0
    period = rng.integers(_PERIODS, size=shape.n)
    is_busy = rng.random(shape.n) < shape.busy / (1.0 + shape.busy)
    seconds = (2.0 * period + is_busy + rng.random(shape.n)) * half
    order = np.argsort(seconds)
    return seconds[order], is_busy[order]


def _by_rank() -> FloatArray:
    """How likely a passage is to be relevant by rank, 1 on average over those served."""
    ranks = np.arange(DEPTH)
    served = 1.0 - 0.1 * (ranks - (DEFAULT_K - 1) / 2.0)
    return np.where(ranks < DEFAULT_K, served, 0.5 * np.exp(-(ranks - DEFAULT_K) / 5.0))


def query_of(question: int) -> str:
    """The text of a question: letters only, which no redactor takes for a person's data.

    >>> query_of(0), query_of(27)
    ('question a', 'question bb')
    """
    digits = ""
    while True:
        question, digit = divmod(question, len(ascii_lowercase))
        digits = ascii_lowercase[digit] + digits
        if not question:
            return f"question {digits}"


def question_of(query: str) -> int:
    """The number of a question's text.

    >>> question_of(query_of(12345))
    12345
    """
    number = 0
    for digit in query.split()[1]:
        number = number * len(ascii_lowercase) + ascii_lowercase.index(digit)
    return number


def passage_id(place: int) -> str:
    """The id of a passage by its rank from 0; from ``DEPTH`` on it lies beyond the pool."""
    return f"p{place}"


@cache
def _answer(order: int) -> tuple[Decision, tuple[Passage, ...]]:
    """What is decided and served where the retriever has one of its own orders."""
    shifts = np.random.default_rng(order).normal(0.0, 3.0, DEPTH)
    by_retriever = np.argsort(np.arange(DEPTH) + shifts).tolist()
    hits = [Hit(passage_id(rank), 1.0 - 0.01 * rank, text="text") for rank in by_retriever]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
    decision = decide(ranking, RatioPolicy(k=DEFAULT_K, min_keep=DEFAULT_K))
    return decision, tuple([ranking.passages[place] for place in decision.kept])


@cache
def _first_by_retriever(order: int) -> tuple[bool, ...]:
    """By rank, whether a passage is one of the retriever's own first few."""
    decision, _ = _answer(order)
    first = decision.ranking.passage_ids[: DEFAULT_RATES.baseline_k]
    return tuple([passage_id(rank) in first for rank in range(DEPTH)])


def context_of(traffic: Traffic, request: int, request_id: str) -> Context:
    """The guard's answer to one request."""
    question, session = int(traffic.asked[request]), int(traffic.session[request])
    decision, passages = _answer(question % _ORDERS)
    return Context(
        request_id=request_id,
        query=query_of(question),
        route=Route.EXTERNAL,
        mode=Mode.ENFORCE,
        passages=passages,
        decision=decision,
        session_id=f"s{session}" if session else None,
    )


def search_beyond(_: str, *, depth: int) -> list[str]:
    """What an audit's search finds for any question."""
    return [passage_id(place) for place in range(min(depth, DEPTH + BEYOND))]


class SimulatedJudge:
    """A judge that is wrong about some passages, and always wrong about these.

    Args:
        traffic: Whose passages it judges.
        sensitivity: Share of the relevant passages that it calls relevant.
        specificity: Share of the others that it does not.
        rng: Chooses the passages that it is wrong about.

    Attributes:
        down: Whether it cannot be called.
    """

    name = "simulated"
    max_grade = 1
    reads_text = False

    def __init__(
        self, traffic: Traffic, sensitivity: float, specificity: float, rng: np.random.Generator
    ) -> None:
        truth = np.concatenate([traffic.relevant, traffic.beyond], axis=1)
        says = np.where(truth, sensitivity, 1.0 - specificity)
        self._verdicts = rng.random(truth.shape) < says
        self._misleading = traffic.misleading
        self.version = f"{sensitivity:g}/{specificity:g}"
        self.exact = sensitivity == specificity == 1.0
        self.down = False

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        if self.down:
            raise ConnectionError("the judge is down")
        question = question_of(query)
        return [self._judgment(question, passage.passage_id) for passage in passages]

    def _judgment(self, question: int, name: str) -> Judgment:
        place = int(name[1:])
        grade = int(self._verdicts[question, place])
        return Judgment(name, grade, _negative(self._misleading, grade, question, place))


def true_grade(traffic: Traffic, query: str, name: str) -> tuple[int, Negative | None]:
    """What a person says of a passage: the truth, as (grade, negative)."""
    question, place = question_of(query), int(name[1:])
    relevant = int(traffic.relevant[question, place])
    return relevant, _negative(traffic.misleading, relevant, question, place)


def _negative(misleading: BoolArray, given: int, question: int, place: int) -> Negative | None:
    is_known = not given and place < DEPTH and bool(misleading[question, place])
    return Negative.DISTRACTOR if is_known else None
