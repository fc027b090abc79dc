"""Calibrating from a judge's verdicts: the mixture, the files, and the profile at the end."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from simulated_pools import Recorded, ranking_of

from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, Query
from calibration.data.questions import read_questions
from calibration.from_verdicts import calibrate_from_verdicts
from calibration.judge_mixture import JudgeRates, fit_mixture
from calibration.judged_questions import (
    graded_by_people,
    graded_whole,
    judge_questions,
    questions_to_judge,
    read_verdicts,
    tokens_of,
    write_to_grade,
)
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import Hit, Mode, Passage, Ranking, ScoreKind
from ctxguard.errors import CalibrationError, DataError
from ctxguard.guard import ContextGuard
from ctxguard.monitor.judges import Judgment
from ctxguard.profile.schema import Profile

SENSITIVITY, FALSE_YES = 0.85, 0.10
N_QUESTIONS, N_CANDIDATES = 80, 15


def simulated(seed: int = 0, n: int = N_QUESTIONS) -> tuple[np.ndarray, np.ndarray]:
    """Features and relevance of candidates whose log-odds of relevance are 2·feature − 2."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n * N_CANDIDATES, 1))
    relevant = rng.random(len(features)) < 1 / (1 + np.exp(2 - 2 * features[:, 0]))
    return features, relevant


def verdicts_on(relevant: np.ndarray, sensitivity: float, false_yes: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.random(relevant.size) < np.where(relevant, sensitivity, false_yes)


IDS = [f"q{row // N_CANDIDATES}" for row in range(N_QUESTIONS * N_CANDIDATES)]
UNGRADED = np.full(len(IDS), -1, dtype=np.int8)


def test_the_mixture_says_how_many_are_relevant_where_the_verdicts_say_too_many() -> None:
    features, relevant = simulated()
    said = verdicts_on(relevant, SENSITIVITY, FALSE_YES)
    found, _ = fit_mixture(features, said, UNGRADED, IDS)
    assert abs(found.mean() - relevant.mean()) < 0.03
    said_too_often = verdicts_on(relevant, 0.92, 0.30)
    mistaken, _ = fit_mixture(features, said_too_often, UNGRADED, IDS)
    assert mistaken.mean() > relevant.mean() + 0.1, "nothing shows that the rates differ"


def test_graded_questions_teach_how_the_judge_errs() -> None:
    features, relevant = simulated()
    said = verdicts_on(relevant, 0.92, 0.30)
    grades = UNGRADED.copy()
    grades[: 20 * N_CANDIDATES] = relevant[: 20 * N_CANDIDATES]
    found, rates = fit_mixture(features, said, grades, IDS)
    assert rates.n_relevant + rates.n_irrelevant == 20 * N_CANDIDATES
    assert rates.false_yes == pytest.approx(0.30, abs=0.07)
    assert abs(found.mean() - relevant.mean()) < 0.04
    np.testing.assert_array_equal(found[grades >= 0], relevant[grades >= 0])


def test_a_judge_that_errs_on_near_misses_has_a_slope() -> None:
    features, relevant = simulated()
    rng = np.random.default_rng(2)
    false_yes = 1 / (1 + np.exp(3 - 2 * features[:, 0]))
    said = rng.random(relevant.size) < np.where(relevant, SENSITIVITY, false_yes)
    grades = UNGRADED.copy()
    grades[: 40 * N_CANDIDATES] = relevant[: 40 * N_CANDIDATES]
    assert fit_mixture(features, said, grades, IDS)[1].slope > 0.5


def test_a_judge_that_never_finds_what_is_relevant_has_rates_all_the_same() -> None:
    features, relevant = simulated()
    grades = relevant.astype(np.int8)
    found, rates = fit_mixture(features, np.zeros(relevant.size, bool), grades, IDS)
    assert 0.0 < rates.false_yes < rates.sensitivity
    assert np.isfinite(found).all()


def test_a_false_yes_is_always_rarer_than_a_right_one() -> None:
    rates = JudgeRates(sensitivity=0.6, false_yes=0.4, slope=5.0)
    assert rates.of_irrelevant(np.array([-3.0, 0.0, 3.0])).max() == pytest.approx(0.5)


class CountingJudge:
    """Knows the truth of `world`, and counts the questions that it is asked."""

    name, version, max_grade = "counting", "1", 3

    def __init__(self, fails_after: int = 1_000) -> None:
        self.asked: list[str] = []
        self._fails_after = fails_after

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        if len(self.asked) == self._fails_after:
            raise ConnectionError("the endpoint is gone")
        self.asked.append(query)
        return [
            None
            if each.text == "unreadable"
            else Judgment(each.passage_id, 2 * ("right" in each.text))
            for each in passages
        ]


def world(n: int = 60, apart: float = 2.0) -> tuple[Recorded, tuple[Query, ...]]:
    """Questions whose relevant passages mostly have the higher scores, by so many deviations."""
    rng = np.random.default_rng(3)
    queries, rankings = [], {}
    for row in range(n):
        relevant = rng.random(10) < 0.3
        scores = np.sort(rng.normal(size=10) + apart * relevant)[::-1]
        order = np.argsort(-(rng.normal(size=10) + apart * relevant))
        hits = [
            Hit(f"p{row}-{place}", float(scores[place]) + 5.0, "right" if relevant[at] else "wrong")
            for place, at in enumerate(order)
        ]
        queries.append(Query(f"q{row}", f"question {row}"))
        rankings[f"question {row}"] = Ranking.from_hits(hits, ScoreKind.COSINE)
    return Recorded(rankings, {"engine": "recorded"}), tuple(queries)


def test_judging_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    retriever, queries = world(6)
    questions = questions_to_judge(retriever, queries, first=4)
    file = tmp_path / "verdicts.jsonl"
    with pytest.raises(ConnectionError):
        judge_questions(questions, CountingJudge(fails_after=3), file)
    with file.open("a") as stream:
        stream.write('{"query_id": "q3", "jud')
    again = CountingJudge()
    found = judge_questions(questions, again, file)
    assert again.asked == ["question 3", "question 4", "question 5"]
    assert found.keys() == {query.query_id for query in queries}
    assert found == read_verdicts(file, "counting 1")
    assert all(len(said) == 4 for said in found.values())


def test_verdicts_of_another_judge_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps({"query_id": "q", "judge": "llm 1", "grades": {"a": 1}}) + "\n")
    with pytest.raises(DataError, match=r"'llm 1'.*'counting 1'.*one judge"):
        read_verdicts(file, "counting 1")


