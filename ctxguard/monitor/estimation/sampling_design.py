"""Chooses the passages that people grade, with the probability of each.

One budget of grades serves every metric. Requests are opened in the order of a hash. Of an opened
request people grade the first passage and, in six of ten, on down to the first relevant one; every
other judged passage has a coin: one size for served ones, and for dropped ones a large one where
the judge says yes. All probabilities are constants, so nothing rests on what earlier grades showed;
only where the budget opens all requests and is not spent, as of a short log, coins are equal and as
large as it allows. Reads and writes the store.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ctxguard.errors import StoreError
from ctxguard.monitor.labels.evidence import asked_probabilities
from ctxguard.monitor.labels.files import number_of
from ctxguard.monitor.labels.samples import GradedSample, graded_samples, unfinished
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import PickedPassage, PickKind, SampleStore
from ctxguard.monitor.store.database import chunks

GO_ON = 0.6
"""Probability of grading on below an irrelevant first passage."""
SERVED_COIN = 0.35
DROPPED_COINS = {True: 0.4, False: 0.12}
"""Probability of a dropped passage's coin, keyed by whether the judge calls the passage
relevant."""

_RUN, _COIN = HashSampler("label run"), HashSampler("label coin")
_AT_ONCE = 100
"""How many samples' texts are in memory at once."""
_TRIES = 5


def to_label(
    store: SampleStore,
    series: str,
    n: int,
    *,
    tenant: str | None = None,
    whole: bool = False,
    dry_run: bool = False,
) -> list[GradedSample]:
    """Return samples for people to grade: first opened ones that still lack grades, then new ones.

    New ones are drawn from all tenants, since the estimates are about all requests. Those of other
    tenants are not returned: they wait for their own call, which draws no others.

    Args:
        n: About how many passages of requests people are to grade, of all tenants together.
        tenant: As ``GradedSample.is_of_tenant`` takes it; None for all.
        whole: Whether new requests are graded as far as they are judged.
        dry_run: Whether to remember nothing.

    Raises:
        StoreError: other draws were saved again and again meanwhile.
    """
    picked = store.picked(series)
    before = graded_samples(store, series, list(picked), picked)
    chosen = unfinished(before.values(), n, tenant=tenant)
    waiting = unfinished(before.values(), n) if tenant else chosen
    left = n - sum(sample.expected_passages for sample in waiting)
    if left >= 1.0:
        new = _drawn(store, series, left, whole=whole, dry_run=dry_run)
        chosen += unfinished(new, tenant=tenant)
    if not dry_run:
        store.ask_for_labels([sample.sample_id for sample in chosen], tenant or "")
    return chosen


def _drawn(
    store: SampleStore, series: str, budget: float, *, whole: bool, dry_run: bool
) -> list[GradedSample]:
    """Open requests within a budget of grades, and remember them unless it is a dry run."""
    for _ in range(_TRIES):
        waiting, last_pick = store.to_pick(series)
        found, left = [], budget
        for sample in _opened(store, series, waiting, whole=whole):
            found.append(sample)
            left -= sample.expected_passages
            if left <= 0.0:
                break
        if left >= 1.0 and not whole:
            found = _with_larger_coins(found, budget)
        passages = [one for sample in found for one in sample.picked]
        if not found or dry_run or store.save_pick(series, passages, last_pick):
            return found
    raise StoreError("other processes drew passages for labels at the same time; try again")


def _with_larger_coins(samples: Sequence[GradedSample], budget: float) -> list[GradedSample]:
    """With all requests open, toss all coins again, as large as the budget allows.

    Equal coins tell more about policies that serve other passages than today's.
    """
    tops = [coins_of(sample, coin=0.0) for sample in samples]
    bare = [
        replace(sample, picked=tuple(_picked(sample, top)))
        for sample, top in zip(samples, tops, strict=True)
    ]
    below = sum(len(top) - 1 for top in tops)
    left = budget - sum(sample.expected_passages for sample in bare)
    coin = min(left / max(below, 1), 1.0)
    return [
        replace(sample, picked=tuple(_picked(sample, coins_of(sample, coin=coin))))
        for sample in samples
    ]


def _opened(
    store: SampleStore, series: str, sample_ids: Sequence[int], *, whole: bool
) -> Iterator[GradedSample]:
    for ids in chunks(sample_ids, _AT_ONCE):
        for sample in graded_samples(store, series, ids, {}).values():
            coins = coins_of(sample, coin=1.0 if whole else None)
            if picked := tuple(_picked(sample, coins)):
                yield replace(sample, picked=picked)


def _picked(sample: GradedSample, coins: Mapping[int, float]) -> Iterator[PickedPassage]:
    """Open a request, and toss its coins; yield nothing if no passage of it is judged."""
    record = sample.record
    if not coins:
        return
    question = number_of(record)
    go_on = 1.0 if min(coins.values()) == 1.0 else GO_ON
    kind = PickKind.RUN if _RUN.selects(record.request_id, go_on) else PickKind.FIRST
    yield PickedPassage(sample.sample_id, kind, -1, go_on, question=question)
    for position, coin in coins.items():
        if _COIN.selects(f"{record.request_id}\0{record.passage_ids[position]}", coin):
            yield PickedPassage(sample.sample_id, PickKind.COIN, position, coin, question=question)


def coins_of(sample: GradedSample, *, coin: float | None = None) -> dict[int, float]:
    """Return the probability of each judged passage's coin, by position.

    That of the first is 1, so that each opened request has a grade, also where nothing was served.

    Args:
        coin: The coin of every other passage; None for the design's own.
    """
    record, judge = sample.record, sample.judge
    coins: dict[int, float] = {}
    for place in record.to_judge(judge):
        of_dropped = DROPPED_COINS[bool(record.grade(judge, place))]
        own = SERVED_COIN if place in record.served else of_dropped
        coins[place] = own if coin is None else coin
    if coins:
        coins[next(iter(coins))] = 1.0
    return coins


def usable_labels(store: SampleStore, request_ids: Sequence[str]) -> dict[str, int]:
    """Count people's usable grades, and the requests that they cover.

    Returns:
        ``passages`` that were drawn and graded, ``requests`` whose grades are complete, those that
        are ``unfinished``, and those ``unpicked``, which no draw asked about.
    """
    ids = store.find(request_ids)
    samples: dict[int, GradedSample] = {}
    for series in store.series():
        for sample_id, sample in graded_samples(store, series, ids).items():
            if sample.picked or sample_id not in samples:
                samples[sample_id] = sample
    found = samples.values()
    asked = list(map(asked_probabilities, found))
    return {
        "passages": sum(map(len, asked)),
        "requests": sum(map(bool, asked)),
        "unfinished": sum(not each.is_graded for each in found),
        "unpicked": sum(not each.picked for each in found),
    }
