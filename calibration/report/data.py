"""What a calibration report says, as data: every figure with its n and its interval.

Pure: JSON-ready, frozen, no labels and no passages beyond the examples that it shows.
``calibration.evidence`` gathers it, ``calibration.report`` writes it for people.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ctxguard.fusion import Fusion
from ctxguard.metrics import Utilities
from ctxguard.profile import Certificate, Interval, Provenance
from ctxguard.types import Route, ScoreKind

Direction = Literal["higher", "lower"]
Count = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class PolicySettings(_Frozen):
    """The settings of a policy that a person would change.

    Attributes:
        threshold: The least relative score (``ratio``) or the least P(relevant)
            (``expected_utility``) that is kept.
        temperature: T of the relative score; None where P decides.
        cost: What an irrelevant passage costs; None where the relative score decides.
    """

    kind: Literal["ratio", "expected_utility"]
    k: int
    threshold: float
    min_keep: int
    temperature: float | None = None
    cost: float | None = None
    gain: float | None = None


class MetricComparison(_Frozen):
    """One metric before and after, on the same queries.

    Attributes:
        better_when: Which way is better; None for the size of a context.
        first_k: The bare retriever's first ``BARE_K`` passages.
        seed_rule: At most 3 passages of at least 70% of the best.
        chosen: The chosen policy.
        against_first_k: chosen − first_k, paired by query.
        against_seed_rule: chosen − seed_rule, paired by query.
    """

    metric: str
    description: str
    better_when: Direction | None
    first_k: Interval
    seed_rule: Interval
    chosen: Interval
    against_first_k: Interval
    against_seed_rule: Interval


class AtK(_Frozen):
    """Strict UDCG at one size of context.

    Attributes:
        gain: Of the bare retriever's first k.
        harm: Of the bare retriever's first k, as a positive number.
        first_k: gain − harm.
        chosen: Strict UDCG of the chosen policy with its k set to this one.
    """

    k: int
    gain: Interval
    harm: Interval
    first_k: Interval
    chosen: Interval


class FrontPolicy(_Frozen):
    """One policy that no other beats in both recall loss and harm."""

    k: int
    threshold: float
    recall_loss: Interval
    harm: Interval
    udcg_strict: Interval


class Frontier(_Frozen):
    """Every candidate policy by recall loss and harm, on the queries that chose.

    Attributes:
        candidates: Distinct (recall loss, harm, strict UDCG), means over queries.
        n_candidates: Policies weighed, those with equal figures included.
        front: The Pareto front, least recall loss first, thinned for a person.
        chosen: The chosen settings on the same queries.
    """

    n_candidates: Count
    candidates: tuple[tuple[float, float, float], ...]
    front_line: tuple[tuple[float, float], ...]
    front: tuple[FrontPolicy, ...]
    chosen: FrontPolicy


class ReliabilityBin(_Frozen):
    """Candidates whose P(relevant) lies in [lower, upper).

    Attributes:
        mean_probability: What the model said of them; None for an empty bin.
        relevant: Share that the labels call relevant, with an interval that allows for
            candidates of one query being alike; its n counts candidates.
        queries: How many queries they come from.
    """

    lower: float
    upper: float
    mean_probability: float | None
    relevant: Interval
    queries: Count


class Reliability(_Frozen):
    """Whether P(relevant) is true, on queries that the model never saw.

    Attributes:
        expected_calibration_error: Mean of |P − share relevant| over the bins, weighted by
            candidates; its n counts queries.
        kept_probability: Mean P of the passages that the policy keeps.
        kept_relevant: Share of them that the labels call relevant; its n counts queries.
    """

    bins: tuple[ReliabilityBin, ...]
    expected_calibration_error: Interval
    candidates: Count
    kept_probability: float | None
    kept_relevant: Interval


class RuleChoice(_Frozen):
    """What one rule would choose, measured on queries that took no part in any choice.

    Attributes:
        policy: None where the rule allows no policy.
        tested_recall_loss: Its mean on the test queries of the certificate.
        price: Strict UDCG of the policy chosen without any promise minus this one's, paired.
    """

    rule: str
    chosen: bool
    policy: PolicySettings | None
    tested_recall_loss: float | None
    udcg_strict: Interval | None
    recall_loss: Interval | None
    harm: Interval | None
    price: Interval | None


class Bound(_Frozen):
    """An upper bound of the chosen policy's mean recall loss by one method."""

    method: str
    bound: float
    guaranteed: bool


class Price(_Frozen):
    """What the guarantee costs, and what other ways of giving one would say.

    Attributes:
        rules: Empty where no promise was asked for.
        observed: Mean recall loss of the chosen policy.
        bounds: On that mean, each true with probability ``1 − delta`` where guaranteed.
    """

    rules: tuple[RuleChoice, ...]
    delta: float
    observed: Interval
    bounds: tuple[Bound, ...]


