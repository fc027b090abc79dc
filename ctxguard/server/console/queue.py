"""Chooses the picked request that is graded next."""

from dataclasses import dataclass
from urllib.parse import urlencode

from ctxguard.monitor.labels.files import in_file_order
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.store import PickedSample, SampleStore
from ctxguard.monitor.store.transactions import chunks

_MOST_KNOWN = 200_000
_AT_ONCE = 100
"""Samples whose texts are in memory at once."""


@dataclass(frozen=True, slots=True)
class Task:
    """What somebody grades.

    Attributes:
        annotator: The person's name; empty where labels have none.
        series: The judge that the labels correct; empty without one.
        tenant: As ``label export --tenant`` takes it; empty for all.
    """

    annotator: str = ""
    series: str = ""
    tenant: str = ""

    def fields(self) -> dict[str, str]:
        """Name it in the fields of forms and addresses."""
        fields = {"annotator": self.annotator, "judge": self.series, "tenant": self.tenant}
        return {name: value for name, value in fields.items() if value}

    def address(self, page: str, **more: object) -> str:
        """Return the address of a page about it."""
        return f"{page}?{urlencode({**self.fields(), **more})}"


class LabelQueue:
    """The picked requests in the order of label files, and which of them are graded.

    What was read of a sample holds until it has more labels.

    Args:
        store: Where picks and labels are.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        # By sample, number of labels and task, whether people graded enough; None where it is
        # another tenant's, or cannot be read.
        self._known: dict[tuple[int, int, str, str], bool | None] = {}

    def places(self, task: Task) -> dict[PickedSample, bool]:
        """Return the requests of a task, in random order, and whether people graded enough."""
        picked = self._store.picked_samples(task.series)
        keys = {one: (one.sample_id, one.n_labels, task.series, task.tenant) for one in picked}
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        # One without a label lacks grades, whatever it holds.
        in_doubt = [one for one in picked if one.n_labels or task.tenant]
        new = [one for one in in_doubt if keys[one] not in self._known]
        for some in chunks(new, _AT_ONCE):
            samples = graded_samples(self._store, task.series, [one.sample_id for one in some])
            for one in some:
                sample = samples.get(one.sample_id)
                if sample is not None and task.tenant and not sample.is_of_tenant(task.tenant):
                    sample = None
                self._known[keys[one]] = None if sample is None else sample.is_graded
        picked.sort(key=lambda one: in_file_order(one.question, one.request_id))
        found = {one: self._known.get(keys[one], False) for one in picked}
        return {one: is_graded for one, is_graded in found.items() if is_graded is not None}

    def sample(self, task: Task, sample_id: int) -> GradedSample | None:
        """Return a sample with the labels so far; None where its text was deleted."""
        return graded_samples(self._store, task.series, [sample_id]).get(sample_id)

    def next_open(self, task: Task) -> int | None:
        """Return the id of the first that lacks grades; None where all are graded."""
        for one, is_graded in self.places(task).items():
            sample = None if is_graded else self.sample(task, one.sample_id)
            # Where nothing was served, there may be nothing to grade.
            if sample is not None and not sample.is_graded:
                return one.sample_id
        return None
