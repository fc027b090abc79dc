"""Estimates for requests without labels, from the judge's errors in labelled requests.

This assumes that the judge is right as often on both sets of requests: that its sensitivity and
specificity are the same. The grades that people would give may differ. Pure: no I/O, no clock, no
logging.
"""

import math

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation import joint
from ctxguard.monitor.estimation.joint import Grades
from ctxguard.monitor.estimation.ratio import BORROWED, Estimate, linearised
from ctxguard.monitor.estimation.relevance import YES, Model
from ctxguard.monitor.estimation.sums import Sums
from ctxguard.monitor.estimation.terms import Metric

_LEAST_LABELS = 10
"""With fewer, the judge's error rates cannot be estimated, whatever precision is asked for."""

_LEAST_OF_A_KIND = 5
"""Relevant graded passages, and others: the rate of fewer seems certain when it is not."""

_LEAST_POWER = 0.3
"""Share of a difference between requests that the judge must see; 1 for an exact judge."""


Rates = tuple[float, float, FloatArray]
"""How often a judge calls passages relevant, by the grades of people: the shares of the relevant
passages, its sensitivity, and of the others; and shape (n, 2), the error that each labelled cluster
adds to these two. It did not call a served passage relevant that it refused to judge."""


def error_rates(grades: Grades) -> Rates | None:
    """Estimate a judge's rates of calling passages relevant, linearised over clusters.

    Returns:
        None if too few passages are relevant, or too few are not.
    """
    # What is borrowed is about served passages; a dropped one may stand for many.
    passages, is_served = grades.passages, grades.passages["rank"] > 0
    frame = passages["frame"].astype(np.intp)
    total = np.bincount(frame, grades.weight * is_served, 2)
    frames = total / np.bincount(frame[is_served], minlength=2).clip(1)
    weight = grades.weight / frames[frame].clip(1e-300) * is_served
    is_yes = (passages["verdict"] == YES) * 1.0
    shares, rates = [], []
    for is_kind in (passages["relevant"] > 0.0, passages["relevant"] <= 0.0):
        own = weight * is_kind
        if np.count_nonzero(own) < _LEAST_OF_A_KIND:
            return None
        rates.append(float(own @ is_yes / own.sum()))
        shares.append(own / own.sum() * (is_yes - rates[-1]))
    cluster = grades.cluster[grades.request]
    n = int(grades.cluster.max(initial=-1)) + 1
    errors = np.column_stack([np.bincount(cluster, one, n) for one in shares])
    scale = math.sqrt(n / max(n - 2, 1))
    return rates[0], rates[1], np.asarray(errors * scale, np.float64)


def borrowed_estimates(
    sums: Sums, rates: Rates | None, model: Model, min_n: int
) -> dict[Metric, Estimate]:
    """Estimate metrics of some requests from the judge's verdicts and its errors in others.

    With sensitivity s and false-yes rate f, the judge's expected finding is f + (s − f)·y if
    people's is y, for any weighted share of relevant passages; this is solved for y (W. J. Rogan
    and B. Gladen, "Estimating prevalence from the results of a screening test", American Journal
    of Epidemiology, 1978). The variance adds that of the judge's findings over these requests to
    that of s and f at the result, both linearised.

    Args:
        sums: Sums of the columns of ``joint.basis`` over the requests of the estimates.
        rates: The judge's rates; None if nothing is known of them.
        model: What a passage is worth on average.
        min_n: Least number of labelled clusters, and of those of the estimates.

    Returns:
        The metrics that are linear in the relevance of single passages; none if there are too few
        labels or judged requests, or if the judge can hardly tell relevant passages from others.
    """
    enough = max(min_n, _LEAST_LABELS)
    if rates is None or len(rates[2]) < enough or sums.n < min_n:
        return {}
    sensitivity, false_yes, errors = rates
    power = sensitivity - false_yes
    if power < _LEAST_POWER:
        return {}
    unit = np.eye(joint.N_COLUMNS)
    of_ranks = unit[joint.JUDGE_DISCOUNTED], unit[joint.DISCOUNTED], unit[joint.ONE]
    of_precision = unit[joint.JUDGE_PRECISION], unit[joint.ANY_SERVED], unit[joint.ANY_SERVED]
    gain, harm = model.gain, model.harm
    found = {}
    for metric, (seen, all_seen, requests), of_relevant, of_all in (
        (Metric.PRECISION, of_precision, 1.0, 0.0),
        (Metric.GAIN, of_ranks, gain, 0.0),
        (Metric.HARM, of_ranks, -harm, harm),
        (Metric.UDCG, of_ranks, gain + harm, -harm),
    ):
        relevant = (seen - false_yes * all_seen) / power
        ratio = sums.combined(of_relevant * relevant + of_all * all_seen, requests)
        if not ratio.b > 0.0:
            continue
        y, whole = (float(one @ sums.totals) / ratio.b for one in (relevant, all_seen))
        slope = of_relevant / power * np.array([-y, y - whole])
        found[metric] = linearised(
            metric,
            ratio,
            # Of the ratio, as that of a − R·b.
            errors @ slope * ratio.b,
            squares=ratio.squares,
            n=len(errors),
            effective=float(len(errors)),
            method=BORROWED,
        )
    return found
