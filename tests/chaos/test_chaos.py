"""Every fault at the smaller size: what should come of it came, and the accounts add up."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from apart import Told, run_apart
from bookkeeping import Counted, Tally, balance
from catalogue import ROWS
from scene import Size

from ctxguard.monitor.sampler import accounts

_AT_ONCE = 2
_WITH_THE_MODEL = ("dense leg hangs", "reranker stopped", "forked after warm-up")


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Told]]:
    """What came of a row; the rows that were selected run beside each other."""
    names = [
        item.callspec.params["row"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_a_fault_is_borne"
    ]
    pool = ThreadPoolExecutor(_AT_ONCE)
    running: dict[str, Future[Told]] = {
        name: pool.submit(run_apart, name, ROWS[name].expected, Size.SMALL) for name in names
    }
    yield lambda name: running[name].result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("row", ROWS)
def test_a_fault_is_borne(told: Callable[[str], Told], row: str) -> None:
    seen = told(row)
    assert seen.passed, (seen.wrong, seen)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("row", _WITH_THE_MODEL)
def test_a_fault_is_borne_with_the_model(row: str) -> None:
    seen = run_apart(row, ROWS[row].expected, Size.FULL)
    assert seen.passed, (seen.wrong, seen)


class TestTheBooks:
    """The suite would see what does not add up."""

    def tally(self) -> Tally:
        tally = Tally()
        tally.asked, tally.ok, tally.degraded, tally.failed, tally.shed = 10, 4, 3, 2, 1
        tally.candidates, tally.kept = 700, 30
        return tally

    def counted(self, **others: int) -> Counted:
        usual = {"received": 10, "ok": 4, "degraded": 3, "failed": 2, "shed": 1, "kept": 30}
        return Counted(**{**usual, **others}, dropped={"beyond_k": 600, "below_ratio": 70})

    def test_accounts_that_agree_are_right(self) -> None:
        assert balance(self.tally(), self.counted(), accounts(7, 7, {}), 7).wrong == ()

    @pytest.mark.parametrize("name", ["received", "ok", "degraded", "failed", "shed", "kept"])
    def test_a_metric_that_is_off_by_one_is_wrong(self, name: str) -> None:
        off = self.counted(**{name: getattr(self.counted(), name) + 1})
        assert balance(self.tally(), off, accounts(7, 7, {}), 7).wrong

    @pytest.mark.parametrize(
        ("sampled", "stored", "rows"), [(8, 8, 8), (7, 7, 6), (7, 6, 6), (6, 6, 6)]
    )
    def test_a_sample_too_many_or_too_few_is_wrong(
        self, sampled: int, stored: int, rows: int
    ) -> None:
        assert balance(self.tally(), self.counted(), accounts(sampled, stored, {}), rows).wrong

    def test_an_error_of_no_type_of_the_package_s_is_wrong(self) -> None:
        tally = self.tally()
        tally.untyped = 1
        assert balance(tally, self.counted(), accounts(7, 7, {}), 7).wrong
