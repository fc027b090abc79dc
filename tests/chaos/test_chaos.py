"""Every fault at the smaller size has the effect that it should, and the accounts add up."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from accounting import CallerCounts, compare
from faults import FAULTS
from isolation import run_isolated
from serving import Report, Size

from ctxguard.monitor.sampling.sampler import Accounts

_AT_ONCE = 2
_WITH_THE_MODEL = ("dense leg hangs", "reranker stopped", "forked after warm-up")


@pytest.fixture(scope="module")
def report_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Report]]:
    """The report of a fault; those selected run two at a time."""
    names = [
        item.callspec.params["fault"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_fault_has_expected_effect_only.__name__
    ]
    pool = ThreadPoolExecutor(_AT_ONCE)
    running: dict[str, Future[Report]] = {
        name: pool.submit(run_isolated, name, Size.SMALL) for name in names
    }
    yield lambda name: running[name].result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_has_expected_effect_only(report_of: Callable[[str], Report], fault: str) -> None:
    report = report_of(fault)
    assert report.wrong == (), report


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("fault", _WITH_THE_MODEL)
def test_so_it_does_with_the_model(fault: str) -> None:
    report = run_isolated(fault, Size.FULL)
    assert report.wrong == (), report


RIGHT = Accounts(7, 7, 0, {})


@pytest.mark.parametrize(
    ("samples", "rows", "changes", "is_right"),
    [
        (RIGHT, 7, {}, True),
        *[
            (RIGHT, 7, {name: 1}, False)
            for name in ("received", "ok", "degraded", "failed", "shed", "kept", "dropped")
        ],
        *[
            (Accounts(sampled, stored, 0, {}), rows, {}, False)
            for sampled, stored, rows in ((8, 8, 8), (7, 7, 6), (7, 6, 6), (6, 6, 6))
        ],
    ],
)
def test_difference_of_one_is_found(
    samples: Accounts, rows: int, changes: dict[str, int], *, is_right: bool
) -> None:
    ends, callers = {"ok": 4, "degraded": 3, "failed": 2, "shed": 1, "kept": 30}, CallerCounts()
    callers.counts.update({**ends, "candidates": 700})
    metrics = Counter({**ends, "received": 10, "dropped": 670})
    metrics.update(changes)
    assert (compare(callers, metrics, samples, rows).wrong == ()) is is_right
