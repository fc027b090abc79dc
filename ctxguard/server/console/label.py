"""The page Label: grade the passages of one query, and pick requests."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.core.metrics import Negative
from ctxguard.core.render import sanitise
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.judges import PEOPLE_ALONE, Judgment
from ctxguard.monitor.labels.files import RowToLabel, in_file_order, rows_to_label
from ctxguard.monitor.labels.guide import EXAMPLE_QUERY, NEGATIVES, example, meanings, words
from ctxguard.monitor.labels.human import ALWAYS, IF_NONE_ABOVE, human_verdicts
from ctxguard.monitor.labels.samples import GradedSample, repeats
from ctxguard.monitor.service import let_people_grade
from ctxguard.monitor.store import LabelRow, PickedSample
from ctxguard.server.console.pages import Form, Pages, RefusedPage, base, go_to, whole_number
from ctxguard.server.console.queue import LabelQueue, Task

_MOST_NAME_CHARS = 100
_MOST_PICKED = 1_000
_TAKE_BACK = ""
_USUAL_GRADE = 3
"""The highest of the scale where the store's labels name none."""
_KEYS = {"d": Negative.DISTRACTOR, "h": Negative.HARD_NEGATIVE}
_LATER_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class _Shown:
    """A passage on the page.

    Attributes:
        row: Its text and its ids.
        place: Its number among the passages that need a grade, from 1; 0 for one of the search
            that follows where none of them is relevant.
        own: The value of this annotator's grade, as the form sends it; empty without one.
        is_open: Whether it lacks a grade.
    """

    row: RowToLabel
    place: int
    own: str
    is_open: bool