class SegmentRow(_Frozen):
    """One segment's queries under the policy that would serve them."""

    segment: str
    queries: Count
    own_policy: bool
    udcg_strict: Interval
    against_first_k: Interval
    recall: Interval
    kept: Interval


class Segments(_Frozen):
    """The chosen policy by the values of a column of the queries.

    Attributes:
        gathered: How many segments were too small to stand alone and share the last row.
    """

    column: str
    rows: tuple[SegmentRow, ...]
    gathered: Count


class KeptIf(_Frozen):
    """A setting and the value of it that would have kept a passage."""

    setting: str
    value: float


class Example(_Frozen):
    """One dropped passage.

    Attributes:
        label: What the labels say of it, in words.
        retrieved_rank: 1-based, in the retriever's order.
        rank: 1-based, in the policy's order.
        snippet: The beginning of its text; None where no text was at hand.
        reason: Why it was dropped.
        kept_if: Every setting that would have to change for it to be kept.
    """

    query_id: str
    query: str
    passage_id: str
    title: str
    snippet: str | None
    label: str
    retrieved_rank: int
    rank: int
    relative_score: float | None
    probability: float | None
    reason: str
    kept_if: tuple[KeptIf, ...]


class Examples(_Frozen):
    """Dropped passages of one sort.

    Attributes:
        total: How many passages could have been dropped.
        dropped: How many were.
        share: dropped / total, with an interval clustered by query; its n counts queries.
        shown: At most one of a query, the most telling first.
    """

    total: Count
    dropped: Count
    share: Interval
    shown: tuple[Example, ...]


class JudgedShare(_Frozen):
    """Share of the retriever's first k for which any label exists."""

    k: int
    share: Interval


class RouteReport(_Frozen):
    """One route: what was chosen, what proves it, what it does.

    Attributes:
        without_promise: The policy of highest strict UDCG; equal to ``policy`` where no promise
            was asked for.
        no_certificate: Why there is none, and how many labels it would take; None where there
            is one.
        held_out: Whether what follows was measured on queries held out; otherwise on those
            that chose the policy, which is optimistic.
        queries: How many queries that were.
        no_reliability: Why P(relevant) is not examined; None where it is.
        no_segments: Why there is no table by segment; None where there is one.
        dropped_irrelevant: Irrelevant passages of the bare first ``BARE_K``.
        dropped_relevant: Relevant passages of the baseline of recall loss.
        judged: Over all queries.
        recall_at_depth: Of the retriever's whole pool, over all queries.
    """

    route: Route
    score_kind: ScoreKind
    policy: PolicySettings
    without_promise: PolicySettings
    why: str
    certificate: Certificate | None
    no_certificate: str | None
    held_out: bool
    queries: Count
    answerable: Count
    comparison: tuple[MetricComparison, ...]
    by_k: tuple[AtK, ...]
    frontier: Frontier
    reliability: Reliability | None
    no_reliability: str | None
    price: Price | None
    segments: Segments | None
    no_segments: str | None
    dropped_irrelevant: Examples
    dropped_relevant: Examples
    judged: tuple[JudgedShare, ...]
    recall_at_depth: Interval

    def metric(self, name: str) -> MetricComparison:
        """The comparison of one metric."""
        return next(row for row in self.comparison if row.metric == name)


class LabelCounts(_Frozen):
    """How many labels there are.

    Attributes:
        unanswerable: Queries without a relevant passage: what is kept for them is harm.
        chosen_on: Queries that chose and certified, and how many of them are answerable.
        held_out: Queries that did neither, and how many of them are answerable.
        grades: Judged passages by grade; 0 is judged irrelevant.
        negatives: Passages known to mislead, by kind.
    """

    queries: Count
    answerable: Count
    unanswerable: Count
    chosen_on: tuple[Count, Count]
    held_out: tuple[Count, Count]
    grades: dict[str, Count]
    negatives: dict[str, Count]


class ReportData(_Frozen):
    """A calibration, in figures that a person can check.

    Attributes:
        baseline: What recall loss is relative to: ``pool`` or ``k=10``.
        confidence: Of every interval, in (0, 1).
        routes: The first is the one that answers where every stage is alive.
        provenance: How the profile was made; no date, so that equal labels give equal bytes.
    """

    profile_id: str
    dataset: str
    baseline: str
    confidence: float
    routes: tuple[RouteReport, ...]
    labels: LabelCounts
    utilities: Utilities
    fusion: Fusion
    fingerprint: dict[str, str]
    provenance: Provenance
