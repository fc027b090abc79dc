"""``ctxguard calibrate`` without labels: judged questions, and a profile once people grade."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ctxguard._support.words import count
from ctxguard.cli._console import Output, short_interval
from ctxguard.cli._store import open_store
from ctxguard.cli._tables import TextTable
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibration.calibrate_route import Settings
    from calibration.data.dataset import Dataset
    from calibration.from_verdicts import JudgedCalibration
    from calibration.judged_questions import ToJudge
    from calibration.judged_route import Judged
    from calibration.judged_table import JudgedTable
    from calibration.retrievers import Replayable
    from ctxguard.cli._system import Source
    from ctxguard.cli.calibrate import CalibrateCommand
    from ctxguard.monitor.judges import Judge, LLMJudge
    from ctxguard.profile.schema import Profile
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_SYNTHETIC = (
    "the questions are synthetic, written from passages: they are easier than those of people, so "
    "that figures are optimistic and the verdict stays shadow"
)
_REPLY_TOKENS = 10
TOP_GRADE = 3
"""Of the scale on which people grade, as the language model that judges does."""
_HOW_TO_GRADE = (
    "column grade: 3 the whole answer, 2 most of it, 1 a part, 0 no help; finish a question before "
    "the next"
)


class _JudgedQuestions(NamedTuple):
    """Judged questions, and the profile that people's grades allow."""

    table: "JudgedTable"
    made: "JudgedCalibration | None"
    questions: "list[ToJudge]"


def calibrate_from_questions(
    settings: "CalibrateCommand", chosen: "Settings", output: Output
) -> None:
    """Judge the questions, or say what that takes; write the file to grade, and a profile.

    Without people's grades there is no profile: a judge's verdicts promise what is not there.
    """
    from calibration.judged_questions import write_to_grade

    is_synthetic = settings.queries is None and settings.store is None
    files = {
        "verdicts": settings.out.with_suffix(".verdicts.jsonl"),
        "to_grade": settings.out.with_suffix(".to-grade.csv"),
    }
    if settings.queries is None:
        files["questions"] = settings.out.with_suffix(".questions.jsonl")
    judged = _judged(settings, chosen, files, output, is_synthetic=is_synthetic)
    if judged is None:
        return
    table, made, questions = judged
    if made is not None:
        made.profile.save(settings.out)
        files = {"profile": settings.out, **files}
    n_added = write_to_grade(questions, files["to_grade"], seed=chosen.seed)
    notes = [_SYNTHETIC] if is_synthetic else []
    if made is None:
        notes += _next_step(table, files["to_grade"])
    elif not is_synthetic and getattr(made.profile.verdict, "value", 0.0) is None:
        more = f"; {files['to_grade']} has {count(n_added, 'question')} more" if n_added else ""
        notes.append(
            f"{count(made.n_graded, 'question')} graded whole: from 50 that have a relevant "
            f"passage 20 are held out, and the verdict may rise{more}"
        )
    evidence = _evidence(made, table)
    _write_reports(evidence, table, settings.report)

    def show() -> None:
        if made is not None:
            policies = made.profile.routes.items()
            verdict = made.profile.verdict
            output.facts(
                ("verdict", "" if verdict is None else verdict.statement),
                *[(f"route {at.value}", describe_policy(by.policy)) for at, by in policies],
                ("why", next(iter(made.routes.values())).in_words),
            )
        output.out.print(_as_text(table))
        written = [*files.items(), *(("report", file) for file in settings.report)]
        output.facts(*[(name.replace("_", " "), str(file)) for name, file in written])

    document = {**evidence, **files, "reports": settings.report}
    lacks = made is None or lacks_verdict(made.profile, settings.required)
    output.result(document, show, notes, found=lacks)


