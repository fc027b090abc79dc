"""Samples as people grade them: what was found, what people said so far, and what the judge did."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctxguard.errors import DataError
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json
from ctxguard.monitor.labels.files import (
    IF_NONE_ABOVE,
    RowToLabel,
    in_file_order,
    rows_to_label,
)
from ctxguard.monitor.labels.human import human_verdicts, positions_to_label
from ctxguard.monitor.sampling.record import SampleRecord, allowed_values
from ctxguard.monitor.store import LabelDepth, SampleStore, Weigh

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GradedSample:
    """One judged sample, graded by people in part, wholly or not at all.

    Attributes:
        record: The sample.
        people: The verdicts of people so far, by passage id.
        judge: The verdicts of the judge, by passage id.
    """

    record: SampleRecord
    people: Mapping[str, Judgment]
    judge: Mapping[str, Judgment]

    @property
    def judged(self) -> frozenset[str]:
        """Ids of the passages that the judge called relevant."""
        return frozenset([name for name, verdict in self.judge.items() if verdict.grade > 0])

    def is_of_tenant(self, tenant: str) -> bool:
        """Whether the request could see passages of this value of a field only.

        Args:
            tenant: ``FIELD=VALUE``, or a value of the field ``tenant``.

        Returns:
            False where its filter allows others as well, or is not known.
        """
        field, equals, value = tenant.partition("=")
        field, value = (field, value) if equals else ("tenant", tenant)
        where = self.record.where
        allowed = [] if where is None else allowed_values(where).get(field, [])
        return bool(allowed) and all(str(one) == value for one in allowed)

    def is_graded(self, depth: LabelDepth) -> bool:
        """Whether people have graded all that this depth needs."""
        return not positions_to_label(self.record, self.people, depth, self.judged)

    def rows(self, depth: LabelDepth) -> list[RowToLabel]:
        """The rows of a file that are still to be graded; as many as it takes at most."""
        return rows_to_label(self.record, self.people, depth, self.judged)

    def expected_passages(self, depth: LabelDepth, confirmed: float) -> float:
        """About how many passages people still grade, from top to bottom as the guide says.

        Args:
            depth: How far.
            confirmed: Share of the passages that the judge called relevant in which people agree.
        """
        judged = self.judged
        passages, none_above = 0.0, 1.0
        for row in self.rows(depth):
            passages += none_above if row.when == IF_NONE_ABOVE else 1.0
            if row.passage_id in judged:
                none_above *= 1.0 - confirmed
        return passages


def confirmed_share(store: SampleStore, series: str, sample_ids: Sequence[int]) -> float:
    """Share of the passages that the judge called relevant in which people agree, in (0, 1).

    By the labels of these samples, with five of ten added, which is all there is at first.
    """
    verdicts = store.verdicts(series, sample_ids)
    agreed = [
        people.by_passage[name].grade > 0
        for sample_id, people in human_verdicts(store.labels(list(verdicts))).items()
        for name, verdict in verdicts_from_json(verdicts[sample_id]).items()
        if verdict.grade > 0 and name in people.by_passage
    ]
    return (sum(agreed) + 5) / (len(agreed) + 10)


def graded_samples(
    store: SampleStore, series: str, sample_ids: Sequence[int]
) -> dict[int, GradedSample]:
    """Samples in the order given, without those not judged and those that cannot be read.

    The text of old ones was deleted; one that is damaged is logged.
    """
    verdicts = store.verdicts(series, sample_ids)
    payloads = store.payloads(list(verdicts))
    people = human_verdicts(store.labels(list(payloads)))
    found = {}
    for sample_id in sample_ids:
        if sample_id not in payloads:
            continue
        try:
            record = SampleRecord.from_bytes(payloads[sample_id])
        except DataError as error:
            _log.warning("sample %d cannot be graded: %s", sample_id, error)
            continue
        found[sample_id] = GradedSample(
            record,
            people[sample_id].by_passage if sample_id in people else {},
            verdicts_from_json(verdicts[sample_id]),
        )
    return found


def to_label(
    store: SampleStore,
    series: str,
    depth: LabelDepth,
    n: int,
    *,
    tenant: str | None = None,
    weigh: Weigh | None = None,
    dry_run: bool = False,
) -> list[GradedSample]:
    """Samples for people to grade: those picked before that lack grades, and new ones up to n.

    New ones are picked of all tenants, since the estimates are about all requests; those of
    another tenant are not returned.

    Args:
        store: Where judgments and picks are.
        series: The series of judgments.
        depth: How much of each people grade.
        n: How many at most.
        tenant: As ``GradedSample.is_of_tenant`` takes it; None for all.
        weigh: Weights of new samples by their summaries; None for equal ones.
        dry_run: Whether to pick none, and return what would be picked.
    """
    begun = unfinished(store, series, list(store.picked(series, depth)), depth, n, tenant=tenant)
    pick = store.next_for_labels if dry_run else store.pick_for_labels
    picked = pick(series, n - len(begun), depth=depth, weigh=weigh)
    new = unfinished(store, series, picked, depth, n, tenant=tenant)
    if not dry_run:
        names = store.request_ids([*store.picked(series, depth)])
        asked = {sample.record.request_id for sample in (*begun, *new)}
        store.ask_for_labels([one for one, name in names.items() if name in asked], tenant or "")
    return begun + new


def unfinished(
    store: SampleStore,
    series: str,
    sample_ids: Sequence[int],
    depth: LabelDepth,
    n: int,
    *,
    tenant: str | None = None,
) -> list[GradedSample]:
    """Those that lack grades, n at most; in random order, as not all may be graded.

    Args:
        store: Where judgments and labels are.
        series: The series of judgments.
        sample_ids: Of these samples.
        depth: How much of each people grade.
        n: How many at most.
        tenant: As ``GradedSample.is_of_tenant`` takes it; None for all.
    """
    samples = [
        sample
        for sample in graded_samples(store, series, sample_ids).values()
        if not sample.is_graded(depth) and (tenant is None or sample.is_of_tenant(tenant))
    ]
    return sorted(samples, key=lambda sample: in_file_order(sample.record.request_id))[:n]
