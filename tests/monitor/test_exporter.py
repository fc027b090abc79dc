"""What a scrape of the monitor says."""

from pathlib import Path

import pytest
from contexts import make_context
from prometheus_client import generate_latest
from scraping import one, scrape
from stub_judges import PaidOpinion
from watching import Watching

from ctxguard.core.passages import estimate_tokens
from ctxguard.core.types import DEFAULT_K, Mode, Route
from ctxguard.endpoints.failures import InvalidReason
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import JudgingRates
from tests.timing import until

QRELS = {"one": {"p0": 1, "p7": 1}, "two": {"p1": 1}, "three": {"p9": 1}}
POOL = [f"p{rank}" for rank in range(10)]
JUDGE = "labels 1"
HERE = {"route": "external"}
"""Where the requests of these tests are answered."""


def watched(queries: list[str], *, rate: float = 1.0, min_n: int = 2) -> Watching:
    live = Watching(
        LabelJudge(QRELS),
        rate=rate,
        capacity=100,
        rates=JudgingRates(dropped_rate=1.0),
        min_n=min_n,
    )
    live.watch(*[make_context(POOL, 3, query=query) for query in queries])
    live.monitor.report()
    return live


def test_estimates_are_exported_with_their_intervals() -> None:
    live = watched(["one", "two", "three"])
    samples = scrape(live.registry)
    for window, estimates in live.monitor.report().estimates.items():
        for metric, found in estimates.items():
            labels = {"metric": metric.value, "window": window.value}
            assert one(samples, "ctxguard_estimate", **labels) == found.value
            assert one(samples, "ctxguard_estimate_lower", **labels) == found.lower
            assert one(samples, "ctxguard_estimate_upper", **labels) == found.upper
            assert one(samples, "ctxguard_estimate_requests", **labels) == found.n
    for metric, window in live.monitor.report().shown.items():
        labels = {"metric": metric.value, "window": window.value}
        assert one(samples, "ctxguard_estimate_shown", **labels) == 1.0
    assert one(samples, "ctxguard_estimate_age_seconds") >= 0.0


def test_no_data_is_an_absent_series() -> None:
    assert one(scrape(watched([]).registry), "ctxguard_estimate_age_seconds") is None
    live = watched(["one"], min_n=30)
    samples = scrape(live.registry)
    labels = {"metric": "pooled_recall", "window": "recent"}
    for name in ("ctxguard_estimate", "ctxguard_estimate_lower", "ctxguard_estimate_upper"):
        assert one(samples, name, **labels) is None
    assert one(samples, "ctxguard_estimate_requests", **labels) == 1
    assert one(samples, "ctxguard_estimate_requests_needed", **labels) == 30


def test_nothing_is_said_before_reports() -> None:
    assert scrape(Watching(LabelJudge(QRELS)).registry) == {
        ("ctxguard_monitor_errors_total", frozenset()): 0.0
    }


def test_erring_judges_figure_is_no_estimate() -> None:
    live = Watching(PaidOpinion(QRELS), rates=JudgingRates(dropped_rate=1.0))
    live.watch(*[make_context(POOL, 3, query=query) for query in QRELS])
    live.monitor.report()
    samples = scrape(live.registry)
    labels = {"metric": "pooled_recall", "window": "all_retained"}
    assert one(samples, "ctxguard_estimate", **labels) is None
    assert one(samples, "ctxguard_judge_estimate", **labels) == 2 / 4
    assert one(samples, "ctxguard_estimate_requests_needed", **labels) is None
    assert one(samples, "ctxguard_estimate_grades_needed", **labels) == 4, "two grades count one"
    # What grades of people never correct is not exported.
    names = {dict(own).get("metric") for name, own in samples if name.startswith("ctxguard_est")}
    assert names == {"precision", "served_mrr", "gain", "harm", "udcg", "pooled_recall", None}


