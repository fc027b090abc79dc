"""``ctxguard label``: grade passages of questions, or export samples and import their labels.

Grading reads the questions, calls the retriever, serves a page on this machine, and reads and
writes the file of labels. Export reads the store, and marks in it what it writes to a file; import
reads that file and adds its labels to the store.
"""

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import model_validator

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.extras import require
from ctxguard._support.settings import SettingsModel, about, key, optional, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import in_first_order, on_route, read_labelled
from ctxguard.cli._store import named_series, open_store
from ctxguard.cli._system import Source, System
from ctxguard.cli._tables import facts
from ctxguard.core.render import one_line
from ctxguard.core.types import DEFAULT_DEPTH, Passage
from ctxguard.errors import ConfigurationError, QueryError

if TYPE_CHECKING:
    from calibration.data.dataset import Query
    from calibration.data.label_file import LabelFile
    from calibration.pooling import Steps
    from ctxguard.monitor.labels.files import RowToLabel

MaxGrade = Annotated[int, setting("Highest grade of the scale, one for a store.", "N", ge=1)]


class LabelCommand(System):
    questions: Path | None = optional(
        "Questions to label: a text file, one per line; JSONL or CSV with a column query; or "
        "labels that lack some, as --data takes them.",
        "PATH",
        default="those of --out",
    )
    out: Path | None = optional(
        "Labels as JSONL, written after each grade; one that is there is gone on with.",
        "FILE",
        writes=True,
    )
    max_grade: int = key(
        "Highest grade of the scale, unless --out or --questions has a higher one.",
        ge=1,
        le=9,
        value=1,
    )
    listed: Literal["text", "jsonl"] | None = optional(
        "Print ids and titles as text or jsonl, in place of grading: of the passages that lack a "
        "grade, or without questions of all in --index.",
        "FORM",
        "--list",
    )
    port: int = key(
        "Port on this machine to serve the page at; 0 for any.", ge=0, le=65535, value=0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = self.questions is not None or (self.out is not None and self.out.exists())
        if not named and (self.listed is None or self.index is None):
            raise ConfigurationError("give --questions FILE, one question per line")
        if self.out is None and self.listed is None:
            raise ConfigurationError("give --out FILE, such as labels.jsonl")
        return self

    def __call__(self, output: Output) -> None:
        """Opens a page on which people grade passages by keyboard: those that any route of the
        retriever ranks high, about eleven a question, in an order that hides their ranks. A
        question that nothing answers is marked as such by one key. Each grade is in the file at
        once: end the command with Ctrl+C at any time, and begin it again to go on.

        Only this machine reaches the page; it asks for CTXGUARD_CONSOLE_TOKEN where that is set.
        """
        if self.listed is None:
            require("uvicorn", "serve")
        if self.questions is None and (self.out is None or not self.out.exists()):
            index = self.open_index()
            rows = ((None, index.passage(one)) for one in index.passage_ids)
            _print_passages(rows, str(self.listed), output)
            return
        file = self._file()
        with output.doing("opening the retriever"):
            source = cast(Source, in_first_order(self.open(file.queries)))
        notes: list[str] = []
        work = QuestionWork(file, source, self.max_grade, self._pools(file, source, output, notes))
        if self.listed is not None:
            _print_passages(work.ungraded(), self.listed, output)
            output.err.print(*notes, sep="\n", end="\n" * bool(notes))
            return
        output.note(*notes)
        work.next_step = self._next_step()
        self._serve(work, output)
        n_graded = sum(not work.lacking(place) for place in range(len(work.queries)))
        document = {
            "labels": self.out,
            "questions": len(work.queries),
            "graded": n_graded,
            "answerable": file.n_answerable,
        }
        shown = facts(
            ("graded", f"{n_graded:,} of {count(len(work.queries), 'question')}"),
            ("good for", work.bought()),
            ("labels", str(self.out)),
            ("next", work.next_step),
        )
        output.result(document, [shown])

    def _file(self) -> "LabelFile":
        """Open the labels, adding the questions they lack."""
        from calibration.asked_questions import asked_questions
        from calibration.data.label_file import LabelFile, listed_questions
        from calibration.data.text_files import read_records

        out, path = self.out or Path("labels.jsonl"), self.questions
        if path is None or path == out:
            return LabelFile(out)
        suffix = path.suffix.lower()
        is_labelled, is_json = path.is_dir() or suffix == ".tsv", suffix in {".jsonl", ".json"}
        if is_json:
            first = next(read_records(path, Counter()), None)
            is_labelled = first is not None and bool({"relevant", "keywords"} & set(first.fields))
        if is_labelled:
            return LabelFile(out, labelled=read_labelled(path, "train").dataset)
        if is_json or suffix == ".csv":
            return LabelFile(out, list(asked_questions(path)))
        return LabelFile(out, listed_questions(path))

    def _pools(
        self, file: "LabelFile", source: Source, output: Output, notes: list[str]
    ) -> "dict[str, Steps]":
        """Pool the candidates of each question; note questions that the retriever refuses."""
        from calibration.pooling import pooled

        views = [on_route(source, route) for route in getattr(source, "routes", [source.route])]
        pools, depth = {}, self.depth or DEFAULT_DEPTH
        with output.passes() as begin:
            advance = begin("retrieving candidates", len(file.queries))
            for query in file.queries:
                try:
                    found = [view.retrieve(query.text, depth=depth).passage_ids for view in views]
                except QueryError as error:
                    notes.append(f"left out: {one_line(query.text)!r}: {error}")
                else:
                    pools[query.query_id] = pooled(query.text, found)
                advance(1)
        return pools

    def _serve(self, work: "QuestionWork", output: Output) -> None:
        from ctxguard.cli._question_pages import QuestionGrading
        from ctxguard.server.app import console_app
        from ctxguard.server.console.routes import label_routes
        from ctxguard.server.run import serve
        from ctxguard.server.settings import ServiceSettings

        settings = ServiceSettings(port=self.port)
        token = settings.console_token
        routes = label_routes(lambda pages: QuestionGrading(pages, work), token=token)
        app = console_app(settings, routes)
        with suppress(KeyboardInterrupt):
            serve(settings, lambda url: output.note(f"grade at {url}/console; Ctrl+C ends"), app)

    def _next_step(self) -> str:
        # The URL of an engine may hold a password, and this is shown on a page.
        given = {"index": str(self.index), "retriever": str(self.retriever), "engine": "URL"}
        name = self.sources[0]
        source = [f"--{name}", given[name]] if name in given else []
        fields = type(self).model_fields
        if not source or any(about(fields[each])["key"] for each in self.model_fields_set):
            source += ["--system", "FILE"]
        words = ["ctxguard", "calibrate", *source, "--data", str(self.out)]
        return shlex.join([*words, "--out", "profile.json"])


class QuestionWork:
    """Questions with pooled candidates, identified by position from 0, and a file of grades."""

    def __init__(
        self, file: "LabelFile", source: Source, max_grade: int, pools: "Mapping[str, Steps]"
    ) -> None:
        self.file, self.source, self._pools = file, source, pools
        self.queries: Sequence[Query] = [each for each in file.queries if each.query_id in pools]
        self.top_grade = max(max_grade, file.max_grade)
        self.next_step = ""

    def asked(self, place: int) -> Sequence[str]:
        """List a question's passages to grade, in order, as far as they are known."""
        from calibration.pooling import to_grade

        name = self.queries[place].query_id
        grades = {one: each.grade for one, each in self.file.judgments(name).items()}
        return to_grade(self._pools[name], grades)

    def lacking(self, place: int) -> list[str]:
        """List the passages that still lack a grade; none for a question without an answer."""
        query_id = self.queries[place].query_id
        known = self.file.judgments(query_id)
        asked = () if self.file.has_no_answer(query_id) else self.asked(place)
        return [one for one in asked if one not in known]

    def bought(self) -> str:
        """Say which choices can be decided with the labels so far."""
        from calibration.verdict import in_reach

        return in_reach(self.file.n_answerable)

    def ungraded(self) -> "Iterable[tuple[str | None, Passage]]":
        """Yield each question with each passage to grade now."""
        for place, query in enumerate(self.queries):
            for one in self.lacking(place):
                yield query.text, self.source.passage(one)


def _print_passages(
    rows: "Iterable[tuple[str | None, Passage]]", form: str, output: Output
) -> None:
    """Print ids and titles, with the question if there is one, one per line."""
    for question, passage in rows:
        about = {} if question is None else {"query": question}
        row = {**about, "passage_id": passage.passage_id, "title": passage.title}
        text = "\t".join(one_line(each) for each in row.values())
        output.text(json.dumps(row, ensure_ascii=False) if form == "jsonl" else text)


class ExportCommand(SettingsModel):
    store: _options.StoreUrl
    out: Path | None = optional(
        "File to write, .jsonl or .csv.",
        "FILE",
        default="none: only say what the labels would cost",
        writes=True,
    )
    n: int = setting(
        "About how many passages of requests are to be graded, of all tenants together.",
        "N",
        "--n",
        "-n",
        ge=1,
        value=400,
    )
    judge: _options.NamedJudge = None
    whole: bool = setting(
        "Have all that is judged of new requests graded: certificates need it, and alarms of a "
        "judge that errs. The same grades then tell less of the live figures.",
        value=False,
    )
    tenant: str | None = optional(
        "Write only requests whose filter allows this one value of the field `tenant`, or of "
        "FIELD. The others that were picked wait for an export of their own.",
        "[FIELD=]VALUE",
    )
    max_grade: MaxGrade = 3

    def __call__(self, output: Output) -> None:
        """Each row is one passage, with an empty grade to fill in. A page beside
        the file tells people how to grade.

        A request is graded down to its first relevant passage, and a random part
        of what is below, so that all live figures rest on the same grades.

        In a store that no judge has seen, people grade alone: a judge gets none
        of these requests any more.

        Requests that were exported before and still lack grades come first.
        Exports of several days are one sample: each passage keeps the
        probability with which it was picked.
        """
        from ctxguard.monitor.estimation.sampling_design import to_label
        from ctxguard.monitor.labels.files import write_label_file
        from ctxguard.monitor.labels.guide import grading_guide
        from ctxguard.monitor.labels.samples import distinct_rows
        from ctxguard.monitor.service import let_people_grade

        out, tenant = self.out, self.tenant
        with open_store(self.store) as opened:
            if out is not None and not opened.series():
                let_people_grade(opened)
            series = named_series(opened, self.judge)
            samples = to_label(
                *(opened, series, self.n), tenant=tenant, whole=self.whole, dry_run=out is None
            )
            top_grade = opened.top_grade() or self.max_grade
        rows = distinct_rows(samples)
        expected = min(round(sum(sample.expected_passages for sample in samples)), len(rows))
        guide = None
        if out is not None:
            guide = out.with_name(f"{out.stem}-guide.md")
            write_label_file(out, rows)
            with atomic_write(guide) as stream:
                stream.write(grading_guide(out.name, top_grade).encode())
        notes = self._notes(rows, guide)
        if len({(sample.record.where, sample.record.where_withheld) for sample in samples}) > 1:
            notes.append(
                "these requests have different filters: whoever grades them sees what any of them "
                "may see; --tenant writes only those of one tenant"
            )
        document = {
            "out": out,
            "guide": guide,
            "requests": len(samples),
            "passages": len(rows),
            "expected_passages": expected,
        }
        line = (
            f"{'' if out is None else f'{out}: '}{count(len(samples), 'request')}, about "
            f"{count(expected, 'passage')} to grade, at most {len(rows):,}"
        )
        output.result(document, [line], notes)

    def _notes(self, rows: "Sequence[RowToLabel]", guide: Path | None) -> list[str]:
        if not rows and self.tenant is not None:
            return [f"of the requests that were picked, none from {self.tenant} lacks labels"]
        if not rows:
            return ["every judged request already has its labels"]
        notes = []
        if guide is not None:
            notes.append(
                f"{guide} tells people how to grade; import the graded file with "
                "`ctxguard label import`"
            )
        if bare := sum(not row.text and not row.title for row in rows):
            notes.append(f"the store has no text for {count(bare, 'passage')}: look it up by id")
        return notes


class ImportCommand(SettingsModel):
    file: Path = setting(
        "File written by `ctxguard label export`, with grades filled in.", "FILE", argument=True
    )
    store: _options.StoreUrl
    annotator: str = setting("Name of the person who graded; labels are kept by name.", "NAME")
    max_grade: MaxGrade = 3

    def __call__(self, output: Output) -> None:
        """All labels are kept. Of several labels of a passage by one annotator the
        last counts, and of several annotators' the lower median.

        The output says how many of the file's grades count. A file with an id that
        was changed, as spreadsheets make dates of ids, is refused: each is named,
        and none of its labels counts.
        """
        from ctxguard.monitor.estimation.sampling_design import usable_labels
        from ctxguard.monitor.labels.files import read_label_file
        from ctxguard.monitor.labels.samples import repeats
        from ctxguard.monitor.labels.unknown_ids import check_ids

        rows, ungraded = read_label_file(self.file, self.annotator, time.time(), self.max_grade)
        with open_store(self.store) as opened:
            check_ids(opened, rows, self.file)
            added, n_repeats, unknown = opened.add_labels(rows, self.max_grade)
            more, *_ = opened.add_labels(repeats(opened, rows), self.max_grade)
            requests = list(dict.fromkeys([row.request_id for row in rows] + ungraded))
            usable = usable_labels(opened, requests)
        counts = {
            "more requests ask the same question of the same passage: graded as well": more,
            "were already in the store": n_repeats,
            "requests are not in the store; their labels were left out": len(unknown),
        }
        notes = [f"{n:,} {words}" for words, n in counts.items() if n]
        if unknown:
            notes.append(f"unknown: {', '.join(unknown)}")
        said = (
            f"{count(usable['passages'], 'grade')} on "
            f"{count(usable['requests'], 'complete request')} count"
        )
        if usable["unfinished"]:
            said += f"; grades are missing for {count(usable['unfinished'], 'request')}"
        notes.append(said)
        if usable["unpicked"]:
            notes.append(
                f"{usable['unpicked']:,} of them were not picked at random: they enter no estimate"
            )
        document = {
            "added": added,
            "duplicates": n_repeats,
            "unknown": unknown,
            "repeated": more,
            "blank": len(ungraded),
            "usable": usable,
        }
        words = f"{count(added, 'label')} imported from {self.annotator}"
        output.result(document, [words], notes)
