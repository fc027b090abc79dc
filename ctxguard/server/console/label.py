"""Serves the page Label, on which people grade sampled requests that are picked at random.

Reads and writes the store, and reads the clock.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.core.render import sanitise
from ctxguard.core.types import Passage
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.judges import PEOPLE_ALONE, Judgment
from ctxguard.monitor.labels.files import in_file_order, rows_to_label
from ctxguard.monitor.labels.human import ALWAYS, IF_NONE_ABOVE, human_grades
from ctxguard.monitor.labels.samples import GradedSample, graded_samples, repeats
from ctxguard.monitor.service import let_people_grade
from ctxguard.monitor.store import LabelRow
from ctxguard.monitor.store.database import chunks
from ctxguard.server.console.grading import GradedPassage, Grading, Shown, Task, value_of
from ctxguard.server.console.pages import Form, Pages, RefusedPage, base, go_to

_MOST_NAME_CHARS = 100
_MOST_PICKED = 1_000
_USUAL_GRADE = 3
"""The highest grade of the scale if the store's labels name none."""
_LATER_SECONDS = 1e-6
_MOST_KNOWN = 200_000
_AT_ONCE = 100
"""How many samples' texts are in memory at once."""


class Label(Grading):
    """Grades the picked requests of a store, in the order of label files."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages)
        self._store, self._clock = pages.store, pages.clock
        # Whether people graded enough, by sample, number of labels and task; None where it is
        # another tenant's, or cannot be read.
        self._known: dict[tuple[int, int, str, str], bool | None] = {}

    @property
    def top_grade(self) -> int:
        """The highest grade of the store's labels."""
        return self._store.top_grade() or _USUAL_GRADE

    def start(self, request: Request) -> Response:
        """Ask for a name, and for a judge if there are several."""
        return self.pages.page(
            request,
            "label_start.html",
            judges=self._store.series(),
            is_empty=not self._store.newest_samples(1),
        )

    def done(self, request: Request, task: Task) -> Response:
        """Offer to pick more."""
        n_graded = len(self.places(task))
        return self.pages.page(request, "label_done.html", task=task, n_graded=n_graded)

    def places(self, task: Task) -> Mapping[int, bool]:
        """Return the picked requests in random order, with whether people graded enough."""
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
        found = {one.sample_id: self._known.get(keys[one], False) for one in picked}
        return {number: done for number, done in found.items() if done is not None}

    def next_open(self, task: Task) -> int | None:
        """Return the first request that can be graded."""
        for number, is_graded in self.places(task).items():
            sample = None if is_graded else self._read(task, number)
            # Where nothing was served, there may be nothing to grade.
            if sample is not None and not sample.is_graded:
                return number
        return None

    def question(self, task: Task, number: int) -> GradedPassage:
        """List the passages that have a grade or need one next, in the order of label files.

        The search for a relevant passage shows one passage at a time.
        """
        sample = self._sample(task, number)
        own_labels = [
            (each, label)
            for each, label in self._store.labels([number])
            if label.annotator == task.annotator
        ]
        own, _ = human_grades(own_labels).get(number, ({}, 0))
        to_grade = sample.rows()
        needed = [row for row in to_grade if row.when == ALWAYS]
        is_open = {row.passage_id for row in needed or to_grade[:1]}
        shown, place = [], 0
        for row in rows_to_label(sample.record, sample.picked, {}):
            is_searched = row.when == IF_NONE_ABOVE
            place += not is_searched
            if row.passage_id in is_open or row.passage_id in sample.people:
                passage = Passage(row.passage_id, row.text, row.title)
                value = value_of(own.get(row.passage_id))
                at = 0 if is_searched else place
                shown.append(Shown(passage, at, value, row.passage_id in is_open))
        return GradedPassage(sample.record.query, sample.record.passage_ids, shown, len(to_grade))

    def put(self, task: Task, number: int, passage_id: str, judgment: Judgment | None) -> None:
        """Label a request, and all others with the same question."""
        top_grade = self.top_grade
        grade, negative = (None, None) if judgment is None else (judgment.grade, judgment.negative)
        before = [label.time_seconds for _, label in self._store.labels([number])]
        row = LabelRow(
            self._sample(task, number).record.request_id,
            passage_id,
            grade,
            None if negative is None else negative.value,
            task.annotator,
            # After every label so far, or it would not count when a clock is set back.
            max([self._clock(), *(each + _LATER_SECONDS for each in before)]),
        )
        self._store.add_labels([row], top_grade)
        self._store.add_labels(repeats(self._store, [row]), top_grade)

    def pick(self, request: Request, form: Form) -> Response:
        """Pick more requests at random."""
        task = self.the_task(form)
        n = form.get("n", "")
        if not (n.isascii() and n.isdecimal() and 0 < int(n[:9]) <= _MOST_PICKED):
            raise RefusedPage(
                400, "How many?", f"Enter a whole number of passages from 1 to {_MOST_PICKED:,}."
            )
        if task.series == PEOPLE_ALONE:
            let_people_grade(self._store)
        to_label(
            self._store,
            task.series,
            int(n),
            tenant=task.tenant or None,
            whole=bool(form.get("whole")),
        )
        return go_to(task.address(f"{base(request)}/label"))

    def task(self, fields: Form) -> Task | None:
        """Read the task from an address or a form; None without a person."""
        annotator = " ".join(sanitise(fields.get("annotator", "")).split())
        if not annotator:
            return None
        if len(annotator) > _MOST_NAME_CHARS:
            raise RefusedPage(400, "A long name", f"Use at most {_MOST_NAME_CHARS} characters.")
        all_series = self._store.series() or [PEOPLE_ALONE]
        series = fields.get("judge") or all_series[-1]
        if series not in all_series:
            raise RefusedPage(404, "No such judge", f"The store has {', '.join(all_series)}.")
        return Task(annotator, series, fields.get("tenant", "").strip())

    def _read(self, task: Task, sample_id: int) -> GradedSample | None:
        return graded_samples(self._store, task.series, [sample_id]).get(sample_id)

    def _sample(self, task: Task, sample_id: int) -> GradedSample:
        """Read a sample that was picked for this task."""
        is_picked = sample_id in self._store.picked(task.series, [sample_id])
        sample = self._read(task, sample_id) if is_picked else None
        if sample is None or (task.tenant and not sample.is_of_tenant(task.tenant)):
            raise RefusedPage(
                404,
                "Not to be graded",
                "This request was not picked for labels, or its text has been deleted since.",
            )
        return sample
