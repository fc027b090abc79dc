"""Live estimates of enforced and shadowed requests, and the interval of their difference."""

import numpy as np
import pytest
from judged_rows import sums_of
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from scraping import one, scrape
from watching import Watching

from ctxguard import ContextGuard, Hit, Mode, RatioPolicy, ScoreKind
from ctxguard.monitor.estimation.live import ARMS, Window, _dealt
from ctxguard.monitor.estimation.ratio import Estimate, difference, estimate
from ctxguard.monitor.estimation.terms import ROW, Metric, Table
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.request.telemetry import Telemetry

QUERIES = [f"question {n}" for n in range(200)]


def served_with(share: float | None) -> tuple[Watching, dict[str, Mode]]:
    """Traffic whose only relevant passage is third, and a policy that keeps the first two."""
    live = Watching(
        LabelJudge({query: {"p2": 1} for query in QUERIES}), rates=JudgingRates(dropped_rate=1.0)
    )
    guard = ContextGuard(
        lambda _query, *, depth: [Hit(f"p{n}", 1.0 - n / 10, f"text {n}") for n in range(depth)],
        policy=RatioPolicy(k=2),
        depth=8,
        score_kind=ScoreKind.COSINE,
        enforce_share=share,
        telemetry=Telemetry(CollectorRegistry()),
    )
    contexts = [guard.retrieve(query, request_id=query) for query in QUERIES]
    live.watch(*contexts)
    return live, {context.query: context.mode for context in contexts}


def test_a_scrape_shows_each_arm_and_what_enforcing_changes() -> None:
    live, modes = served_with(0.4)
    live.monitor.report()
    found, window = scrape(live.registry), {"window": "all_retained"}
    assert set(modes.values()) == set(ARMS)
    for arm, recall, precision in (("enforce", 0.0, 0.0), ("shadow", 1.0, 0.2)):
        for metric, value in (("recall", recall), ("precision", precision)):
            shown = one(found, "ctxguard_arm_estimate", arm=arm, metric=metric, **window)
            assert shown == pytest.approx(value)
    assert one(found, "ctxguard_arm_difference", metric="recall", **window) == -1.0
    assert one(found, "ctxguard_arm_difference_upper", metric="recall", **window) < -0.8


def test_where_no_request_was_dealt_there_is_no_series_of_arms() -> None:
    live, _ = served_with(None)
    live.monitor.report()
    assert not any(name.startswith("ctxguard_arm_") for name, _ in scrape(live.registry))


def test_where_all_were_dealt_to_one_arm_there_is_no_difference() -> None:
    live, _ = served_with(1.0)
    report = live.monitor.report()
    assert set(report.live.arms[Window.RECENT]) == {"enforce"}


def precision_rows(rng: np.random.Generator, shares: NDArray[np.float64]) -> Table:
    """Requests in shadow have a mean of .5, and .4 enforced; later ones .3 more in either arm."""
    n = shares.size
    table = np.zeros(n, ROW)
    enforced = rng.random(n) < shares
    mean = np.where(enforced, 0.4, 0.5) + 0.3 * (np.arange(n) >= n // 2)
    table["probability"] = 1.0
    table["enforced"] = enforced
    table["arm_probability"] = np.where(enforced, shares, 1.0 - shares)
    table["precision"] = rng.binomial(4, mean) / 4
    return table


def compared(table: Table) -> Estimate:
    table["probability"] *= _dealt(table)
    of_arm = [
        estimate(Metric.PRECISION, sums_of(table[table["enforced"] == arm]).ratio(Metric.PRECISION))
        for arm in (1.0, 0.0)
    ]
    return difference(*of_arm)


@pytest.mark.parametrize("later", [0.2, 0.7], ids=["one share", "a share that was raised"])
def test_the_interval_of_the_difference_holds_the_truth_as_often_as_it_says(later: float) -> None:
    """Also where quality changed when the share did, which a plain comparison takes for a gain."""
    rng = np.random.default_rng(0)
    shares = np.repeat([0.2, later], 150)
    found = [compared(precision_rows(rng, shares)) for _ in range(400)]
    held = [one.lower <= -0.1 <= one.upper for one in found]  # type: ignore[operator]
    assert np.mean(held) >= 0.93
    assert np.mean([one.value for one in found]) == pytest.approx(-0.1, abs=0.01)  # type: ignore[arg-type]


def test_without_either_estimate_there_is_no_difference() -> None:
    known = Estimate(0.5, 0.4, 0.6, 90, "normal-logit")
    assert difference(known, Estimate(None, None, None, 3, "none", 30)).value is None
