"""``ctxguard calibrate --queries``: a profile from questions without labels, by a judge."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ctxguard.cli._console import Output, print_json
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.calibrate_route import Settings
    from calibration.data.dataset import Dataset
    from calibration.from_verdicts import JudgedCalibration
    from calibration.judged_questions import Searching, ToJudge
    from ctxguard.cli._system import Source
    from ctxguard.cli.calibrate import Calibrate


def calibrate_from_questions(settings: "Calibrate", queries: Path, chosen: "Settings") -> None:
    """Judge the questions, or say what that takes; write the profile and the file to grade."""
    from calibration.from_verdicts import calibrate_from_verdicts
    from calibration.judged_questions import (
        graded_whole,
        judge_questions,
        questions_to_judge,
        write_to_grade,
    )

    output = Output(as_json=settings.as_json)
    to_grade, verdict_file = (
        settings.out.with_suffix(suffix) for suffix in (".to-grade.csv", ".verdicts.jsonl")
    )
    dataset = _asked(queries, to_grade)
    with output.doing("opening the retriever"):
        opened = settings.open(dataset.queries)
    with output.doing("searching"):
        questions = questions_to_judge(_as_served(opened), dataset.queries, depth=chosen.depth)
    if not questions:
        raise ConfigurationError(f"{queries}: no question finds a passage")
    _print_cost(questions, settings, output)
    if settings.judge is None:
        return
    judge = settings.model_judge(settings.judge, settings.reranker)
    with output.passes() as begin, ExitStack() as stack:
        stack.callback(getattr(judge, "close", bool))
        verdicts = judge_questions(questions, judge, verdict_file, begin("judging", len(questions)))
        made = calibrate_from_verdicts(opened, dataset, verdicts, chosen, passes=begin)
    made.profile.save(settings.out)
    if not to_grade.exists():
        write_to_grade(questions, to_grade, seed=chosen.seed)
    n_graded = len(graded_whole(dataset, verdicts))
    files = {"profile": settings.out, "verdicts": verdict_file, "to_grade": to_grade}
    if settings.as_json:
        print_json(_document(made, files, n_graded))
    else:
        _print(made, files, n_graded, output)


def _asked(queries: Path, to_grade: Path) -> "Dataset":
    """The questions, with what people graded of them."""
    from calibration.data.golden_sources import read_sources

    graded = [to_grade] if to_grade.exists() else []
    return read_sources([queries, *graded], source="traffic").dataset(queries.name)


def _as_served(opened: "Source") -> "Searching":
    """The retriever in the order that calibration starts from, with texts."""
    from calibration.calibrate import MultiRoute, default_fusion
    from calibration.retrievers import RankingSource

    if isinstance(opened, RankingSource):
        return opened
    several = cast(MultiRoute, opened)
    fused = several.with_fusion(default_fusion(several))
    return fused.on_route(next(route for route in Route if route in fused.routes))


def _print_cost(questions: "list[ToJudge]", settings: "Calibrate", output: Output) -> None:
    from calibration.judged_questions import tokens_of

    calls = sum(len(each.passages) for each in questions)
    tokens = tokens_of(questions)
    line = f"judging takes {calls:,} calls on {len(questions):,} questions"
    if settings.judge != "cross-encoder":
        line += f" and reads about {tokens / 1e6:.2g} million tokens besides its instructions"
        if settings.prices is not None:
            line += f", about {tokens / 1e6 * settings.prices[0]:.2f} at the price given"
    if settings.judge is None:
        line += "; add --judge llm or --judge cross-encoder, and --model, to do it"
    output.note(line)


def _print(
    made: "JudgedCalibration", files: Mapping[str, Path], n_graded: int, output: Output
) -> None:
    verdict = made.profile.verdict
    facts = [("verdict", "" if verdict is None else verdict.statement)]
    for route, result in made.routes.items():
        facts.append((f"route {route.value}", describe_policy(result.policy)))
    facts.append(("why", next(iter(made.routes.values())).in_words))
    facts += [(name.replace("_", " "), str(file)) for name, file in files.items()]
    output.facts(facts)
    if n_graded == 0:
        output.note(
            f"grade the passages of {files['to_grade']} (column grade: 2 answers, 1 helps, 0 "
            "neither), and run this command again: verdicts are kept, and a judge whose errors are "
            "known is worth more"
        )


def _document(
    made: "JudgedCalibration", files: Mapping[str, Path], n_graded: int
) -> dict[str, object]:
    verdict = made.profile.verdict
    return {
        "verdict": None if verdict is None else verdict.decision,
        **{name: str(file) for name, file in files.items()},
        "profile_id": made.profile.profile_id,
        "graded": n_graded,
        "depth": made.profile.provenance.depth or DEFAULT_DEPTH,
        "routes": {
            route.value: {
                "keeps": describe_policy(result.policy),
                "judge": asdict(result.rates),
                "gain": result.gain,
                "expected_gain": result.expected_gain,
                "cost_if_less_specific": result.cost_if_less_specific,
                "questions": result.n_questions,
            }
            for route, result in made.routes.items()
        },
    }
