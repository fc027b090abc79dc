"""Shows the grading screen: one question's passages at a time, wherever they come from.

Touches nothing itself: where the questions come from is a subclass's concern.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.core.types import Passage
from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.guide import EXAMPLE_QUERY, NEGATIVES, example, meanings, words
from ctxguard.server.console.pages import Form, Pages, RefusedPage, base, go_to, whole_number

TAKE_BACK, NO_ANSWER = "", "x"
"""Values sent in place of a grade; the second is about the whole question."""
KEYS = {"d": Negative.DISTRACTOR, "h": Negative.HARD_NEGATIVE}


@dataclass(frozen=True, slots=True)
class Task:
    """A person's grading task; empty fields are not set. ``series`` is the judge to correct."""

    annotator: str = ""
    series: str = ""
    tenant: str = ""

    def fields(self) -> dict[str, str]:
        """Return the task as the fields of a form or an address."""
        fields = {"annotator": self.annotator, "judge": self.series, "tenant": self.tenant}
        return {name: value for name, value in fields.items() if value}

    def address(self, page: str, **more: object) -> str:
        """Return the address of a page for this task."""
        return f"{page}?{urlencode({**self.fields(), **more})}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A passage on the page.

    Attributes:
        place: Its number among the passages that need a grade, from 1; 0 in the further search that
            follows if none of them is relevant.
        own: The value of this person's grade, as the form sends it; empty without one.
        is_open: Whether it lacks a grade.
    """

    passage: Passage
    place: int
    own: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class GradedPassage:
    """One question with its passages and the grades so far.

    Attributes:
        query: Its text; None if it is not stored.
        passage_ids: All passages that may be graded.
        shown: The passages on the page.
        n_further: How many more passages to look at, at most, while none is relevant.
        no_answer: Whether it is marked as having no answer; None if it cannot be marked.
    """

    query: str | None
    passage_ids: Sequence[str]
    shown: Sequence[Shown]
    n_further: int = 0
    no_answer: bool | None = None


class Grading(ABC):
    """Handles the screen's requests, and stores each grade immediately."""

    noun = "request"

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    @property
    @abstractmethod
    def top_grade(self) -> int:
        """The highest grade of the scale."""

    @abstractmethod
    def task(self, fields: Form) -> Task | None:
        """Read the grading task from an address or a form; None if it is missing."""

    @abstractmethod
    def places(self, task: Task) -> Mapping[int, bool]:
        """Return the numbers of a task's questions, in order, and whether each is graded."""

    def next_open(self, task: Task) -> int | None:
        """Return the first question that still lacks grades; None if all are graded."""
        return next((number for number, done in self.places(task).items() if not done), None)

    @abstractmethod
    def question(self, task: Task, number: int) -> GradedPassage:
        """Read a question; refuse one that must not be graded."""

    @abstractmethod
    def put(self, task: Task, number: int, passage_id: str, judgment: Judgment | None) -> None:
        """Store a grade, or withdraw it if the judgment is None."""

    @abstractmethod
    def start(self, request: Request) -> Response:
        """Ask what to grade."""

    @abstractmethod
    def done(self, request: Request, task: Task) -> Response:
        """Show that nothing is left to grade."""

    def mark(self, number: int, *, no_answer: bool) -> None:  # noqa: B027 - see `GradedPassage.no_answer`
        """Mark a question as having no answer, or undo that, if possible."""

    def notice(self, n_graded: int) -> str | None:  # noqa: ARG002
        """Describe the use of this many graded questions; None for no notice."""
        return None

    def grade_page(self, request: Request, _form: Form) -> Response:
        """Show the next question to grade, or ask what to grade."""
        task = self.task(dict(request.query_params))
        if task is None:
            return self.start(request)
        number = whole_number(request, "sample")
        if number is None:
            number = self.next_open(task)
            if number is None:
                return self.done(request, task)
        question = self.question(task, number)
        n_open = sum(one.is_open for one in question.shown)
        others = {**self.places(task), number: n_open == 0}
        n_graded = sum(others.values())
        return self.pages.page(
            request,
            "label.html",
            task=task,
            sample_id=number,
            question=question,
            current=_current(question.shown, whole_number(request, "at")),
            n_open=n_open,
            n_needed=max([one.place for one in question.shown], default=0),
            n_graded=n_graded,
            n_picked=len(others),
            notice=self.notice(n_graded),
            next_sample=_after(others, number),
            keys=KEYS,
            negatives=NEGATIVES,
            grades=meanings(self.top_grade),
            words=words(self.top_grade),
            **self._guide(),
        )

    def grade(self, request: Request, form: Form) -> Response:
        """Store or withdraw a grade."""
        task = self.the_task(form)
        sample, passage = form.get("sample", ""), _as_in_forms(form.get("passage", ""))
        given = form.get("grade", "")
        if not (sample.isascii() and sample.isdecimal() and len(sample) < 19):
            raise RefusedPage(400, "Not a form of the console", "Open the page again.")
        number = int(sample)
        question = self.question(task, number)
        of_question = not passage and question.no_answer is not None
        values = {
            **{str(grade): (grade, None) for grade in range(self.top_grade + 1)},
            **{key: (0, negative) for key, negative in KEYS.items()},
        }
        offered = [NO_ANSWER] if of_question else values
        if given != TAKE_BACK and given not in offered:
            raise RefusedPage(400, "No such grade", f"Use one of {', '.join(offered)}.")
        focus = {}
        if of_question:
            self.mark(number, no_answer=given == NO_ANSWER)
        else:
            passage_id = next(
                (one for one in question.passage_ids if _as_in_forms(one) == passage), None
            )
            if passage_id is None:
                raise RefusedPage(
                    404, "No such passage", f"The {self.noun} has no passage with this id."
                )
            judgment = None if given == TAKE_BACK else Judgment(passage_id, *values[given])
            self.put(task, number, passage_id, judgment)
            focus = _focus(self.question(task, number).shown, passage_id, given)
        return go_to(task.address(f"{base(request)}/label", sample=number, **focus))

    def guide_page(self, request: Request, _form: Form) -> Response:
        """Show only the grading guide."""
        return self.pages.page(request, "guide.html", **self._guide())

    def the_task(self, form: Form) -> Task:
        """Read the task from a form, which must have one."""
        task = self.task(form)
        if task is None:
            raise RefusedPage(400, "Whose labels?", "Enter your name on the page Label first.")
        return task

    def _guide(self) -> dict[str, Any]:
        rows = [(grade, text, example(text)) for grade, text in meanings(self.top_grade).items()]
        return {
            "noun": self.noun,
            "guide_rows": rows,
            "guide_query": EXAMPLE_QUERY,
            "guide_negatives": [(key, kind.value, NEGATIVES[kind]) for key, kind in KEYS.items()],
        }