def _judged(
    settings: "CalibrateCommand",
    chosen: "Settings",
    files: "Mapping[str, Path]",
    output: Output,
    *,
    is_synthetic: bool,
) -> _JudgedQuestions | None:
    """Judge what is left, and fit a profile if people graded enough; None without a judge."""
    from calibration.from_verdicts import calibrate_from_verdicts
    from calibration.judged_questions import (
        judge_questions,
        leave_out_half_a_line,
        questions_to_judge,
        read_verdicts,
    )
    from ctxguard.request.assess import Closeable

    with ExitStack() as stack:
        judge = None
        if settings.judge is not None:
            judge = settings.model_judge(settings.judge, settings.reranker)
            if isinstance(judge, Closeable):
                stack.callback(judge.close)
        if settings.queries is None:
            _find_questions(settings, files["questions"], judge, output)
        dataset = _asked(settings.queries or files["questions"], files["to_grade"])
        if is_synthetic:
            chosen = chosen.model_copy(update={"held_out": 0.0})
            dataset = replace(dataset, notes=(*dataset.notes, _SYNTHETIC))
        with output.doing("opening the retriever"):
            opened = settings.open(dataset.queries)
        with output.doing("searching"):
            questions = questions_to_judge(_as_served(opened), dataset.queries, depth=chosen.depth)
        if not questions:
            raise ConfigurationError(f"{dataset.name}: no question finds a passage")
        named = None if judge is None else f"{judge.name} {judge.version}"
        leave_out_half_a_line(files["verdicts"])
        judged = read_verdicts(files["verdicts"], named)
        _print_cost(
            [each for each in questions if each[0].query_id not in judged], settings, output
        )
        if judge is None:
            return None
        made = None
        with output.passes() as begin:
            progress = begin("judging", len(questions))
            verdicts = judge_questions(questions, judge, files["verdicts"], progress)
            table = _table(questions, verdicts, dataset, chosen, judge.max_grade)
            if table.is_corrected:
                made = calibrate_from_verdicts(opened, dataset, verdicts, chosen, passes=begin)
    return _JudgedQuestions(table, made, questions)


def _table(
    questions: "list[ToJudge]",
    verdicts: "Judged",
    dataset: "Dataset",
    chosen: "Settings",
    top_grade: int,
) -> "JudgedTable":
    from calibration.judged_questions import graded_by_people, graded_whole
    from calibration.judged_table import judged_table

    of_people = graded_by_people(dataset, verdicts)
    whole = set(graded_whole(of_people, verdicts))
    ranked = {query.query_id: [each.passage_id for each in own] for query, own in questions}

    def by_rank(name: str, grades: "Mapping[str, int]") -> "list[int | None]":
        return [grades.get(passage_id) for passage_id in ranked[name]]

    return judged_table(
        {name: by_rank(name, verdicts[name]) for name in ranked},
        {name: by_rank(name, of_people[name]) for name in ranked.keys() & whole},
        chosen.utilities,
        top_grade=top_grade,
        top_grade_of_people=max(TOP_GRADE, dataset.max_grade or 0),
    )


def _next_step(table: "JudgedTable", to_grade: Path) -> list[str]:
    from calibration.judged_questions import rows_to_grade
    from calibration.judged_table import LEAST_GRADED
    from ctxguard.monitor.labels.samples import minutes_to_grade

    n = rows_to_grade(to_grade)
    return [
        "no profile was written: a judge's verdicts alone promise what is not there",
        (
            f"have people grade the {count(n, 'passage')} of {to_grade} ({_HOW_TO_GRADE}), about "
            f"{count(minutes_to_grade(n), 'minute')}, and run this command again, which asks the "
            f"judge nothing twice; from {LEAST_GRADED} questions graded whole on it writes a "
            f"profile, and there are {table.graded}"
        ),
    ]


def _evidence(made: "JudgedCalibration | None", table: "JudgedTable") -> dict[str, object]:
    found: dict[str, object] = {
        "verdict": None,
        "graded": table.graded,
        "by_k": {
            "in_words": table.in_words,
            "is_corrected": table.is_corrected,
            "rows": table.rows,
        },
    }
    if made is None:
        return found
    verdict = made.profile.verdict
    return {
        **found,
        "verdict": None if verdict is None else verdict.decision,
        "profile_id": made.profile.profile_id,
        "depth": made.profile.provenance.depth or DEFAULT_DEPTH,
        "routes": {
            route: {
                "keeps": describe_policy(made.profile.routes[route].policy),
                "judge": result.rates,
                "gain": result.gain,
                "questions": result.n_questions,
            }
            for route, result in made.routes.items()
        },
    }


