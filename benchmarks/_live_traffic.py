"""Simulated traffic whose true quality is known, a judge that errs, and a person who does not.

Every question has a pool of passages of hidden relevance, of which the first five are served. The
truth of a metric is over all requests of a window, sampled or not, by the definitions of
``ctxguard.measure.worth``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.context import Context
from ctxguard.core.decision import Decision, decide
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import discounts
from ctxguard.core.types import DEFAULT_K, FloatArray, Hit, Mode, Passage, Ranking, Route, ScoreKind
from ctxguard.measure.metrics import Metric
from ctxguard.measure.rows import IntArray
from ctxguard.measure.worth import READERS, Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.sampler import DEFAULT_RATES

BoolArray = NDArray[np.bool_]

DAY_SECONDS = 86_400.0
DEPTH = 20
"""Candidates of a request."""
_SPREAD = 2.0
"""Questions differ: their precisions have a beta distribution whose parameters add up to this."""
_MISLEADING_SHARE = 0.2
"""Of the passages that are not relevant."""
_ORDERS = 16
"""Ways in which the retriever's own order differs from that of the decision."""
_PERIODS = 10
"""Quiet and busy times that alternate."""
TENANTS = ("first", "second")
_SECOND_TENANT = 0.25


class Host(NamedTuple):
    """A machine that answers a part of the requests.

    Attributes:
        share: Of the requests.
        ahead_seconds: How far its clock is ahead.
        is_late: Whether it stores nothing until all requests are answered.
    """

    share: float = 1.0
    ahead_seconds: float = 0.0
    is_late: bool = False


class JudgeErrors(NamedTuple):
    """How a judge errs.

    Attributes:
        sensitivity: Share of the relevant passages that it calls relevant.
        specificity: Share of the others that it does not.
        refuses_relevant, refuses_others: Share of these that it gives no grade on.
    """

    sensitivity: float = 0.85
    specificity: float = 0.90
    refuses_relevant: float = 0.0
    refuses_others: float = 0.0


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
        abstention: Share of the questions for which nothing is served, mostly poor ones.
        hosts: Who answers.
        tenant_precision: Mean precision of a second tenant's requests, a quarter of all; None
            without tenants.
        top_grade: The highest grade of people, who grade relevant passages from 1 up.
        quality: That of every question; None where they differ. From 1.25 on all that is served is
            relevant.
    """

    n: int = 5_000
    seconds: float = 10 * DAY_SECONDS
    precision: tuple[float, float] = (0.6, 0.6)
    popular: int = 0
    popular_share: float = 0.6
    popular_precision: float = 0.35
    session_length: int = 1
    busy: float = 1.0
    busy_precision: float | None = None
    abstention: float = 0.0
    hosts: tuple[Host, ...] = (Host(),)
    tenant_precision: float | None = None
    top_grade: int = 1
    quality: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Requests and the questions that they ask; ranks are those of the decision.

    Attributes:
        shape: What it was drawn from.
        grade: Shape (q, DEPTH), by question, as people grade.
        misleading: Shape (q, DEPTH), never where relevant.

        asked: Shape (n,), the question of each request.
        seconds: Shape (n,), when each was answered, ascending from 0.
        session: Shape (n,), 0 for none.
        empty: Shape (q,), whether nothing is served.
        host, tenant: Shape (n,), of each request.
    """

    shape: Shape
    grade: IntArray
    misleading: BoolArray
    asked: IntArray
    seconds: FloatArray
    session: IntArray
    empty: BoolArray
    host: IntArray
    tenant: IntArray

    @cached_property
    def relevant(self) -> BoolArray:
        """Shape (q, DEPTH), by question."""
        return self.grade > 0

    @cached_property
    def stamped(self) -> FloatArray:
        """Shape (n,), when each was answered by the clock of its host."""
        ahead = np.array([host.ahead_seconds for host in self.shape.hosts])
        return np.asarray(self.seconds + ahead[self.host])

    def truths(self, since: float, until: float, answered: float = math.inf) -> dict[Metric, float]:
        """Every metric over the requests with since ≤ stamped ≤ until; at least one.

        Args:
            since, until: By the hosts' clocks.
            answered: Requests answered later are left out, whatever the clocks say.
        """
        inside = (self.stamped >= since) & (self.stamped <= until) & (self.seconds <= answered)
        times_asked = np.bincount(self.asked[inside], minlength=len(self.relevant))
        found = {}
        for metric, columns in self._terms.items():
            a, b = times_asked @ columns
            if b > 0.0:
                found[metric] = float(a / b)
        return found

    @cached_property
    def _terms(self) -> dict[Metric, FloatArray]:
        """Numerator and denominator that each question adds to each metric, shape (q, 2)."""
        is_served = ~self.empty[:, None]
        served, pool = self.relevant[:, :DEFAULT_K] & is_served, self.relevant.sum(axis=1)
        worth = READERS
        kept = served.sum(axis=1)
        is_top = self.grade[:, :DEFAULT_K] == self.shape.top_grade
        utilities: FloatArray = np.where(
            served,
            np.where(is_top, worth.relevant, worth.partial),
            np.where(self.misleading[:, :DEFAULT_K], worth.distractor, worth.irrelevant),
        )
        utilities *= is_served
        orders = np.array([_first_by_retriever(order) for order in range(_ORDERS)])
        at_first = orders[np.arange(len(pool)) % _ORDERS]
        first = (self.relevant & at_first).sum(axis=1)
        first_kept = (served & at_first[:, :DEFAULT_K]).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            loss = np.where(first > 0, 1.0 - first_kept / first, 0.0)
        terms = metric_terms(served, utilities, dropped=pool - kept)
        for metric in (Metric.PRECISION, Metric.SERVED_MRR):
            terms[metric][:, 1] = is_served[:, 0]
        return terms | {
            Metric.RECALL: np.column_stack([kept / np.maximum(pool, 1), pool > 0]),
            Metric.RECALL_LOSS: np.column_stack([loss, first > 0]),
        }


