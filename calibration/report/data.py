"""The data of a calibration report: every figure with its n and its interval.

Frozen models that become JSON; they hold no label and no passage except the examples shown.
``calibration.report.evidence`` gathers them, ``calibration.report.page`` shows them.
"""

from typing import Annotated, Literal

from pydantic import Field

from ctxguard.core.fusion import Fusion
from ctxguard.core.metrics import Utilities
from ctxguard.core.types import Route, ScoreKind
from ctxguard.profile.schema import Certificate, Frozen, Interval, Provenance

Direction = Literal["higher", "lower"]
Count = Annotated[int, Field(ge=0)]


class PolicySettings(Frozen):
    """The settings of a policy that a person would change.

    Attributes:
        words: What the policy keeps, in words.
        threshold: Lowest relative score (``ratio``) or lowest P(relevant) (``expected_utility``)
            that is kept.
        temperature: T of the relative score; None for ``expected_utility``.
        cost: Cost of an irrelevant passage; None for ``ratio``.
        gain: Gain of a relevant passage; None for ``ratio``.
    """

    words: str
    kind: Literal["ratio", "expected_utility"]
    k: int
    threshold: float
    min_keep: int
    temperature: float | None = None
    cost: float | None = None
    gain: float | None = None


class MetricComparison(Frozen):
    """One metric under three policies, on the same queries.

    Attributes:
        better_when: Whether higher or lower is better; None for the size of a context.
        first_k: The passages served today: the retriever's first ``serving_k``.
        seed_rule: At most 3 passages with at least 70% of the best score.
        chosen: The chosen policy.
        against_first_k: chosen − first_k, paired by query; without a value on queries that chose.
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


class SummaryRow(Frozen):
    """One metric of what is served today and of the choice, on the same queries.

    Attributes:
        difference: chosen − today, paired by query; without a value on queries that chose, where
            a gain is the luck of the choice.
    """

    metric: str
    today: Interval
    chosen: Interval
    difference: Interval


class OptionRow(Frozen):
    """One policy that could be served, with its means; None where a metric has no data."""

    name: str
    words: str
    means: dict[str, float | None]


class Summary(Frozen):
    """What a person should see first.

    Attributes:
        verdict: Whether the choice may be served, in words.
        serving_k: How many passages are served today.
        queries: Number of queries measured on.
        held_out: Whether they took no part in the choice.
        options: Today, the choice, and what other objectives would give.
        judged: Share of the first ``serving_k`` that has a label.
        warnings: What to beware of, one line each.
    """

    verdict: str
    serving_k: int
    queries: Count
    held_out: bool
    rows: tuple[SummaryRow, ...]
    options: tuple[OptionRow, ...]
    judged: Interval
    warnings: tuple[str, ...]


class AtK(Frozen):
    """Strict UDCG at one size of context.

    Attributes:
        gain: Gain of the retriever's first k passages.
        harm: Harm of the retriever's first k passages, as a positive number.
        first_k: gain − harm.
        chosen: Strict UDCG of the chosen policy limited to this k.
    """

    k: int
    gain: Interval
    harm: Interval
    first_k: Interval
    chosen: Interval


class FrontPolicy(Frozen):
    """One policy of the Pareto front of recall loss and harm."""

    k: int
    threshold: float
    recall_loss: Interval
    harm: Interval
    udcg_strict: Interval


class Frontier(Frozen):
    """Every candidate policy by recall loss and harm, on the choosing queries.

    Attributes:
        n_candidates: Number of candidate policies, including those with equal figures.
        candidates: Distinct (recall loss, harm, strict UDCG), means over queries.
        front_line: (recall loss, harm) of the Pareto front, least recall loss first.
        front: Some policies of the front, evenly spaced along it.
        chosen: The chosen settings on the same queries.
    """

    n_candidates: Count
    candidates: tuple[tuple[float, float, float], ...]
    front_line: tuple[tuple[float, float], ...]
    front: tuple[FrontPolicy, ...]
    chosen: FrontPolicy


class ReliabilityBin(Frozen):
    """Candidates whose P(relevant) lies in [lower, upper).

    Attributes:
        mean_probability: Mean predicted probability; None for an empty bin.
        relevant: Share labelled relevant; its interval is clustered by query, its n counts
            candidates.
        queries: Number of queries that the candidates belong to.
    """

    lower: float
    upper: float
    mean_probability: float | None
    relevant: Interval
    queries: Count


class Reliability(Frozen):
    """Calibration of P(relevant) on held-out queries.

    Attributes:
        expected_calibration_error: Mean of |P − share relevant| over the bins, weighted by
            candidates; its n counts queries.
        kept_probability: Mean P of the passages that the policy keeps.
        kept_relevant: Share of those passages labelled relevant; its n counts queries.
    """

    bins: tuple[ReliabilityBin, ...]
    expected_calibration_error: Interval
    candidates: Count
    kept_probability: float | None
    kept_relevant: Interval


class SignalFamily(Frozen):
    """What one family of signals adds to P(relevant): see ``calibration.families``.

    Attributes:
        signals: Its signals, or the legs.
        gain: Strict UDCG with all families less that without this one, paired by query.
        milliseconds: What it costs a query; None if that was not measured.
    """

    family: str
    signals: tuple[str, ...]
    gain: Interval
    milliseconds: float | None


class MeasuredRule(Frozen):
    """The policy that one rule would choose, measured on held-out queries.

    Attributes:
        chosen: Whether the profile's policy was chosen by this rule.
        policy: None if the rule allows no policy.
        tested_recall_loss: Mean recall loss on the test queries of the certificate.
        price: Strict UDCG of the policy chosen without a promise minus this one's, paired by
            query.
    """

    rule: str
    chosen: bool
    policy: PolicySettings | None
    tested_recall_loss: float | None
    udcg_strict: Interval | None
    recall_loss: Interval | None
    harm: Interval | None
    price: Interval | None


class Price(Frozen):
    """The utility that a guarantee costs, and an upper bound of the recall loss.

    Attributes:
        rules: Empty if no promise was asked for.
        delta: Probability that the bound is false.
        observed: Mean recall loss of the chosen policy.
        bound: Betting upper bound of that mean.
    """

    rules: tuple[MeasuredRule, ...]
    delta: float
    observed: Interval
    bound: float


class SegmentRow(Frozen):
    """The queries of one segment under the policy that serves them."""

    segment: str
    queries: Count
    own_policy: bool
    udcg_strict: Interval
    against_first_k: Interval
    recall: Interval
    kept: Interval


class Segments(Frozen):
    """Metrics by segment: the values of a metadata column of the queries.

    Attributes:
        gathered: Number of segments too small for a row of their own; the last row holds them.
    """

    column: str
    rows: tuple[SegmentRow, ...]
    gathered: Count


class KeptIf(Frozen):
    """The value of a setting at which a passage would have been kept."""

    setting: str
    value: float


class Example(Frozen):
    """One dropped passage.

    Attributes:
        snippet: The beginning of the text; None if the passage could not be looked up.
        label: The label, in words.
        retrieved_rank: Rank in the retriever's order, from 1.
        rank: Rank in the policy's order, from 1.
        reason: Why the passage was dropped.
        kept_if: The settings that would all have to change for the passage to be kept.
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


