"""Samples that are finished together: each is put down whatever the others hold, and once."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from storing import fill, judged

from ctxguard.monitor.store import Finished, SampleStore, State
from tests.stored import all_judged


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each transaction that writes."""
    begun: list[None] = []
    transaction = SampleStore.transaction

    def counting(store: SampleStore, *, writes: bool) -> object:
        if writes:
            begun.append(None)
        return transaction(store, writes=writes)

    monkeypatch.setattr(SampleStore, "transaction", counting)
    return begun


def waiting(store: SampleStore, n: int) -> list[int]:
    fill(store, n)
    return list(store.waiting(n))


def test_many_samples_take_one_transaction(store: SampleStore, transactions: list[None]) -> None:
    ids = waiting(store, 20)
    transactions.clear()
    assert store.finish("judge", [judged(one) for one in ids]) == {}
    assert store.finish("judge", []) == {}
    assert len(transactions) == 1
    assert store.states()[State.JUDGED] == 20


POISON = {
    "grades that cannot be read": lambda one: replace(one, grades=object()),
    "rows that are none": lambda one: replace(one, rows={1: 2}),
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_unwritable_sample_holds_no_others(
    store: SampleStore, poison: Callable[[Finished], Finished]
) -> None:
    ids = waiting(store, 5)
    ends = [judged(one) for one in ids]
    ends[3] = poison(ends[3])
    assert list(store.finish("judge", ends)) == [ids[3]]
    assert all_judged(store, "judge").sample_ids.tolist() == [*ids[:3], ids[4]]
    assert store.states()[State.PENDING] == 1