def _as_text(table: "JudgedTable") -> TextTable:
    from calibration.judged_table import METRICS

    rows = [
        [str(row.k), *(short_interval(getattr(row, name)) for name in METRICS)]
        for row in table.rows
    ]
    return TextTable(["k>", "precision>", "MRR>", "UDCG>", "recall>"], rows, table.in_words)


def _write_reports(
    evidence: "Mapping[str, object]", table: "JudgedTable", files: "list[Path]"
) -> None:
    from calibration.report.judged import write_judged

    for file in files:
        write_judged(evidence, table, file)


def lacks_verdict(profile: "Profile", required: str | None) -> bool:
    """Tell whether the verdict is not the one required, if any is."""
    verdict = profile.verdict
    return required is not None and (verdict is None or verdict.decision != required)


def _find_questions(
    settings: "CalibrateCommand", file: Path, judge: "Judge | None", output: Output
) -> None:
    """Write the questions of the store's requests, or some that a model writes from passages."""
    from calibration.asked_questions import (
        passages_to_ask_about,
        questions_of_store,
        unwritten,
        write_questions,
        write_rows,
    )

    if settings.store is not None:
        with open_store(settings.store) as store, output.doing("reading requests"):
            write_rows(file, questions_of_store(store, settings.questions))
        return
    retriever = cast("HybridRetriever", settings.open())
    drawn = passages_to_ask_about(retriever.passage_ids, settings.questions)
    passages = [retriever.passage(passage_id) for passage_id in drawn]
    left = unwritten(passages, file)
    if left:
        tokens = sum(len(passage.text) for passage in left) // 4
        what = f"writing {count(len(left), 'question')}"
        output.note(_cost(what, len(left), tokens, settings))
    with output.passes() as begin:
        progress = begin("writing questions", len(passages))
        write_questions(passages, cast("LLMJudge", judge), file, progress)


def _asked(queries: Path, to_grade: Path) -> "Dataset":
    """Read the questions, with what people graded of them."""
    from calibration.data.questions import read_questions

    graded = [to_grade] if to_grade.exists() else []
    return read_questions([queries, *graded], queries.name)


def _as_served(opened: "Source") -> "Replayable":
    """Put the retriever in the order that calibration starts from, with texts."""
    from calibration.calibrate import default_fusion
    from calibration.retrievers import MultiRoute, RankingSource

    if isinstance(opened, RankingSource):
        return opened
    several = cast(MultiRoute, opened)
    fused = several.with_fusion(default_fusion(several))
    return fused.on_route(next(route for route in Route if route in fused.routes))


def _print_cost(questions: "list[ToJudge]", settings: "CalibrateCommand", output: Output) -> None:
    from calibration.judged_questions import tokens_of

    if not questions:
        output.note("every question is judged: no call is left")
        return
    n_passages = sum(len(passages) for _, passages in questions)
    what = f"judging {count(n_passages, 'passage')} of {count(len(questions), 'question')}"
    calls = len(questions) if settings.judge in ("cross-encoder", "reranker") else n_passages
    line = _cost(what, calls, tokens_of(questions), settings)
    if settings.judge is None:
        line += "; add --judge llm, cross-encoder or reranker, and --model, to do it"
    output.note(line)


def _cost(what: str, calls: int, tokens: int, settings: "CalibrateCommand") -> str:
    from ctxguard.monitor.judges.prompt import INSTRUCTIONS

    line = f"{what} takes {count(calls, 'call')}"
    if settings.judge not in ("cross-encoder", "reranker"):
        read = tokens + calls * len(INSTRUCTIONS) // 4
        line += f" and reads about {float(f'{read:.2g}'):,.0f} tokens, instructions included"
        if settings.prices is not None:
            reading, writing = settings.prices
            cost = (read * reading + calls * _REPLY_TOKENS * writing) / 1e6
            line += f", about {cost:.2g} at the prices given"
    return line
