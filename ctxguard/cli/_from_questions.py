"""``ctxguard calibrate`` without labels: a profile from questions, by a judge."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ctxguard._support.words import count
from ctxguard.cli._console import Output, picked
from ctxguard.cli._store import open_store
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.calibrate_route import Settings
    from calibration.data.dataset import Dataset
    from calibration.from_verdicts import JudgedCalibration
    from calibration.judged_questions import ToJudge
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
_HOW_TO_GRADE = (
    "column grade: 2 answers, 1 helps, 0 neither; then run this command again, which asks the "
    "judge nothing twice"
)


def calibrate_from_questions(
    settings: "CalibrateCommand", chosen: "Settings", output: Output
) -> None:
    """Judge the questions, or say what that takes; write the profile and the file to grade."""
    from calibration.from_verdicts import calibrate_from_verdicts
    from calibration.judged_questions import judge_questions, questions_to_judge, write_to_grade
    from ctxguard.request.assess import Closeable

    is_synthetic = settings.queries is None and settings.store is None
    files = {
        "profile": settings.out,
        "verdicts": settings.out.with_suffix(".verdicts.jsonl"),
        "to_grade": settings.out.with_suffix(".to-grade.csv"),
    }
    with ExitStack() as stack:
        judge = None
        if settings.judge is not None:
            judge = settings.model_judge(settings.judge, settings.reranker)
            if isinstance(judge, Closeable):
                stack.callback(judge.close)
        if settings.queries is None:
            files["questions"] = settings.out.with_suffix(".questions.jsonl")
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
        _print_cost(questions, settings, output)
        if judge is None:
            return
        with output.passes() as begin:
            progress = begin("judging", len(questions))
            verdicts = judge_questions(questions, judge, files["verdicts"], progress)
            made = calibrate_from_verdicts(opened, dataset, verdicts, chosen, passes=begin)
    made.profile.save(settings.out)
    n_to_grade = write_to_grade(questions, files["to_grade"], seed=chosen.seed)
    notes = _notes(made, files["to_grade"], n_to_grade, is_synthetic=is_synthetic)
    verdict = made.profile.verdict

    def show() -> None:
        policies = made.profile.routes.items()
        output.facts(
            ("verdict", "" if verdict is None else verdict.statement),
            *[(f"route {at.value}", describe_policy(by.policy)) for at, by in policies],
            ("why", next(iter(made.routes.values())).in_words),
            *[(name.replace("_", " "), str(file)) for name, file in files.items()],
        )

    document = {
        "verdict": None if verdict is None else verdict.decision,
        **files,
        "profile_id": made.profile.profile_id,
        "graded": made.n_graded,
        "depth": made.profile.provenance.depth or DEFAULT_DEPTH,
        "routes": {
            route: {
                "keeps": describe_policy(made.profile.routes[route].policy),
                "judge": result.rates,
                **picked(result, "gain", "expected_gain", "cost_if_less_specific"),
                "questions": result.n_questions,
            }
            for route, result in made.routes.items()
        },
    }
    output.result(document, show, notes, found=lacks_verdict(made.profile, settings.required))


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
    tokens = sum(len(passage.text) for passage in passages) // 4
    what = f"writing {count(len(passages), 'question')}"
    output.note(_cost(what, len(passages), tokens, settings))
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


def _notes(
    made: "JudgedCalibration", to_grade: Path, n_to_grade: int, *, is_synthetic: bool
) -> list[str]:
    notes = [_SYNTHETIC] if is_synthetic else []
    if made.n_graded == 0:
        notes.append(
            f"grade the passages of {to_grade} ({_HOW_TO_GRADE}): a judge whose errors are known "
            "is worth more, and only graded questions can raise the verdict"
        )
    elif not is_synthetic and getattr(made.profile.verdict, "value", 0.0) is None:
        more = f"; {to_grade} has {count(n_to_grade, 'question')} more" if n_to_grade else ""
        notes.append(
            f"{count(made.n_graded, 'question')} graded whole: from 50 that have a relevant "
            f"passage 20 are held out, and the verdict may rise{more}"
        )
    return notes
