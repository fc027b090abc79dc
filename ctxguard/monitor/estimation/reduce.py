"""Reduces a sample and its verdicts to a judged request.

All served passages are judged, and dropped ones with the probabilities that the sample holds. The
same reduction serves the verdicts of a judge and the labels of people. Pure: no I/O, no clock, no
logging.
"""

from collections.abc import Mapping

from ctxguard.core.metrics import Utilities, strict_utilities
from ctxguard.core.types import Mode
from ctxguard.monitor.estimation.relevance import NEAR_DROPPED
from ctxguard.monitor.estimation.terms import JudgedRequest
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord

_NOTHING_DROPPED = JudgingRates(dropped_rate=1.0)
"""If nothing was dropped, all of it is judged with certainty."""


def judged_request(
    record: SampleRecord,
    verdicts: Mapping[str, Judgment],
    *,
    utilities: Utilities,
    max_grade: int,
    probability: float | None = None,
) -> JudgedRequest:
    """Reduce the verdicts on a sample to the numbers that estimates need.

    Args:
        verdicts: Verdicts by passage id; those of some passages may be missing.
        max_grade: The highest grade of the scale.
        probability: Probability with which it was sampled and then taken up for judging; None for
            the probability of sampling alone.
    """
    rates = record.rates if record.dropped else _NOTHING_DROPPED
    ids = record.passage_ids
    none = Judgment("", 0, judged=False)
    of_served = [verdicts.get(ids[position], none) for position in record.served]
    grades = tuple([verdict.grade for verdict in of_served])
    has_hit = max(grades, default=0) > 0
    to_judge = record.to_judge(has_hit=has_hit)
    baseline = set(record.in_baseline)
    outside_baseline, in_baseline = [
        rates.dropped_probability(has_hit=has_hit, in_baseline=each) for each in (False, True)
    ]
    n_relevant, n_missing = sum([grade > 0 for grade in grades]), 0
    cells = [0.0] * 4
    near = set(record.dropped[:NEAR_DROPPED])
    for position in to_judge:
        verdict = verdicts.get(ids[position])
        if verdict is None:
            n_missing += 1
            continue
        is_relevant = verdict.grade > 0
        n_relevant += is_relevant
        chance = in_baseline if position in baseline else outside_baseline
        cells[2 * (position not in near) + is_relevant] += 1.0 / chance
    share = 1.0 - n_missing / len(to_judge) if to_judge else 1.0
    is_observed = outside_baseline > 0.0 and share > 0.0
    full_pool = rates.dropped_rate == 1.0 or record.has_full_pool(has_hit=has_hit)
    return JudgedRequest(
        probability=record.probability if probability is None else probability,
        grades=grades,
        utilities=tuple(
            strict_utilities(
                list(grades),
                top_grade=max_grade,
                negatives=[verdict.negative for verdict in of_served],
                judged=[verdict.judged for verdict in of_served],
                utilities=utilities,
            )
        ),
        # Missing verdicts are treated as missing at random.
        dropped_relevant=(cells[1] + cells[3]) / share if is_observed else None,
        dropped_probability=outside_baseline * share,
        pool_relevant=n_relevant if full_pool and not n_missing else None,
        partial_pool_relevant=n_relevant if full_pool and n_missing else None,
        full_pool_probability=rates.full_pool_probability(has_hit=has_hit),
        full_pool_probability_if_no_hit=rates.full_pool_probability(has_hit=False),
        session_id=record.session_id,
        recall_loss=recall_loss(record, verdicts, record.rates.baseline_k),
        enforced=None if record.arm_probability is None else record.mode is Mode.ENFORCE,
        arm_probability=record.arm_probability,
        missing=tuple([place for place, one in enumerate(of_served) if not one.judged]),
        dropped=tuple([cell / share if is_observed else 0.0 for cell in cells]),
        scores=tuple([verdict.score for verdict in of_served]),
    )


def recall_loss(
    record: SampleRecord, verdicts: Mapping[str, Judgment], k: int | None
) -> float | None:
    """Compute the share of the relevant among the retriever's first k that was not served.

    Uses only requests that were chosen whatever was served: those whose pool was judged because
    nothing relevant was served would make the loss look larger.

    Args:
        k: Number of the pool's passages that count, in the retriever's own order; None for all.

    Returns:
        None if they were not all judged by design, a verdict is missing, or none is relevant.
    """
    pool = sorted((*record.served, *record.dropped))
    first = pool[:k]
    if not (
        record.full_pool
        or record.rates.dropped_rate == 1.0
        or (record.baseline and len(first) <= record.rates.baseline_k)
    ):
        return None
    served = set(record.served)
    kept = lost = 0
    for position in first:
        verdict = verdicts.get(record.passage_ids[position])
        if verdict is None:
            return None
        if verdict.grade > 0:
            kept += position in served
            lost += position not in served
    return lost / (kept + lost) if kept + lost else None