def test_sample_states_add_up_per_scrape() -> None:
    live = watched(["one", "unknown"])
    live.offer(*[make_context(POOL, 1)] * 103)
    live.writer.flush()
    live.monitor.report()
    samples = scrape(live.registry)
    lost = one(samples, "ctxguard_lost_samples_total", reason="queue_full")
    assert lost == 3
    assert one(samples, "ctxguard_samples_total") == 105 == 2 + 100 + lost
    assert one(samples, "ctxguard_stored_samples_total") == 102
    assert one(samples, "ctxguard_pending_samples") == 0
    assert one(samples, "ctxguard_unaccounted_samples") == 0
    assert one(samples, "ctxguard_waiting_samples") == 100
    assert one(samples, "ctxguard_judged_samples_total", **HERE, outcome="judged") == 1
    assert one(samples, "ctxguard_judged_samples_total", **HERE, outcome="incomplete") == 1


def test_sampled_tokens_stand_for_traffic() -> None:
    live = watched([])
    live.watch(*[make_context(POOL, 3, query="one") for _ in range(4)], probability=0.25)
    live.watch(make_context(POOL, 2, query="one", mode=Mode.SHADOW))
    live.monitor.report()
    samples = scrape(live.registry)
    each = estimate_tokens("p0")
    counted = {
        fate: one(samples, "ctxguard_candidate_tokens_total", mode="enforce", fate=fate)
        for fate in ("kept", "dropped_in_assembly", "dropped_by_policy")
    }
    assert counted == {
        "kept": 16 * 3 * each,
        "dropped_in_assembly": 0.0,
        "dropped_by_policy": 16 * 7 * each,
    }
    assert one(samples, "ctxguard_today_tokens_total", mode="enforce") == 16 * DEFAULT_K * each
    shadowed = one(samples, "ctxguard_candidate_tokens_total", mode="shadow", fate="kept")
    assert shadowed == 2 * each


def test_routes_and_outcomes_begin_at_zero() -> None:
    live = watched(["one"])
    samples = scrape(live.registry)
    for route in Route:
        counted = one(samples, "ctxguard_judged_samples_total", route=route, outcome="incomplete")
        assert counted == 0.0
        grades = one(samples, "ctxguard_grades_total", route=route)
        assert grades == 10.0 * (route == "external")


def test_numbers_name_their_judge() -> None:
    live = watched(["one", "two"])
    text = generate_latest(live.registry).decode()
    for name in ("estimate", "estimate_lower", "estimate_requests", "judged_samples_total"):
        assert f'ctxguard_{name}{{judge="{JUDGE}",' in text
    assert "mean over non-empty requests of the share of served passages" in text
    assert "Upper end of the 95% confidence interval" in text


def test_judges_cost_is_exported() -> None:
    judge = PaidOpinion(QRELS)
    judge.ledger.add(calls=1, input_tokens=1_000_000, output_tokens=10)
    judge.ledger.add_invalid("p", InvalidReason.REFUSED, "no")
    live = Watching(judge)
    live.watch()
    live.monitor.report()
    samples = scrape(live.registry)
    assert one(samples, "ctxguard_judge_calls_total") == 1
    assert one(samples, "ctxguard_judge_invalid_total", reason="refused") == 1
    assert one(samples, "ctxguard_judge_tokens_total", direction="input") == 1_000_000
    assert one(samples, "ctxguard_judge_cost_total") == pytest.approx(2.00008)


def test_failing_store_shows_until_mended(tmp_path: Path) -> None:
    file = tmp_path / "samples.db"
    live = Watching(LabelJudge(QRELS), url=f"sqlite:///{file}")
    live.store.close()
    file.write_bytes(b"no database" * 1_000)
    live.monitor.start(interval_seconds=0.001, refresh_seconds=0.001)
    failing = {"error": "StoreCorruptError"}
    until(lambda: one(scrape(live.registry), "ctxguard_store_failing", **failing) == 1)
    file.rename(tmp_path / "damaged")
    until(lambda: one(scrape(live.registry), "ctxguard_store_failing", **failing) is None)
    live.monitor.stop()