class Label:
    """Answers the requests for these pages.

    Args:
        pages: Renders templates from the store.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages, self._store, self._clock = pages, pages.store, pages.clock
        self._queue = LabelQueue(pages.store)

    @property
    def _top_grade(self) -> int:
        return self._store.top_grade() or _USUAL_GRADE

    def grade_page(self, request: Request, _form: Form) -> Response:
        """Show the next request to grade, or without a name the form that asks for it."""
        task = self._task(dict(request.query_params))
        if task is None:
            return self._pages.page(
                request,
                "label_start.html",
                judges=self._store.series(),
                is_empty=not self._store.newest_samples(1),
            )
        sample_id = whole_number(request, "sample")
        if sample_id is None:
            found = self._queue.next_open(task)
            if found is None:
                n_graded = len(self._queue.places(task))
                return self._pages.page(request, "label_done.html", task=task, n_graded=n_graded)
            sample_id, sample = found
        else:
            sample = self._sample(task, sample_id)
        places = self._queue.places(task)
        shown = self._shown(task, sample_id, sample)
        still_open = sample.rows()
        n_needed = len([row for row in still_open if row.when == ALWAYS])
        n_open = n_needed or min(len(still_open), 1)
        others = {one: done for one, done in places.items() if one.sample_id != sample_id}
        return self._pages.page(
            request,
            "label.html",
            task=task,
            sample_id=sample_id,
            query=sample.record.query,
            shown=shown,
            current=_current(shown, whole_number(request, "at")),
            n_open=n_open,
            n_needed=max([one.place for one in shown], default=0),
            n_further=len(still_open),
            n_graded=sum(others.values()) + (n_open == 0),
            n_picked=len(others) + 1,
            next_sample=_after(others, sample),
            keys=_KEYS,
            grades=meanings(self._top_grade),
            words=words(self._top_grade),
            **self._guide(),
        )

    def pick(self, request: Request, form: Form) -> Response:
        """Pick more requests at random."""
        task = self._of(form)
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

    def grade(self, request: Request, form: Form) -> Response:
        """Store a grade, or take one back."""
        task = self._of(form)
        sample_id, passage = form.get("sample", ""), _as_in_forms(form.get("passage", ""))
        given = form.get("grade", "")
        if not (sample_id.isascii() and sample_id.isdecimal() and len(sample_id) < 19):
            raise RefusedPage(400, "Not a form of the console", "Open the page again.")
        sample = self._sample(task, int(sample_id))
        passage_id = next(
            (one for one in sample.record.passage_ids if _as_in_forms(one) == passage), None
        )
        if passage_id is None:
            raise RefusedPage(404, "No such passage", "The request has no passage of this id.")
        top_grade = self._top_grade
        values = {
            **{str(grade): (grade, None) for grade in range(top_grade + 1)},
            **{key: (0, negative.value) for key, negative in _KEYS.items()},
        }
        if given != _TAKE_BACK and given not in values:
            raise RefusedPage(400, "No such grade", f"Use one of {', '.join(values)}.")
        grade, negative = values.get(given, (None, None))
        before = [label.time_seconds for _, label in self._store.labels([int(sample_id)])]
        row = LabelRow(
            sample.record.request_id,
            passage_id,
            grade,
            negative,
            task.annotator,
            # After every label so far, or it would not count when a clock is set back.
            max([self._clock(), *(each + _LATER_SECONDS for each in before)]),
        )
        self._store.add_labels([row], top_grade)
        self._store.add_labels(repeats(self._store, [row]), top_grade)
        return go_to(
            task.address(
                f"{base(request)}/label",
                sample=sample_id,
                **self._focus(task, int(sample_id), passage_id, given),
            )
        )

    def guide_page(self, request: Request, _form: Form) -> Response:
        """Show the grading guide alone."""
        return self._pages.page(request, "guide.html", **self._guide())

    def _guide(self) -> dict[str, Any]:
        rows = [(grade, text, example(text)) for grade, text in meanings(self._top_grade).items()]
        return {
            "guide_rows": rows,
            "guide_query": EXAMPLE_QUERY,
            "guide_negatives": [(key, kind.value, NEGATIVES[kind]) for key, kind in _KEYS.items()],
        }

    def _task(self, fields: Form) -> Task | None:
        """Read the task from the fields of an address or a form; None without a person."""
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

    def _of(self, form: Form) -> Task:
        task = self._task(form)
        if task is None:
            raise RefusedPage(400, "Whose labels?", "Enter your name on the page Label first.")
        return task

    def _sample(self, task: Task, sample_id: int) -> GradedSample:
        """Read a sample that was picked for this task.

        Raises:
            RefusedPage: it was not picked, or its text is deleted.
        """
        is_picked = sample_id in self._store.picked(task.series, [sample_id])
        sample = self._queue.sample(task, sample_id) if is_picked else None
        if sample is None or (task.tenant and not sample.is_of_tenant(task.tenant)):
            raise RefusedPage(
                404,
                "Not to be graded",
                "This request was not picked for labels, or its text has been deleted since.",
            )
        return sample

    def _shown(self, task: Task, sample_id: int, sample: GradedSample) -> list[_Shown]:
        """List the passages that have a grade or need one next, in the order of a file.

        The search for a relevant passage shows one passage at a time.
        """
        own_labels = [
            (each, label)
            for each, label in self._store.labels([sample_id])
            if label.annotator == task.annotator
        ]
        verdicts = human_verdicts(own_labels)
        own = verdicts[sample_id].by_passage if sample_id in verdicts else {}
        to_grade = sample.rows()
        needed = [row for row in to_grade if row.when == ALWAYS]
        is_open = {row.passage_id for row in needed or to_grade[:1]}
        shown, place = [], 0
        for row in rows_to_label(sample.record, sample.picked, {}):
            is_searched = row.when == IF_NONE_ABOVE
            place += not is_searched
            if row.passage_id in is_open or row.passage_id in sample.people:
                value = _value(own.get(row.passage_id))
                number = 0 if is_searched else place
                shown.append(_Shown(row, number, value, row.passage_id in is_open))
        return shown

    def _focus(self, task: Task, sample_id: int, passage_id: str, given: str) -> dict[str, int]:
        """Say where to go on: at a grade taken back, or at the next passage without a grade."""
        sample = self._queue.sample(task, sample_id)
        shown = [] if sample is None else self._shown(task, sample_id, sample)
        ids = [one.row.passage_id for one in shown]
        # What was taken back may be needed no more.
        here = ids.index(passage_id) if passage_id in ids else -1
        if given == _TAKE_BACK and here >= 0:
            return {"at": here}
        still_open = [place for place, one in enumerate(shown) if one.is_open]
        if not still_open:
            return {}
        return {"at": min(still_open, key=lambda place: (place < here, place))}


def _as_in_forms(text: str) -> str:
    """Normalise line breaks, which a form changes."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _value(verdict: Judgment | None) -> str:
    """Write a grade as the form sends it."""
    if verdict is None:
        return _TAKE_BACK
    keys = [key for key, negative in _KEYS.items() if verdict.negative is negative]
    return keys[0] if keys else str(verdict.grade)


def _current(shown: list[_Shown], at: int | None) -> int | None:
    """Choose the passage that has the focus; None if nothing is left to grade."""
    first_open = next((place for place, one in enumerate(shown) if one.is_open), None)
    return at if at is not None and at < len(shown) else first_open


def _after(places: dict[PickedSample, bool], sample: GradedSample) -> int | None:
    """Find the next request that lacks grades: after this one, then from the start."""
    here = in_file_order(sample.picked[0].question, sample.record.request_id)
    still_open = [one for one, is_graded in places.items() if not is_graded]
    later = [one for one in still_open if in_file_order(one.question, one.request_id) > here]
    return next((one.sample_id for one in (*later, *still_open)), None)
