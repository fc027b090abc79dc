"""People who grade what draws ask about, as the guide of a file says."""

from collections.abc import Callable, Iterable

from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.labels.files import RowToLabel
from ctxguard.monitor.labels.human import IF_NONE_ABOVE
from ctxguard.monitor.labels.samples import GradedSample
from ctxguard.monitor.store import LabelRow, SampleStore

Truth = Callable[[RowToLabel], int]


def grades_of(sample: GradedSample, truth: Truth, annotator: str = "ann") -> list[LabelRow]:
    """Grade the rows of one request, from top to bottom."""
    labels: list[LabelRow] = []
    for row in sample.rows():
        grades = [label.grade for label in labels]
        if row.when == IF_NONE_ABOVE and any(grades):
            continue
        labels.append(LabelRow(row.request_id, row.passage_id, truth(row), None, annotator, 1.0))
    return labels


def grade(store: SampleStore, samples: Iterable[GradedSample], truth: Truth) -> int:
    """Grade what is asked of samples; how many passages that took."""
    labels = [label for sample in samples for label in grades_of(sample, truth)]
    store.add_labels(labels)
    return len(labels)


def label(
    store: SampleStore, series: str, n: int, truth: Truth, *, whole: bool = False
) -> list[GradedSample]:
    """Have people grade about n passages."""
    samples = to_label(store, series, n, whole=whole)
    grade(store, samples, truth)
    return samples
