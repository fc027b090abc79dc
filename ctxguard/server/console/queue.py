"""Chooses the picked request that is graded next."""

from dataclasses import dataclass
from urllib.parse import urlencode

from ctxguard.monitor.labels.files import in_file_order
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.store import PickedSample, SampleStore

_MOST_KNOWN = 200_000
_MOST_READ = 50


@dataclass(frozen=True, slots=True)
class Task:
    """What somebody grades.

    Attributes:
        annotator: The person's name.
        series: The judge that the labels correct.
        tenant: As ``label export --tenant`` takes it; empty for all.
    """

    annotator: str
    series: str
    tenant: str

    def fields(self) -> dict[str, str]:
        """Name it in the fields of forms and addresses."""
        return {
            "annotator": self.annotator,
            "judge": self.series,
            "tenant": self.tenant,
        }

    def address(self, page: str, **more: object) -> str:
        """Return the address of a page about it."""
        return f"{page}?{urlencode({**self.fields(), **more})}"


_Key = tuple[int, str, str]


class LabelQueue:
    """The picked requests in the order of label files.

    Which of them are graded is read from the samples themselves, each once for every number of
    labels it has. After a start many have labels and none is read yet: a few are read with each
    page, and the others are taken to be graded until then.

    Args:
        store: Where picks and labels are.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        # By sample and task, of how many labels it was read, and whether it needs no more; None
        # where it is another tenant's.
        self._known: dict[_Key, tuple[int, bool | None]] = {}

    def places(self, task: Task, most_read: int | None = _MOST_READ) -> dict[PickedSample, bool]:
        """Return the requests of a task, in random order, and whether people graded enough.

        Args:
            task: What is graded.
            most_read: How many samples are read at most; None for no limit. Those of a tenant
                are known only once they are read, so then there is none.
        """
        picked = self._store.picked_samples(task.series)
        self._read(picked, task, None if task.tenant else most_read)
        return {
            one: is_graded
            for one in sorted(picked, key=lambda one: in_file_order(one.question, one.request_id))
            if (is_graded := self._known.get(_key(one, task), (0, one.n_labels > 0))[1]) is not None
        }

    def sample(self, task: Task, sample_id: int) -> GradedSample | None:
        """Return a sample with the labels so far; None where its text was deleted."""
        return graded_samples(self._store, task.series, [sample_id]).get(sample_id)

    def next_open(self, task: Task) -> tuple[int, GradedSample] | None:
        """Return the first that lacks grades, and its id; None where all are graded."""
        for most_read in (_MOST_READ, None):
            for one, is_graded in self.places(task, most_read).items():
                sample = None if is_graded else self.sample(task, one.sample_id)
                # Where nothing was served, there may be nothing to grade.
                if sample is not None and not sample.is_graded:
                    return one.sample_id, sample
        return None

    def _read(self, picked: list[PickedSample], task: Task, most_read: int | None) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        changed = [
            one
            for one in picked
            if (one.n_labels or task.tenant)
            and self._known.get(_key(one, task), (-1, None))[0] != one.n_labels
        ]
        # Those that somebody has just graded first.
        changed.sort(key=lambda one: _key(one, task) not in self._known)
        chosen = {one.sample_id: one for one in changed[:most_read]}
        for sample_id, sample in graded_samples(self._store, task.series, list(chosen)).items():
            is_own = not task.tenant or sample.is_of_tenant(task.tenant)
            self._known[_key(chosen[sample_id], task)] = (
                chosen[sample_id].n_labels,
                sample.is_graded if is_own else None,
            )


def _key(picked: PickedSample, task: Task) -> _Key:
    return picked.sample_id, task.series, task.tenant