def test_a_refused_passage_has_no_verdict(tmp_path: Path) -> None:
    hits = [Hit("a", 0.9, "right"), Hit("b", 0.8, "unreadable")]
    retriever = Recorded({"one": Ranking.from_hits(hits, ScoreKind.COSINE)})
    questions = questions_to_judge(retriever, [Query("q", "one"), Query("r", "unknown")])
    assert tokens_of(questions) > 0
    assert judge_questions(questions, CountingJudge(), tmp_path / "v.jsonl") == {"q": {"a": 2}}


def test_what_people_grade_is_read_as_labels_are(tmp_path: Path) -> None:
    retriever, queries = world(8)
    questions = questions_to_judge(retriever, queries, first=5)
    file = tmp_path / "todo.csv"
    assert write_to_grade(questions, file, n=3) == 3
    other = tmp_path / "other.csv"
    write_to_grade(questions[::-1], other, n=3)
    assert other.read_text() == file.read_text(), "whatever the order of the questions"
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + 3 * 5
    file.write_text("\n".join([lines[0], *(line + "1" for line in lines[1:-1]), lines[-1]]) + "\n")
    asked = tmp_path / "queries.jsonl"
    rows = [{"query_id": q.query_id, "query": q.text, "source": "traffic"} for q in queries]
    asked.write_text("\n".join(map(json.dumps, rows)))
    graded = read_questions([asked, file], "log")
    verdicts = {
        query.query_id: {f"p{row}-{at}": True for at in range(5)}
        for row, query in enumerate(queries)
    }
    grades = graded_by_people(graded, verdicts)
    assert len(grades) == 3
    whole = graded_whole(grades, verdicts)
    assert len(whole) == 2, "one passage of the third has no grade"
    assert write_to_grade(questions, file, n=3) == 0, "not before all are graded"
    file.write_text(file.read_text().rstrip("\n") + "0\n")
    assert write_to_grade(questions, file, n=3) == 3
    assert len({row["query_id"] for row in csv.DictReader(file.read_text().splitlines())}) == 6


