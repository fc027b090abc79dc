"""Samples as people grade them: what was found, what people said so far, and what the judge did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json
from ctxguard.monitor.labels.files import IF_NONE_ABOVE, RowToLabel, rows_to_label
from ctxguard.monitor.labels.human import human_verdicts, positions_to_label
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelDepth, SampleStore


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

    def is_graded(self, depth: LabelDepth) -> bool:
        """Whether people have graded all that this depth needs."""
        return not positions_to_label(self.record, self.people, depth, self.judged)

    def rows(self, depth: LabelDepth) -> list[RowToLabel]:
        """The rows of a file that are still to be graded; as many as it takes at most."""
        return rows_to_label(self.record, self.people, depth, self.judged)

    def expected_passages(self, depth: LabelDepth) -> int:
        """How many passages people still grade if they agree with the judge."""
        judged = self.judged
        found, n = False, 0
        for row in self.rows(depth):
            if found and row.when == IF_NONE_ABOVE:
                break
            found = found or row.passage_id in judged
            n += 1
        return n


def graded_samples(
    store: SampleStore, series: str, sample_ids: Sequence[int]
) -> dict[int, GradedSample]:
    """Samples in the order given, without those not judged and those whose text was deleted."""
    verdicts = store.verdicts(series, sample_ids)
    payloads = store.payloads(list(verdicts))
    people = human_verdicts(store.labels(list(payloads)))
    return {
        sample_id: GradedSample(
            SampleRecord.from_bytes(payloads[sample_id]),
            people[sample_id].by_passage if sample_id in people else {},
            verdicts_from_json(verdicts[sample_id]),
        )
        for sample_id in sample_ids
        if sample_id in payloads
    }
