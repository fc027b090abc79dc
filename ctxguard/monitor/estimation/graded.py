"""Turns samples that people have graded into the rows that estimates need.

The rows are made while the text is available and outlive it. Labels that arrive later replace them.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from ctxguard.core.metrics import Utilities
from ctxguard.errors import DataError
from ctxguard.monitor.estimation.reduce import judged_request
from ctxguard.monitor.estimation.terms import ROW, JudgedRequest, table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json
from ctxguard.monitor.labels.human import (
    WHOLE_POOL_RATE,
    HumanVerdicts,
    first_found,
    has_hit,
    human_verdicts,
    needed_positions,
    positions_to_label,
    search,
)
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import GradedRow, LabelDepth, SampleStore

_log = logging.getLogger(__name__)


def update_graded(store: SampleStore, series: str, *, utilities: Utilities, max_grade: int) -> None:
    """Make the rows of samples with labels that are not in their rows yet.

    Call this before text is deleted.

    Args:
        store: The store of labels and judgments.
        series: The series of judgments that the labels correct.
        utilities: The utility of a passage.
        max_grade: The judge's highest grade.
    """
    newest_label = store.to_grade(series)
    if not newest_label:
        return
    ids = list(newest_label)
    judged, payloads = store.judged_samples(series, ids), store.payloads(ids)
    verdicts, people = store.verdicts(series, ids), human_verdicts(store.labels(ids))
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
        by_people = found.by_passage
        judge = judged.summaries[place * ROW.itemsize : (place + 1) * ROW.itemsize]
        depth = depth_graded(record, by_people)
        human = b""
        if depth is not None:
            by_judge = verdicts_from_json(verdicts.get(sample_id, ""))
            human = graded_request(
                record,
                by_people,
                depth,
                {name for name, verdict in by_judge.items() if verdict.grade > 0},
                utilities=utilities,
                max_grade=max_grade,
                probability=float(table_of(judge)["probability"][0]),
            ).to_row()
        rows.append(
            GradedRow(
                sample_id=sample_id,
                time_seconds=float(judged.time_seconds[place]),
                route=record.route.value,
                depth=depth,
                human=human,
                judge=judge if depth is not None else b"",
                disagreements=found.disagreements,
                last_label_id=newest_label[sample_id],
            )
        )
    store.save_graded(series, rows)


def depth_graded(record: SampleRecord, verdicts: Mapping[str, Judgment]) -> LabelDepth | None:
    """Return how far people have graded a sample; None if some served passage is ungraded.

    The search that follows if nothing relevant was served may be open.
    """
    for depth in (LabelDepth.POOL, LabelDepth.SERVED):
        needed = needed_positions(record, depth)
        if all(record.passage_ids[position] in verdicts for position in needed):
            return depth
    return None


def graded_request(
    record: SampleRecord,
    verdicts: Mapping[str, Judgment],
    depth: LabelDepth,
    judged: Collection[str],
    *,
    utilities: Utilities,
    max_grade: int,
    probability: float,
) -> JudgedRequest:
    """Reduce a graded sample by the grades of people.

    Its probabilities are those of people's grading, which covers less than the judge's (see
    ``labels.human``): any other grades are left out. If nothing relevant was served,
    ``pool_relevant`` is 1 if the search found a relevant passage, 0 if it ended without, and None
    while it is open.

    Args:
        record: The sample.
        verdicts: The verdicts of people, by passage id.
        depth: The result of ``depth_graded``.
        judged: Ids of the dropped passages that the judge called relevant.
        utilities: The utility of a passage.
        max_grade: The highest grade of the scale.
        probability: Probability with which it was sampled and then taken up for judging.
    """
    needed = {record.passage_ids[position] for position in needed_positions(record, depth)}
    by_chance = replace(
        record,
        full_pool_if_no_hit=record.full_pool,
        rates=replace(record.rates, full_pool_rate_if_no_hit=record.rates.full_pool_rate),
    )
    highest = max([max_grade, *(verdict.grade for verdict in verdicts.values())])
    request = judged_request(
        by_chance,
        {name: verdict for name, verdict in verdicts.items() if name in needed},
        utilities=utilities,
        max_grade=highest,
        probability=probability,
    )
    if depth is LabelDepth.SERVED:
        request = replace(request, dropped_relevant=None, pool_relevant=None, recall_loss=None)
    if has_hit(record, verdicts):
        likely, _ = search(record, depth, judged)
        return replace(request, full_pool_probability_if_no_hit=1.0 if likely else WHOLE_POOL_RATE)
    found = first_found(record, verdicts, depth, judged)
    chance = WHOLE_POOL_RATE if found is None else found
    is_open = bool(positions_to_label(record, verdicts, depth, judged))
    return replace(
        request,
        # Its recall and its reciprocal rank are 0 if a relevant one exists.
        pool_relevant=None if is_open else 0 if found is None else 1,
        partial_pool_relevant=None,
        full_pool_probability=chance,
        full_pool_probability_if_no_hit=chance,
    )