def value_of(judgment: Judgment | None) -> str:
    """Format a grade as the form sends it."""
    if judgment is None:
        return TAKE_BACK
    keys = [key for key, negative in KEYS.items() if judgment.negative is negative]
    return keys[0] if keys else str(judgment.grade)


def _as_in_forms(text: str) -> str:
    """Normalise line breaks, because forms change them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _focus(shown: Sequence[Shown], passage_id: str, given: str) -> dict[str, int]:
    """Choose where to continue: at a withdrawn grade, or at the next ungraded passage."""
    ids = [one.passage.passage_id for one in shown]
    # What was taken back may be needed no more.
    here = ids.index(passage_id) if passage_id in ids else -1
    if given == TAKE_BACK and here >= 0:
        return {"at": here}
    still_open = [place for place, one in enumerate(shown) if one.is_open]
    if not still_open:
        return {}
    return {"at": min(still_open, key=lambda place: (place < here, place))}


def _current(shown: Sequence[Shown], at: int | None) -> int | None:
    """Choose the passage that has the focus; None if nothing is left to grade."""
    first_open = next((place for place, one in enumerate(shown) if one.is_open), None)
    return at if at is not None and at < len(shown) else first_open


def _after(places: Mapping[int, bool], number: int) -> int | None:
    """Find the next question that lacks grades: after this one, then from the start."""
    numbers = list(places)
    here = numbers.index(number)
    return next((one for one in numbers[here + 1 :] + numbers[:here] if not places[one]), None)
