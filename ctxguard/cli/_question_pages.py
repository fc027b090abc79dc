"""Grades the passages of questions, for `ctxguard label`.

Looks passages up, and writes each grade to the file of labels. Needs the extra `serve`.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.cli.label import QuestionWork
from ctxguard.monitor.judges import Judgment
from ctxguard.server.console.grading import GradedPassage, Grading, Shown, Task, value_of
from ctxguard.server.console.pages import Form, Pages, RefusedPage

_TEN = 10


class QuestionGrading(Grading):
    """Grades the passages of questions."""

    noun = "question"

    def __init__(self, pages: Pages, work: QuestionWork) -> None:
        super().__init__(pages)
        self._work = work

    @property
    def top_grade(self) -> int:
        return self._work.top_grade

    def task(self, _fields: Form) -> Task:
        return Task()

    def places(self, _task: Task) -> Mapping[int, bool]:
        return {place: not self._work.lacking(place) for place in range(len(self._work.queries))}

    def question(self, _task: Task, number: int) -> GradedPassage:
        work = self._work
        if number >= len(work.queries):
            raise RefusedPage(404, "No such question", "Open the page Label again.")
        query, asked = work.queries[number], work.asked(number)
        own = work.file.judgments(query.query_id)
        no_answer = work.file.has_no_answer(query.query_id)
        shown = []
        for at, name in enumerate(asked, start=1):
            is_open = not no_answer and name not in own
            shown.append(Shown(work.source.passage(name), at, value_of(own.get(name)), is_open))
        is_relevant = any(judgment.grade > 0 for judgment in own.values())
        return GradedPassage(query.text, asked, shown, 0, None if is_relevant else no_answer)

    def put(self, _task: Task, number: int, passage_id: str, judgment: Judgment | None) -> None:
        self._work.file.put(self._work.queries[number], passage_id, judgment)

    def mark(self, number: int, *, no_answer: bool) -> None:
        self._work.file.mark(self._work.queries[number], no_answer=no_answer)

    def notice(self, n_graded: int) -> str | None:
        return self._work.bought() if n_graded and n_graded % _TEN == 0 else None

    def start(self, request: Request) -> Response:
        return self.done(request, Task())

    def done(self, request: Request, task: Task) -> Response:
        return self.pages.page(
            request,
            "label_end.html",
            n_graded=sum(self.places(task).values()),
            bought=self._work.bought(),
            next_step=self._work.next_step,
        )
