"""Draws the passages that people grade next, and counts what their labels give."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np

from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import FloatArray
from ctxguard.errors import StoreError
from ctxguard.monitor.estimation import draw
from ctxguard.monitor.estimation.joint import RUN, Population
from ctxguard.monitor.estimation.live import Labels
from ctxguard.monitor.estimation.reduce import dropped_sizes, graded_passages, verdict_on
from ctxguard.monitor.estimation.relevance import NEAR
from ctxguard.monitor.estimation.terms import table_of
from ctxguard.monitor.labels.files import number_of
from ctxguard.monitor.labels.samples import (
    GradedSample,
    graded_samples,
    unfinished,
)
from ctxguard.monitor.sampling.inclusion import HashSampler
from ctxguard.monitor.store import PickedPassage, PickKind, SampleStore, ToPick

PASSAGES, RUNS, UNFINISHED, UNPICKED = "passages", "runs", "unfinished", "unpicked"

_RUN, _COIN, _SINGLE = (HashSampler(f"label {each.value}") for each in PickKind)
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
    """Return samples for people to grade: those picked before that lack grades, and new ones.

    New ones are drawn of all tenants, since the estimates are about all requests; those of
    another tenant are not returned. They wait for a call of their own, which draws no others.

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
    left = n - round(sum(sample.expected_passages for sample in waiting))
    if left > 0:
        drawn = _drawn(store, series, left, whole=whole, dry_run=dry_run)
        new = graded_samples(store, series, list(drawn), drawn if dry_run else None)
        lacking = unfinished(new.values(), tenant=tenant)
        known = {sample.sample_id for sample in lacking}
        chosen = [sample for sample in chosen if sample.sample_id not in known] + lacking
    if not dry_run:
        store.ask_for_labels([sample.sample_id for sample in chosen], tenant or "")
    return chosen


def _drawn(
    store: SampleStore, series: str, budget: int, *, whole: bool, dry_run: bool
) -> dict[int, list[PickedPassage]]:
    """Draw passages, and remember them unless it is a dry run."""
    for _ in range(_TRIES):
        found = store.to_pick(series)
        passages = list(_passages(store, series, found, budget, whole=whole))
        if not passages or dry_run or store.save_pick(series, passages, found.last_pick):
            by_sample: dict[int, list[PickedPassage]] = {}
            for one in passages:
                by_sample.setdefault(one.sample_id, []).append(one)
            return by_sample
    raise StoreError("other processes drew passages for labels at the same time; try again")


def _passages(
    store: SampleStore, series: str, found: ToPick, budget: int, *, whole: bool
) -> Iterator[PickedPassage]:
    """Draw passages for a budget of grades, as ``draw`` says."""
    ids = found.sample_ids
    if not len(ids):
        return
    population = Population.of(table_of(found.summaries, len(ids)))
    model = Labels.of(store.graded(series), store.stored_shares()).model
    m = draw.worth(population, model)
    can_open = ~found.is_opened & (population.n_served > 0)
    opened, singles = np.empty(0, np.int64), 0 if whole else budget
    plan = None
    if can_open.any():
        open_m = m[0][can_open], m[1][can_open]
        plan = draw.plan(population.take(can_open), model, open_m, budget, whole=whole)
        candidates = np.flatnonzero(can_open)
        order = np.lexsort((ids[candidates], found.label_orders[candidates]))
        opened, singles = candidates[order[: plan.n_opened]], plan.n_singles
    is_opened = found.is_opened.copy()
    is_opened[opened] = True
    units = draw.units(population, m, is_opened, singles)
    start = _SINGLE.uniform(f"{series}\0{found.last_pick}")
    taken = units[draw.systematic(units["probability"], start)]
    rows = sorted({*opened.tolist(), *taken["request"].tolist()})
    samples = graded_samples(store, series, ids[rows].tolist(), {})
    for row in opened.tolist():
        sample = samples.get(int(ids[row]))
        if sample is not None and plan is not None:
            yield from _opened(sample, plan, m[0][row], m[1][row])
    for unit in taken:
        sample = samples.get(int(ids[unit["request"]]))
        if sample is not None:
            yield from _single(sample, unit)


def _opened(
    sample: GradedSample, plan: draw.Plan, served: FloatArray, dropped: FloatArray
) -> Iterator[PickedPassage]:
    """Open a request: its run from the top, and the coins below."""
    record, request_id = sample.record, sample.record.request_id
    goes_on = _RUN.selects(request_id, plan.go_on)
    question = number_of(record)
    yield PickedPassage(sample.sample_id, PickKind.RUN, -1, plan.go_on, goes_on, question=question)
    worths = dict(zip(record.served[1:], served[1:].tolist(), strict=False))
    for position, (group, size) in dropped_sizes(record, sample.judge).items():
        verdict = verdict_on(record, sample.judge, position) % 2
        worths[position] = size * float(dropped[group - NEAR, verdict])
    for position, m in worths.items():
        chance = min(plan.coin * m, 1.0)
        if _COIN.selects(f"{request_id}\0{record.passage_ids[position]}", chance):
            yield PickedPassage(
                sample.sample_id, PickKind.COIN, position, chance, question=question
            )


def _single(sample: GradedSample, unit: np.void) -> Iterator[PickedPassage]:
    """Ask about a single passage; of the dropped of a kind, one with the chance of its size."""
    record, rank, chance = sample.record, int(unit["rank"]), float(unit["probability"])
    asked = partial(PickedPassage, sample.sample_id, PickKind.SINGLE, question=number_of(record))
    if rank:
        yield asked(position=record.served[rank - 1], probability=chance)
        return
    group, verdict = int(unit["group"]), int(unit["verdict"])
    sizes = {
        position: size
        for position, (own, size) in dropped_sizes(record, sample.judge).items()
        if own == group and verdict_on(record, sample.judge, position) % 2 == verdict
    }
    point = _SINGLE.uniform(f"{record.request_id}\0{group}\0{verdict}") * sum(sizes.values())
    for position, size in sizes.items():
        point -= size
        if point < 0.0:
            yield asked(position=position, probability=chance * size / sum(sizes.values()))
            return


def usable_labels(store: SampleStore, request_ids: Sequence[str]) -> dict[str, int]:
    """Count what people's labels of these requests give.

    Returns:
        The graded passages that were drawn, the finished runs from the top, the requests that need
        more grades, and those that no draw asked about.
    """
    ids = list(chain.from_iterable(store.find(request_id) for request_id in request_ids))
    samples: dict[int, GradedSample] = {}
    for series in store.series():
        for sample_id, sample in graded_samples(store, series, ids).items():
            if sample.picked or sample_id not in samples:
                samples[sample_id] = sample
    counts: Counter[str] = Counter()
    for sample in samples.values():
        rows = graded_passages(
            sample.record,
            sample.picked,
            sample.people,
            sample.judge,
            utilities=DEFAULT_UTILITIES,
            max_grade=max([1, *(one.grade for one in sample.people.values())]),
        )
        counts[PASSAGES] += len(rows)
        counts[RUNS] += int(np.count_nonzero((rows["frame"] == RUN) & (rows["rank"] == 1)))
        counts[UNFINISHED] += not sample.is_graded
        counts[UNPICKED] += not sample.picked
    return {name: counts[name] for name in (PASSAGES, RUNS, UNFINISHED, UNPICKED)}
