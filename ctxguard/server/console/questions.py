"""Grades the passages of questions: what `ctxguard label` opens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.core.types import Passage
from ctxguard.monitor.judges import Judgment
from ctxguard.server.console.grading import GradedPassage, Grading, Shown, value_of
from ctxguard.server.console.pages import Form, Pages, RefusedPage
from ctxguard.server.console.queue import Task

_TEN = 10


class QuestionsToGrade(Protocol):
    """Questions with candidates and grades, known by their places from 0; used from threads."""

    @property
    def top_grade(self) -> int:
        """The highest grade of the scale."""

    @property
    def texts(self) -> Sequence[str]:
        """The questions."""

    def asked(self, place: int) -> Sequence[str]:
        """Return the passages of a question that are to be graded as far as is known, in order."""

    def passage(self, passage_id: str) -> Passage:
        """Read a passage."""

    def judgments(self, place: int) -> Mapping[str, Judgment]:
        """Return the grades so far, by passage id."""

    def has_no_answer(self, place: int) -> bool:
        """Tell whether a question is marked as having none."""

    def put(self, place: int, passage_id: str, judgment: Judgment | None) -> None:
        """Keep a grade, or take it back."""

    def mark(self, place: int, *, no_answer: bool) -> None:
        """Mark a question as having no answer, or take that back."""

    def bought(self) -> str:
        """Say in words what the labels so far are good for."""

    def is_graded(self, place: int) -> bool:
        """Tell whether a question needs no more grades."""

    def next_step(self) -> str:
        """Return the command that uses the labels."""


class QuestionGrading(Grading):
    """Grades questions.

    Args:
        pages: Renders templates.
        work: The questions.
    """

    noun = "question"

    def __init__(self, pages: Pages, work: QuestionsToGrade) -> None:
        super().__init__(pages)
        self._work = work

    @property
    def top_grade(self) -> int:
        """That of the labels."""
        return self._work.top_grade

    def task(self, _fields: Form) -> Task:
        """Return the only task: the labels bear no names."""
        return Task()

    def places(self, _task: Task) -> Mapping[int, bool]:
        """Return the questions in their order."""
        return {place: self._work.is_graded(place) for place in range(len(self._work.texts))}

    def next_open(self, task: Task) -> int | None:
        """Return the first question that lacks grades."""
        return next((place for place, done in self.places(task).items() if not done), None)

    def question(self, _task: Task, number: int) -> GradedPassage:
        """List the passages that are asked about so far."""
        work = self._work
        if number >= len(work.texts):
            raise RefusedPage(404, "No such question", "Open the page Label again.")
        own, no_answer, asked = (
            work.judgments(number),
            work.has_no_answer(number),
            work.asked(number),
        )
        shown = [
            Shown(
                work.passage(passage_id),
                at,
                value_of(own.get(passage_id)),
                not no_answer and passage_id not in own,
            )
            for at, passage_id in enumerate(asked, start=1)
        ]
        is_relevant = any(judgment.grade > 0 for judgment in own.values())
        return GradedPassage(
            work.texts[number], asked, shown, 0, None if is_relevant else no_answer
        )

    def put(self, _task: Task, number: int, passage_id: str, judgment: Judgment | None) -> None:
        """Keep a grade in the labels."""
        self._work.put(number, passage_id, judgment)

    def mark(self, number: int, *, no_answer: bool) -> None:
        """Mark a question in the labels."""
        self._work.mark(number, no_answer=no_answer)

    def notice(self, n_graded: int) -> str | None:
        """Say after each ten questions what they buy."""
        return self._work.bought() if n_graded and n_graded % _TEN == 0 else None

    def start(self, request: Request) -> Response:
        """Begin with the first question that is open."""
        return self.done(request, Task())

    def done(self, request: Request, task: Task) -> Response:
        """Say what the labels are good for, and what comes next."""
        return self.pages.page(
            request,
            "label_end.html",
            n_graded=sum(self.places(task).values()),
            bought=self._work.bought(),
            next_step=self._work.next_step(),
        )
