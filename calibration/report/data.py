"""The data of a calibration report: every figure with its n and its interval.

Frozen data that become JSON; they hold no label and no passage except the examples shown.
``calibration.report.evidence`` gathers them, ``calibration.report.page`` shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibration.curve import Curve
from calibration.report.dial import Dial
from calibration.report.summary import Summary
from ctxguard.core.fusion import Fusion
from ctxguard.core.interval import Interval
from ctxguard.core.metrics import Utilities
from ctxguard.core.types import Route, ScoreKind
from ctxguard.profile.schema import AssessorProfile, Certificate, Provenance


@dataclass(frozen=True)
class ReliabilityBin:
    """Candidates whose P(relevant) lies in [start, end).

    Attributes:
        mean_probability: Mean predicted probability; None for an empty bin.
        relevant: Share labelled relevant; its interval is clustered by query, its n counts
            candidates.
        queries: Number of queries that the candidates belong to.
    """

    start: float
    end: float
    mean_probability: float | None
    relevant: Interval
    queries: int


@dataclass(frozen=True)
class Reliability:
    """Calibration of P(relevant) on queries that no model saw: held out, or of another fold.

    Attributes:
        expected_calibration_error: Mean of |P − share relevant| over the bins, weighted by
            candidates; its n counts queries.
        kept_probability: Mean P of the passages that the policy keeps.
        kept_relevant: Share of those passages labelled relevant; its n counts queries.
    """

    bins: tuple[ReliabilityBin, ...]
    expected_calibration_error: Interval
    candidates: int
    kept_probability: float | None
    kept_relevant: Interval


@dataclass(frozen=True)
class Example:
    """One dropped passage.

    Attributes:
        snippet: The beginning of the text; None if the passage could not be looked up.
        label: The label, in words.
        retrieved_rank: Rank in the retriever's order, from 1.
        rank: Rank in the policy's order, from 1.
        probability: P(relevant), by a model that did not see the query's labels; None without.
    """

    query_id: str
    query: str
    passage_id: str
    title: str
    snippet: str | None
    label: str
    retrieved_rank: int
    rank: int
    probability: float | None


@dataclass(frozen=True)
class Examples:
    """Dropped passages of one kind.

    Attributes:
        total: Number of passages of this kind.
        dropped: Number of them that were dropped.
        share: dropped / total, with an interval clustered by query; its n counts queries.
        shown: Examples, at most one per query, the worst first.
    """

    total: int
    dropped: int
    share: Interval
    shown: tuple[Example, ...]


@dataclass(frozen=True)
class RouteReport:
    """One route: the chosen policy, its certificate, and its measurements.

    Attributes:
        summary: The table of results, and what to beware of.
        why: Why this kind of policy was chosen.
        certificate_words: The certificate in words, or why there is none.
        sufficiency: Whether contexts can be called insufficient, and on what evidence, in words.
        asking: What an assessor adds, or why nobody is asked; empty without one.
        assessor: The same in figures; None where nobody is asked.
        answerable: Number of measured queries with a relevant passage.
        today: The retriever's first passages at every k.
        reliability: The calibration of P(relevant), or why it is not shown.
        dropped_irrelevant: Irrelevant passages among those served today.
        dropped_relevant: Relevant passages of the baseline of recall loss.
        judged: Share of the first k passages with a label by k, over all queries.
        recall_at_depth: Recall of all candidates, over all queries.
    """

    route: Route
    score_kind: ScoreKind
    summary: Summary
    why: str
    certificate: Certificate | None
    certificate_words: str
    sufficiency: str
    asking: str
    assessor: AssessorProfile | None
    answerable: int
    today: Curve
    reliability: Reliability | str
    dropped_irrelevant: Examples
    dropped_relevant: Examples
    judged: Mapping[int, Interval]
    recall_at_depth: Interval


@dataclass(frozen=True)
class ReportData:
    """The evidence of a calibration.

    Attributes:
        serving_k: How many passages are served today; recall loss is relative to them.
        confidence: Confidence level of every interval, in (0, 1).
        routes: The first answers while every stage works.
        dial: Contexts of the first route from the leanest to the richest; None where there is only
            today's.
        labels: Numbers of queries: all, those with a relevant passage (``answerable``) and those
            without one, for which every passage kept is harm; queries and answerable ones that
            were chosen on and held out; judged passages by grade; misleading ones by kind.
        provenance: How the profile was made; it has no date, so equal calibrations give equal
            bytes.
    """

    profile_id: str
    dataset: str
    serving_k: int
    confidence: float
    routes: tuple[RouteReport, ...]
    dial: Dial | None
    labels: Mapping[str, Any]
    utilities: Utilities
    fusion: Fusion
    fingerprint: Mapping[str, str]
    provenance: Provenance