class Examples(Frozen):
    """Dropped passages of one kind.

    Attributes:
        total: Number of passages of this kind.
        dropped: Number of them that were dropped.
        share: dropped / total, with an interval clustered by query; its n counts queries.
        shown: Examples, at most one per query, the worst first.
    """

    total: Count
    dropped: Count
    share: Interval
    shown: tuple[Example, ...]


class JudgedShare(Frozen):
    """Share of the retriever's first k passages that have a label."""

    k: int
    share: Interval


class RouteReport(Frozen):
    """One route: the chosen policy, its certificate, and its measurements.

    Attributes:
        summary: Today beside the choice.
        why: Why this kind of policy was chosen.
        no_certificate: Why there is no certificate; None if there is one.
        held_out: Whether the figures below were measured on held-out queries. Otherwise they
            were measured on the choosing queries, and are optimistic.
        sufficiency: Whether contexts can be called insufficient, and on what evidence, in words.
        queries: Number of queries measured on.
        answerable: Number of those with a relevant passage.
        no_reliability: Why ``reliability`` is None.
        families: What each family of signals adds; empty if the model has no named signals, or
            there is none. Measured out of fold if no query was held out.
        price: None if no query was held out, or recall loss is undefined on all of them.
        no_segments: Why ``segments`` is None.
        dropped_irrelevant: Irrelevant passages among those served today.
        dropped_relevant: Relevant passages of the baseline of recall loss.
        judged: Share of the first passages with a label, over all queries.
        recall_at_depth: Recall of all candidates, over all queries.
    """

    route: Route
    score_kind: ScoreKind
    policy: PolicySettings
    summary: Summary
    why: str
    certificate: Certificate | None
    no_certificate: str | None
    sufficiency: str
    held_out: bool
    queries: Count
    answerable: Count
    comparison: tuple[MetricComparison, ...]
    by_k: tuple[AtK, ...]
    frontier: Frontier
    reliability: Reliability | None
    no_reliability: str | None
    families: tuple[SignalFamily, ...]
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


class LabelCounts(Frozen):
    """Numbers of queries and labels.

    Attributes:
        answerable: Queries with a relevant passage.
        unanswerable: Queries without one; every passage kept for them is harm.
        chosen_on: Number of choosing queries, and of answerable ones among them.
        held_out: Number of held-out queries, and of answerable ones among them.
        grades: Number of judged passages by grade; grade 0 is irrelevant.
        negatives: Number of passages labelled as misleading, by kind.
    """

    queries: Count
    answerable: Count
    unanswerable: Count
    chosen_on: tuple[Count, Count]
    held_out: tuple[Count, Count]
    grades: dict[str, Count]
    negatives: dict[str, Count]


class ReportData(Frozen):
    """The evidence of a calibration.

    Attributes:
        serving_k: How many passages are served today; recall loss is relative to them.
        confidence: Confidence level of every interval, in (0, 1).
        routes: The first answers while every stage works.
        provenance: How the profile was made; it has no date, so equal calibrations give equal
            bytes.
    """

    profile_id: str
    dataset: str
    serving_k: int
    confidence: float
    routes: tuple[RouteReport, ...]
    labels: LabelCounts
    utilities: Utilities
    fusion: Fusion
    fingerprint: dict[str, str]
    provenance: Provenance
