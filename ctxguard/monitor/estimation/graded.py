"""Makes the rows of samples that people have graded, which estimates need, from a store.

The rows are made while the text is available and outlive it. Labels that arrive later replace them.
"""

import logging
from collections.abc import Mapping

import numpy as np

from ctxguard.core.metrics import Utilities
from ctxguard.errors import DataError
from ctxguard.monitor.estimation.joint import PASSAGE, RUN
from ctxguard.monitor.estimation.reduce import graded_passages, judged_request
from ctxguard.monitor.estimation.terms import ROW, table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json
from ctxguard.monitor.labels.human import HumanVerdicts, grade_of, human_verdicts
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import GradedRow, GradedRows, SampleStore

_log = logging.getLogger(__name__)


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