def metric_terms(
    served: BoolArray, utilities: FloatArray, *, dropped: FloatArray
) -> dict[Metric, FloatArray]:
    """What ``terms.term`` says of each request, shape (n, 2) by metric.

    Args:
        served: Shape (n, k), which of the served are relevant.
        utilities: Shape (n, k).
        dropped: Shape (n,), the estimated number of relevant passages dropped.
    """
    kept = served.sum(axis=1).astype(np.float64)
    has_hit = kept > 0
    one = np.ones(len(served))
    worth = utilities * discounts(served.shape[1])
    return {
        Metric.PRECISION: np.column_stack([kept / served.shape[1], one]),
        Metric.SERVED_MRR: np.column_stack(
            [
                np.where(has_hit, 1.0 / (served.argmax(axis=1) + 1), 0.0),
                one,
            ]
        ),
        Metric.UDCG: np.column_stack([worth.sum(axis=1), one]),
        Metric.GAIN: np.column_stack([np.maximum(worth, 0.0).sum(axis=1), one]),
        Metric.HARM: np.column_stack([np.maximum(-worth, 0.0).sum(axis=1), one]),
        Metric.POOLED_RECALL: np.column_stack([kept, kept + dropped]),
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
    hosts = np.array([host.share for host in shape.hosts])
    host = rng.choice(len(hosts), shape.n, p=hosts / hosts.sum())
    tenant = np.zeros(shape.n, np.int64)
    if shape.tenant_precision is not None:
        tenant = (rng.random(shape.n) < _SECOND_TENANT).astype(np.int64)
        precision[: shape.n][tenant == 1] = shape.tenant_precision
    quality = rng.beta(_SPREAD * precision, _SPREAD * (1.0 - precision))
    if shape.quality is not None:
        quality = np.full(len(quality), shape.quality)
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
    grade = relevant * rng.integers(1, shape.top_grade + 1, relevant.shape)
    empty = rng.random(len(quality)) < 2.0 * shape.abstention * (1.0 - quality.clip(0.0, 1.0))
    return Traffic(shape, grade, misleading, asked, seconds, session, empty, host, tenant)


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
    """The id of a passage by its rank from 0."""
    return f"p{place}"


@cache
def _answer(order: int) -> tuple[Decision, tuple[Passage, ...]]:
    """What is decided and served where the retriever has one of its own orders."""
    shifts = np.random.default_rng(order).normal(0.0, 3.0, DEPTH)
    by_retriever = np.argsort(np.arange(DEPTH) + shifts).tolist()
    hits = [Hit(passage_id(rank), 1.0 - 0.01 * rank, text=f"text {rank}") for rank in by_retriever]
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
    if traffic.empty[question]:
        decision, passages = replace(decision, n_kept=0), ()
    is_shared = traffic.shape.tenant_precision is None
    return Context(
        request_id=request_id,
        query=query_of(question),
        route=Route.EXTERNAL,
        mode=Mode.ENFORCE,
        passages=passages,
        decision=decision,
        session_id=f"s{session}" if session else None,
        where=None if is_shared else Where(tenant=TENANTS[traffic.tenant[request]]),
    )


class SimulatedJudge:
    """A judge that is wrong about some passages, and always wrong about these.

    Args:
        traffic: Whose passages it judges.
        errors: How it errs.
        rng: Chooses the passages that it is wrong about.
        version: Beside its errors.

    Attributes:
        down: Whether it cannot be called.
    """

    name = "simulated"
    max_grade = 1
    reads_text = False

    def __init__(
        self, traffic: Traffic, errors: JudgeErrors, rng: np.random.Generator, version: str = ""
    ) -> None:
        self._traffic = traffic
        self.version = "{:g}/{:g}".format(*errors) + version
        self.exact = errors == EXACT
        self.down = False
        self.change(errors, rng)

    def change(self, errors: JudgeErrors, rng: np.random.Generator) -> None:
        """Err otherwise from now on, under the same version."""
        truth = self._traffic.relevant
        says = np.where(truth, errors.sensitivity, 1.0 - errors.specificity)
        self._grades = rng.random(truth.shape) < says
        refuses = np.where(truth, errors.refuses_relevant, errors.refuses_others)
        self._refused = rng.random(truth.shape) < refuses

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        if self.down:
            raise ConnectionError("the judge is down")
        question = question_of(query)
        return [self._judgment(question, passage.passage_id) for passage in passages]

    def _judgment(self, question: int, name: str) -> Judgment | None:
        place = int(name[1:])
        if self._refused[question, place]:
            return None
        grade = int(self._grades[question, place])
        return Judgment(name, grade, _negative(self._traffic.misleading, grade, question, place))


EXACT = JudgeErrors(1.0, 1.0)


def true_grade(traffic: Traffic, query: str, name: str) -> tuple[int, Negative | None]:
    """What a person says of a passage: the truth, as (grade, negative)."""
    question, place = question_of(query), int(name[1:])
    grade = int(traffic.grade[question, place])
    return grade, _negative(traffic.misleading, grade, question, place)


def _negative(misleading: BoolArray, given: int, question: int, place: int) -> Negative | None:
    is_known = not given and place < DEPTH and bool(misleading[question, place])
    return Negative.DISTRACTOR if is_known else None
