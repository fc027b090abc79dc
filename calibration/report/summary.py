"""What a person should see before they believe a calibration: today beside the choice.

Pure: a route's outcome in, rows with intervals and warnings out. The command line prints it and
the report begins with it.
"""

import numpy as np

from calibration.calibrate_route import (
    FEWEST_TO_CHOOSE,
    TIGHT,
    RouteOutcome,
    Settings,
)
from calibration.evaluate import bootstrap_interval
from calibration.report.data import OptionRow, Summary, SummaryRow
from calibration.verdict import FEWEST_HELD_OUT
from ctxguard.core.types import FloatArray
from ctxguard.profile.describe import describe_policy
from ctxguard.profile.schema import Interval

SUMMARY_METRICS = ("recall", "precision", "harm", "udcg_strict", "kept", "tokens")

LEAST_JUDGED = 0.5
"""Below this share of labels among the passages served today, their figures are mostly guesses."""

NOTABLE_LOSS = 0.01
"""A measured decrease in mean recall that is pointed out."""


def summarise(outcome: RouteOutcome, settings: Settings, *, held_out: bool) -> Summary:
    """Today's first k beside the choice, what else could be chosen, and what to beware of.

    Args:
        outcome: One route's choice.
        settings: Of the calibration.
        held_out: Whether the options were measured on queries that took no part in the choice.
    """
    today, chosen, seed = outcome.today.metrics.values, outcome.chosen.metrics.values, settings.seed
    differences = {
        name: bootstrap_interval(chosen[name] - today[name], seed=seed) for name in SUMMARY_METRICS
    }
    rows = [
        SummaryRow(
            metric=name,
            today=bootstrap_interval(today[name], seed=seed),
            chosen=bootstrap_interval(chosen[name], seed=seed),
            difference=difference if held_out else unproven(difference),
        )
        for name, difference in differences.items()
    ]
    judged = bootstrap_interval(today["judged"], seed=seed)
    verdict = outcome.profile.verdict
    return Summary(
        verdict="" if verdict is None else verdict.statement,
        serving_k=settings.serving_k,
        queries=len(outcome.today.metrics.query_ids),
        held_out=held_out,
        rows=tuple(rows),
        options=tuple(
            OptionRow(
                name=option.name,
                words=describe_policy(option.policy),
                means={name: _mean(option.metrics.values[name]) for name in SUMMARY_METRICS},
            )
            for option in outcome.options
        ),
        judged=judged,
        warnings=tuple(
            _warnings(outcome, differences["recall"], judged, settings, held_out=held_out)
        ),
    )


def unproven(difference: Interval) -> Interval:
    """A difference on the queries that chose, which is no evidence of a gain: without its value."""
    return Interval(value=None, lower=None, upper=None, n=difference.n)


def _mean(values: FloatArray) -> float | None:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else None


def _warnings(
    outcome: RouteOutcome,
    recall: Interval,
    judged: Interval,
    settings: Settings,
    *,
    held_out: bool,
) -> list[str]:
    lines = []
    k, certificate = settings.serving_k, outcome.profile.certificate
    is_today = outcome.chosen.policy == outcome.today.policy
    if judged.value is not None and judged.value < LEAST_JUDGED:
        lines.append(
            f"only {judged.value:.0%} of the first {k} passages were ever labelled: harm and "
            "precision are mostly a guess; label the passages that are served today"
        )
    if not held_out and not is_today:
        mend = f"label {FEWEST_TO_CHOOSE + FEWEST_HELD_OUT} answerable queries or more"
        if settings.held_out is not None:
            mend = "hold out a share of them"
        lines.append(
            "no query was held out, so the figures are those of the queries that chose, which is "
            f"optimistic, and nothing is certified by them; {mend}"
        )
    if recall.value is not None and recall.value < -NOTABLE_LOSS:
        noise = recall.upper is None or recall.upper >= 0.0
        lines.append(
            f"mean recall is {-recall.value:.3f} lower than that of the first {k}"
            + (", which may be noise" if noise else "")
        )
    if certificate is not None and not is_today and certificate.promises_nothing:
        lines.append(
            f"the certificate promises nothing: {certificate.n_recall} held-out queries allow a "
            "loss of more than half of the recall"
        )
    if certificate is not None and not is_today and outcome.labels_needed is not None:
        difference = certificate.recall_difference
        if difference is not None and outcome.labels_needed > difference.n:
            lines.append(
                f"about {outcome.labels_needed} held-out queries like these would show that mean "
                f"recall falls by {TIGHT:g} at most; {difference.n} were at hand"
            )
    return lines