def test_a_formula_in_a_passage_stays_text(tmp_path: Path) -> None:
    hits = [Hit("a", 0.9, '=HYPERLINK("http://x")')]
    retriever = Recorded({"+1": Ranking.from_hits(hits, ScoreKind.COSINE)})
    file = tmp_path / "todo.csv"
    write_to_grade(questions_to_judge(retriever, [Query("q", "+1")]), file)
    assert "'=HYPERLINK" in file.read_text()
    assert "'+1" in file.read_text()


def test_from_questions_to_a_guard_in_shadow(tmp_path: Path) -> None:
    retriever, queries = world()
    questions = questions_to_judge(retriever, queries)
    verdicts = judge_questions(questions, CountingJudge(), tmp_path / "verdicts.jsonl")
    graded = {query.query_id: verdicts[query.query_id] for query, _ in questions[:20]}
    dataset = Dataset("asked", queries, {q: dict(said) for q, said in graded.items()})
    made = calibrate_from_verdicts(retriever, dataset, verdicts, Settings(serving_k=5, depth=10))
    (result,) = made.routes.values()
    assert (result.n_questions, result.n_graded) == (60, 20)
    assert result.gain.value > 0.0
    assert "20 graded by people" in result.in_words
    made.profile.save(tmp_path / "profile.json")
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.verdict.decision == "shadow"
    guard = ContextGuard(retriever, profile=profile)
    context = guard.retrieve("question 0")
    assert context.mode is Mode.SHADOW
    assert isinstance(context.decision.policy, ExpectedUtilityPolicy)


@pytest.mark.parametrize(("n_graded", "decision"), [(49, "shadow"), (160, "enforce")])
def test_enough_graded_questions_let_the_verdict_rise(n_graded: int, decision: str) -> None:
    """Where the scores tell relevant passages well, so that recall is kept."""
    retriever, queries = world(200, apart=8.0)
    verdicts, graded = truth_of(retriever, queries, n_graded)
    dataset = Dataset("asked", queries, graded)
    made = calibrate_from_verdicts(retriever, dataset, verdicts, Settings(serving_k=5, depth=10))
    assert made.n_graded == n_graded
    assert made.profile.verdict.decision == decision
    [result] = made.routes.values()
    n_held_out = n_graded - result.n_graded
    assert (n_held_out >= 20) is (decision == "enforce"), "held out of the fit"


def test_graded_questions_that_refute_the_policy_keep_what_is_served() -> None:
    """Scores that tell nothing: whatever is dropped costs recall."""
    retriever, queries = world(200, apart=0.0)
    verdicts, graded = truth_of(retriever, queries, 200)
    dataset = Dataset("asked", queries, graded)
    settings = Settings(serving_k=5, depth=10, tolerance=0.0)
    made = calibrate_from_verdicts(retriever, dataset, verdicts, settings)
    assert made.profile.verdict.decision == "keep"
    [route] = made.profile.routes.values()
    assert route.policy == RatioPolicy(k=5)


def truth_of(
    retriever: Recorded, queries: Sequence[Query], n_graded: int
) -> tuple[dict[str, dict[str, bool]], dict[str, dict[str, int]]]:
    """The truth as verdicts on all questions, and as grades of the first of them."""
    verdicts = {
        query.query_id: {
            passage.passage_id: "right" in passage.text
            for passage in retriever.retrieve(query.text).passages
        }
        for query in queries
    }
    first = [query.query_id for query in queries[:n_graded]]
    return verdicts, {name: {p: int(yes) for p, yes in verdicts[name].items()} for name in first}


@pytest.mark.parametrize("n_graded", [0, 9])
def test_without_grades_of_people_there_is_no_profile(n_graded: int) -> None:
    """What a judge's verdicts promise by themselves is not there."""
    retriever, queries = world()
    verdicts, graded = truth_of(retriever, queries, n_graded)
    with pytest.raises(CalibrationError, match=rf"graded {n_graded} questions whole, of 10"):
        calibrate_from_verdicts(retriever, Dataset("asked", queries, graded), verdicts)


def test_a_judge_that_always_says_yes_teaches_nothing() -> None:
    names = [f"q{row}" for row in range(10)]
    rankings = {name: ranking_of([3.0, 2.0, 1.0]) for name in names}
    grades = {name: {"p0": 1, "p1": 0} for name in names}
    dataset = Dataset("asked", tuple(Query(name, name) for name in names), grades)
    yes = {name: {"p0": 1, "p1": 1} for name in names}
    with pytest.raises(CalibrationError, match="not both yes and no"):
        calibrate_from_verdicts(Recorded(rankings), dataset, yes)
