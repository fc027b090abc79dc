"""Reduces a sample and its verdicts to a judged request, and to the passages that people graded.

All served passages are judged, and dropped ones with the probabilities that the sample holds. The
same reduction serves the verdicts of a judge and the labels of people. Rows of what people graded
are made while the text is available and outlive it; labels that arrive later replace them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.metrics import Utilities, strict_utilities
from ctxguard.errors import DataError
from ctxguard.monitor.estimation.joint import PASSAGE, RUN, SINGLE
from ctxguard.monitor.estimation.relevance import (
    FAR,
    MISSING,
    MOST_SERVED,
    NEAR,
    NEAR_DROPPED,
    NO,
    YES,
    rank_group,
)
from ctxguard.monitor.estimation.terms import ROW, JudgedRequest, table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json
from ctxguard.monitor.labels.human import HumanVerdicts, grade_of, human_verdicts, rows_left
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import GradedRow, GradedRows, PickedPassage, PickKind, SampleStore

_log = logging.getLogger(__name__)

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
    none = Judgment("", 0, judged=False)
    of_served = [verdicts.get(record.passage_ids[place], none) for place in record.served]
    grades = tuple([verdict.grade for verdict in of_served])
    has_hit = max(grades, default=0) > 0
    n_to_judge = len(record.to_judge(has_hit=has_hit))
    sizes, cells = dropped_sizes(record, verdicts), np.zeros((2, 2))
    n_relevant = sum([grade > 0 for grade in grades])
    for position, (group, size) in sizes.items():
        is_relevant = int((grade_of(record, verdicts, position) or 0) > 0)
        n_relevant += is_relevant
        cells[group - NEAR, is_relevant] += size
    is_missing = len(sizes) < n_to_judge
    share = 1.0 - (n_to_judge - len(sizes)) / n_to_judge if n_to_judge else 1.0
    outside_baseline = rates.dropped_probability(has_hit=has_hit, in_baseline=False)
    is_observed = outside_baseline > 0.0 and share > 0.0
    # Missing verdicts are treated as missing at random.
    cells = cells / share if is_observed else np.zeros((2, 2))
    full_pool = rates.dropped_rate == 1.0 or record.has_full_pool(has_hit=has_hit)
    # Pools judged only where nothing relevant was served would show a recall of 0.
    has_recall = full_pool and not is_missing and rates.full_pool_probability(has_hit=True) > 0.0
    return JudgedRequest(
        probability=record.probability if probability is None else probability,
        grades=grades,
        utilities=tuple(_worths(of_served, utilities, max_grade)),
        dropped_relevant=float(cells[:, 1].sum()) if is_observed else None,
        dropped_probability=outside_baseline * share,
        pool_relevant=n_relevant if full_pool and not is_missing else None,
        partial_pool_relevant=n_relevant if full_pool and is_missing else None,
        full_pool_probability=rates.full_pool_probability(has_hit=has_hit),
        session_id=record.session_id,
        recall_loss=recall_loss(record, verdicts, record.rates.baseline_k),
        missing=tuple([place for place, one in enumerate(of_served) if not one.judged]),
        dropped=tuple(cells.ravel().tolist()),
        scores=tuple([verdict.score for verdict in of_served]),
        recall=sum([grade > 0 for grade in grades]) / n_relevant
        if has_recall and n_relevant
        else None,
    )


def _worths(verdicts: Sequence[Judgment], utilities: Utilities, max_grade: int) -> Sequence[float]:
    return strict_utilities(
        [verdict.grade for verdict in verdicts],
        top_grade=max_grade,
        negatives=[verdict.negative for verdict in verdicts],
        judged=[verdict.judged for verdict in verdicts],
        utilities=utilities,
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


def dropped_sizes(
    record: SampleRecord, by_judge: Mapping[str, Judgment]
) -> dict[int, tuple[int, float]]:
    """List the dropped passages of a sample that are judged, by the judge's verdicts.

    Returns:
        By position, the rank group and 1 / the probability of being judged; a passage without a
        verdict has none.
    """
    has_hit = any(grade_of(record, by_judge, position) for position in record.served)
    baseline, near = set(record.in_baseline), set(record.dropped[:NEAR_DROPPED])
    chance = {
        each: record.rates.dropped_probability(has_hit=has_hit, in_baseline=each)
        for each in (False, True)
    }
    return {
        position: (NEAR if position in near else FAR, 1.0 / chance[position in baseline])
        for position in record.to_judge(has_hit=has_hit)
        if record.passage_ids[position] in by_judge
    }


def verdict_on(record: SampleRecord, by_judge: Mapping[str, Judgment], position: int) -> int:
    """Return ``NO``, ``YES`` or ``MISSING``."""
    verdict = by_judge.get(record.passage_ids[position])
    if verdict is None or not verdict.judged:
        return MISSING
    return YES if verdict.grade > 0 else NO


def graded_passages(
    record: SampleRecord,
    picked: Sequence[PickedPassage],
    verdicts: Mapping[str, Judgment],
    by_judge: Mapping[str, Judgment],
    by_first: Mapping[str, Judgment] | None = None,
    *,
    utilities: Utilities,
    max_grade: int,
) -> NDArray[np.void]:
    """List the graded passages that draws asked about, as rows of ``PASSAGE``.

    The passages of a run count once it is complete: where it ends depends on what was found.

    Args:
        picked: What draws ask about it.
        verdicts: The verdicts of people, by passage id.
        by_judge: The verdicts of the judge, by passage id.
        by_first: Those of the judge whose verdicts decided which passages were judged and drawn;
            None where it is the same.
        max_grade: The highest grade of people's scale.
    """
    dropped = dropped_sizes(record, by_judge if by_first is None else by_first)
    rows = []
    for one, position, probability, run in asked_grades(record, picked, verdicts):
        verdict = verdicts[record.passage_ids[position]]
        [worth] = _worths([verdict], utilities, max_grade)
        is_served = position in record.served
        rank = record.served.index(position) + 1 if is_served else 0
        if rank > MOST_SERVED or (not is_served and position not in dropped):
            continue
        group, size = (int(rank_group(np.array(rank))), 1.0) if is_served else dropped[position]
        if not is_served and record.passage_ids[position] not in by_judge:
            # Nothing but its verdict tells a dropped passage from the others.
            continue
        rows.append(
            (
                one.pick_id,
                SINGLE if run is None else RUN,
                rank,
                group,
                # A dropped passage without a verdict counts among those that are not relevant.
                verdict_on(record, by_judge, position) % (3 if is_served else 2),
                run is not None and run.goes_on,
                verdict.grade > 0,
                max(worth, 0.0),
                max(-worth, 0.0),
                size,
                probability,
                1.0 if run is None else run.probability,
            )
        )
    return np.array(rows, PASSAGE)


def asked_grades(
    record: SampleRecord, picked: Sequence[PickedPassage], verdicts: Mapping[str, Judgment]
) -> Iterator[tuple[PickedPassage, int, float, PickedPassage | None]]:
    """Yield (what asked, position, probability of the grade, run) of the graded passages."""
    for one in picked:
        is_single = one.kind is PickKind.SINGLE
        if is_single and grade_of(record, verdicts, one.position) is not None:
            yield one, one.position, one.probability, None
    run = next((one for one in picked if one.kind is PickKind.RUN), None)
    of_run = [one for one in picked if one.kind is not PickKind.SINGLE]
    if run is None or not record.served or rows_left(record, of_run, verdicts):
        return
    first = record.served[0]
    yield run, first, 1.0, run
    found_one = bool(grade_of(record, verdicts, first))
    if not found_one and not run.goes_on:
        return
    chance = 1.0 if found_one else run.probability
    coins = {one.position: one for one in picked if one.kind is PickKind.COIN}
    for position in record.served[1:]:
        if not found_one:
            yield run, position, chance, run
            found_one = bool(grade_of(record, verdicts, position))
        elif position in coins:
            yield coins[position], position, chance * coins[position].probability, run
    for position in record.dropped:
        if position in coins:
            yield coins[position], position, chance * coins[position].probability, run


def update_graded(store: SampleStore, series: str, *, utilities: Utilities, max_grade: int) -> None:
    """Make the rows of samples with labels that are not in their rows yet.

    Call this before text is deleted.

    Args:
        series: The series of judgments that the labels correct.
        max_grade: The highest grade of people's scale where the labels do not say.
    """
    newest_label = store.to_grade(series)
    if not newest_label:
        return
    ids = list(newest_label)
    judged, payloads = store.judged_samples(ids), store.payloads(ids)
    verdicts, first = store.verdicts(series, ids), store.first_verdicts(ids)
    people, picked = human_verdicts(store.labels(ids)), store.picked(None, ids)
    grades_of_judge = max_grade
    given = [one.grade for found in people.values() for one in found.by_passage.values()]
    max_grade = max([store.top_grade() or max_grade, *given])
    rows = []
    for place, sample_id in enumerate(judged.sample_ids.tolist()):
        if sample_id not in payloads:
            # Grades given before its text was deleted stay.
            continue
        try:
            record = SampleRecord.from_bytes(payloads[sample_id])
        except DataError as error:
            # One damaged sample must not break every report.
            _log.warning("labels of sample %d are left out: %s", sample_id, error)
            continue
        found = people.get(sample_id, HumanVerdicts({}, 0))
        by_judge = verdicts_from_json(verdicts.get(sample_id, ""))
        judge = judged.summaries[place * ROW.itemsize : (place + 1) * ROW.itemsize]
        by_first = by_judge
        if verdicts.get(sample_id) != first.get(sample_id):
            # The chances with which it and its passages were judged are those of the first judge.
            by_first = verdicts_from_json(first.get(sample_id, ""))
            judge = judged_request(
                record,
                by_judge,
                utilities=utilities,
                max_grade=grades_of_judge,
                probability=float(table_of(judge)["probability"][0]),
            ).to_row()
        rows.append(
            GradedRow(
                sample_id=sample_id,
                time_seconds=float(judged.time_seconds[place]),
                route=record.route.value,
                passages=graded_passages(
                    record,
                    picked.get(sample_id, ()),
                    found.by_passage,
                    by_judge,
                    by_first,
                    utilities=utilities,
                    max_grade=max_grade,
                ).tobytes(),
                judge=judge if found.by_passage else b"",
                human=_whole(record, found.by_passage, utilities, max_grade),
                disagreements=found.disagreements,
                last_label_id=newest_label[sample_id],
            )
        )
    store.save_graded(series, rows)


def is_whole(graded: GradedRows, place: int) -> bool:
    """Tell whether a draw that counts had all of a sample graded, whatever people would find."""
    passages = np.frombuffer(graded.passages[place], PASSAGE)
    passages = passages[np.isin(passages["pick"], [pick for pick, _, _ in graded.asked])]
    in_run = passages["frame"] == RUN
    certain = bool((passages["probability"][in_run] == 1.0).all())
    return bool(graded.human[place]) and bool(in_run.any()) and certain


def _whole(
    record: SampleRecord, verdicts: Mapping[str, Judgment], utilities: Utilities, max_grade: int
) -> bytes:
    """Reduce a sample by the grades of people, if they graded all that is judged of any request."""
    positions = (*record.served, *record.to_judge(has_hit=True))
    if any(grade_of(record, verdicts, position) is None for position in positions):
        return b""
    return judged_request(record, verdicts, utilities=utilities, max_grade=max_grade).to_row()
