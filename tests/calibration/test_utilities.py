"""What answers marked right or wrong tell about a reader, and what they cannot tell."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from simulated_readers import Reader, simulate
from typer.testing import CliRunner

from calibration.data.dataset import Dataset, Query
from calibration.data.readers import read_beir
from calibration.reader.answers import (
    TERMS,
    Answer,
    mark,
    of_reader,
    read_answers,
    term_columns,
)
from calibration.reader.predictive_auc import DESCRIPTIONS, predictive_aucs
from calibration.reader.utilities import (
    ReaderEstimate,
    ReaderFit,
    fit_utilities,
    load_utilities,
    utilities_document,
)
from ctxguard.cli import app
from ctxguard.errors import CalibrationError, ConfigurationError, DataError

CAREFUL = Reader(
    {
        "relevant": 3.0,
        "irrelevant": -0.25,
        "hard_negative": -0.7,
        "position": -0.8,
        "completeness": 1.0,
    }
)


def fit(answers: tuple[Answer, ...], dataset: Dataset) -> ReaderFit:
    return fit_utilities(answers, dataset)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


GOOD = '{"query_id": "q", "passage_ids": ["a", "b"], "correct": true, "pipeline": "p"}'


class TestReading:
    def test_an_answer_keeps_its_context_in_order(self, tmp_path: Path) -> None:
        numbered = '{"query_id": 7, "passage_ids": [1], "correct": false}'
        first, second = read_answers(write(tmp_path, GOOD, numbered))
        assert first == Answer("q", ("a", "b"), True, "p")
        assert second == Answer("7", ("1",), False)

    @pytest.mark.parametrize(
        ("line", "fault"),
        [
            ('{"passage_ids": ["a"], "correct": true}', "query_id is missing"),
            ('{"query_id": "q", "correct": true}', "passage_ids is missing"),
            ('{"query_id": "q", "passage_ids": ["a"]}', "correct is missing"),
            ('{"query_id": "q", "passage_ids": ["a"], "correct": 1}', "write true or false"),
            ('{"query_id": "q", "passage_ids": ["a"], "correct": null}', "write true or false"),
            ('{"query_id": "q", "passage_ids": null, "correct": true}', "write a list"),
            ('{"query_id": "q", "passage_ids": "a", "correct": true}', "a list of passage ids"),
            ('{"query_id": "q", "passage_ids": [0.5], "correct": true}', "an id is text"),
            ('{"query_id": "q", "passage_ids": ["a", "a"], "correct": true}', "2 times"),
        ],
    )
    def test_a_fault_names_file_and_line(self, tmp_path: Path, line: str, fault: str) -> None:
        path = write(tmp_path, GOOD, "", line)
        with pytest.raises(DataError, match=fault) as caught:
            read_answers(path)
        assert (caught.value.path, caught.value.line) == (path, 3)

    def test_a_file_without_answers_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="holds no answer"):
            read_answers(write(tmp_path, ""))

    def test_answers_without_labels_are_left_out_and_counted(self) -> None:
        dataset = Dataset(
            "d", (Query("q", "?"), Query("none", "?")), {"q": {"a": 1}, "none": {"a": 0}}
        )
        answers = [Answer(query_id, ("a",), True) for query_id in ("q", "none", "x", "y")]
        marked = mark(answers, dataset)
        assert len(marked) == 1
        assert marked.notes == (
            "2 answers of questions that the labels do not hold are left out",
            "1 answers of questions without a relevant passage are left out",
        )

    def test_answers_that_belong_to_other_labels_are_refused(self) -> None:
        dataset = Dataset("d", (Query("q", "?"),), {"q": {"a": 1}})
        with pytest.raises(CalibrationError, match="belong together"):
            fit((Answer("stranger", ("a",), True),), dataset)


def test_columns_say_what_a_context_held() -> None:
    dataset = Dataset(
        "d",
        (Query("q", "?"),),
        {"q": {"a": 1, "b": 2, "c": 1, "z": 0}},
        distractors={"q": {"h": "hard_negative", "d": "distractor"}},
    )
    marked = mark([Answer("q", ("h", "x", "b", "z", "d"), True)], dataset)
    columns = {name: float(column[0]) for name, column in term_columns(marked.contexts).items()}
    assert columns == {
        "relevant": 0.5,
        "unjudged": 1.0,
        "irrelevant": 1.0,
        "hard_negative": 1.0,
        "distractor": 1.0,
        "position": 0.5,
        "completeness": 0.0,
    }


def test_where_labels_hold_relevant_passages_only_no_passage_is_unjudged() -> None:
    dataset = Dataset("d", (Query("q", "?"),), {"q": {"a": 1}})
    columns = term_columns(mark([Answer("q", ("x", "a"), True)], dataset).contexts)
    assert (columns["unjudged"][0], columns["irrelevant"][0]) == (0.0, 1.0)


class TestKnownReaders:
    @pytest.mark.parametrize("lean", [0.0, 1.0])
    def test_intervals_cover_the_true_costs(self, lean: float) -> None:
        repeats = 30
        reader = replace(CAREFUL, question_spread=1.0)
        covered = dict.fromkeys(("irrelevant", "hard_negative", "position", "completeness"), 0)
        for seed in range(repeats):
            answers, dataset = simulate(reader, seed=seed, n_queries=150, n_pipelines=4, lean=lean)
            terms = fit(answers, dataset).terms
            needed = np.array([len(dataset.relevant(query_id)) for query_id in dataset.qrels])
            for name, truth in reader.true_costs(needed).items():
                if name in covered:
                    lower, upper = terms[name].lower, terms[name].upper
                    covered[name] += lower is not None and lower <= truth <= upper
        # Of 30 intervals at 95%, fewer than 24 cover once in 1,700 such counts.
        assert min(covered.values()) >= 24, covered

    def test_the_gain_is_in_log_odds_where_questions_are_alike(self) -> None:
        reader = replace(CAREFUL, question_spread=0.0)
        answers, dataset = simulate(reader, seed=1, n_queries=1_000)
        needed = np.array([len(dataset.relevant(query_id)) for query_id in dataset.qrels])
        gain = fit(answers, dataset).terms["relevant"]
        assert gain.lower <= reader.true_costs(needed)["relevant"] <= gain.upper

    def test_a_reader_whom_nothing_harms_gets_no_positive_utility(self) -> None:
        reader = Reader({"relevant": 4.0, "irrelevant": 0.3, "hard_negative": -0.8})
        answers, dataset = simulate(reader, seed=2, n_queries=300, n_pipelines=4)
        found = fit(answers, dataset)
        assert found.terms["irrelevant"].upper < 0.0
        utilities = found.utilities()
        assert utilities.irrelevant == 0.0
        assert utilities.hard_negative == -found.terms["hard_negative"].value

    def test_more_pipelines_with_the_same_contexts_add_no_certainty(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=3, n_pipelines=3, n_queries=300)
        once, copied = fit(answers, dataset), fit(answers * 5, dataset)

        def width(found: ReaderFit) -> float:
            return found.terms["irrelevant"].upper - found.terms["irrelevant"].lower

        assert width(copied) == pytest.approx(width(once), rel=0.15)


class TestPooling:
    EQUAL = Reader({"relevant": 3.0, "irrelevant": -0.4, "hard_negative": -0.4})

    def test_kinds_that_the_answers_cannot_tell_apart_have_one_cost(self) -> None:
        answers, dataset = simulate(self.EQUAL, seed=5, n_queries=300, n_pipelines=4)
        found = fit(answers, dataset)
        together = found.costs["irrelevant + hard_negative"]
        (sentence,) = found.pooled
        assert "cannot tell which costs more" in sentence
        utilities = found.utilities()
        assert utilities.irrelevant == utilities.hard_negative == -together.value
        own = found.terms["irrelevant"]
        assert together.upper - together.lower < own.upper - own.lower

    def test_equal_costs_are_seldom_told_apart(self) -> None:
        apart = 0
        for seed in range(30):
            answers, dataset = simulate(self.EQUAL, seed=seed, n_queries=100, n_pipelines=4)
            apart += not fit(answers, dataset).pooled
        # Each by chance in 1 of 40: more than 5 of 30 once in 5,000.
        assert apart <= 5

    def test_a_hard_negative_that_seems_cheaper_is_said_to_be_the_wrong_way_round(self) -> None:
        backwards = Reader({"relevant": 3.0, "irrelevant": -0.9, "hard_negative": -0.1})
        answers, dataset = simulate(backwards, seed=6, n_queries=400, n_pipelines=5)
        found = fit(answers, dataset)
        assert "the wrong way round" in found.pooled[0]
        utilities = found.utilities()
        assert utilities.hard_negative == utilities.irrelevant

    def test_kinds_that_differ_clearly_keep_their_own_costs(self) -> None:
        apart = Reader({"relevant": 3.0, "irrelevant": -0.1, "hard_negative": -1.0})
        answers, dataset = simulate(apart, seed=7, n_queries=400, n_pipelines=5)
        found = fit(answers, dataset)
        assert found.pooled == ()
        utilities = found.utilities()
        assert utilities.hard_negative < utilities.irrelevant
        # On one scale: what was not fitted stands in the preset's ratio to what was.
        assert utilities.distractor == pytest.approx(2.0 * utilities.hard_negative, abs=1e-5)
        assert utilities.unjudged == pytest.approx(0.4 * utilities.irrelevant, abs=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "reasons"),
        [
            ({"seed": 4, "hard_negatives": False}, {"hard_negative": "0 in every context"}),
            (
                {"seed": 5, "sizes": (5, 5), "hard_negatives": False},
                {"irrelevant": "contexts of one size?"},
            ),
            (
                {"seed": 5, "sizes": (5, 5)},
                {"irrelevant": "cannot be told from", "hard_negative": "cannot be told from"},
            ),
            ({"seed": 7, "max_needed": 1}, {"completeness": "cannot be told from"}),
            ({"seed": 12, "n_queries": 19, "n_pipelines": 20}, {"relevant": "only 19 questions"}),
            ({"seed": 16, "n_pipelines": 1}, {"irrelevant": "same in every context of a question"}),
            (
                {"reader": Reader({}, intercept=0.0), "seed": 9},
                {"irrelevant": "not clearly above 0"},
            ),
        ],
        ids=str,
    )
    def test_a_term_that_the_answers_cannot_identify_says_why(
        self, changed: dict[str, Any], reasons: dict[str, str]
    ) -> None:
        simulated = simulate(**{"reader": CAREFUL, **changed})
        found = fit(*simulated)
        for name, reason in reasons.items():
            assert found.terms[name].value is None
            assert reason in (found.terms[name].reason_if_none or "")
        assert set(found.identified_costs).isdisjoint(reasons)
        if found.identified_costs == ("irrelevant",):
            # A kind without labels takes the cost of the nearest.
            assert found.utilities().hard_negative == found.utilities().irrelevant
        if not found.identified_costs:
            with pytest.raises(CalibrationError, match="identify no cost"):
                found.utilities()
            auc = aucs(*simulated)["udcg_fitted"]
            assert "do not identify a cost" in auc.reason_if_none

    def test_without_contexts_that_lack_a_relevant_passage_there_is_no_unit(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=4)
        whole = []
        for answer in answers:
            needed = list(dataset.relevant(answer.query_id))
            others = [name for name in answer.passage_ids if name not in needed]
            whole.append(replace(answer, passage_ids=(*needed, *others)))
        terms = fit(tuple(whole), dataset).terms
        assert "same in every context" in terms["relevant"].reason_if_none
        assert "the unit is not identified" in terms["irrelevant"].reason_if_none

    def test_a_few_odd_contexts_do_not_identify_a_cost(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=6, sizes=(5, 5), hard_negatives=False)
        few = {f"q{q}" for q in range(4)}
        answers = tuple(
            replace(a, passage_ids=(*a.passage_ids, *[f"extra{i}" for i in range(9)]))
            if a.query_id in few and a.pipeline == "pipeline 0"
            else a
            for a in answers
        )
        reason = fit(answers, dataset).terms["irrelevant"].reason_if_none
        assert "rests on the equivalent of" in reason

    @pytest.mark.parametrize("exactly", [True, False], ids=["every answer", "the gain alone"])
    def test_separation_without_exception_leaves_no_value(self, exactly: bool) -> None:
        answers, dataset = simulate(CAREFUL, seed=8)
        whole = [
            context.n_relevant == context.n_needed for context in mark(answers, dataset).contexts
        ]
        answers = tuple(
            replace(answer, correct=all_there or (answer.correct and not exactly))
            for answer, all_there in zip(answers, whole, strict=True)
        )
        terms = fit(answers, dataset).terms
        assert {term.value for term in terms.values()} == {None}
        assert "separated without exception" in terms["completeness"].reason_if_none

    def test_too_wide_an_interval_is_shown_but_not_concluded_from(self) -> None:
        timid = replace(CAREFUL, weights={**CAREFUL.weights, "relevant": 2.5, "completeness": 0.0})
        found = fit(*simulate(timid, seed=10, n_queries=100))
        term = found.terms["position"]
        assert term.value is None
        assert term.upper - term.lower > 1.0
        assert "is wider than 1" in term.reason_if_none

    @pytest.mark.parametrize(("correct", "word"), [(True, "wrong"), (False, "right")])
    def test_answers_of_one_mark_tell_nothing(self, correct: bool, word: str) -> None:
        answers, dataset = simulate(CAREFUL, seed=11)
        found = fit(tuple(replace(answer, correct=correct) for answer in answers), dataset)
        assert {found.terms[name].value for name in TERMS} == {None}
        assert f"no answer is {word}" in found.terms["relevant"].reason_if_none

    def test_too_few_wrong_answers_tell_nothing(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=13)
        kept = [replace(a, correct=True) if i > 20 else a for i, a in enumerate(answers)]
        reason = fit(tuple(kept), dataset).terms["relevant"].reason_if_none
        assert "questions have a wrong answer; 5 columns need 25" in reason


def aucs(answers: tuple[Answer, ...], dataset: Dataset) -> dict[str, ReaderEstimate]:
    return predictive_aucs(answers, dataset, fit(answers, dataset), seed=0)


class TestPredictiveAuc:
    def test_fitted_costs_serve_a_reader_better_than_the_preset(self) -> None:
        reader = Reader({"relevant": 5.0, "irrelevant": -0.05, "hard_negative": -2.0})
        table = aucs(*simulate(reader, seed=14, n_queries=300, n_pipelines=5))
        assert list(table) == list(DESCRIPTIONS)
        assert table["udcg_fitted"].value > table["udcg_strict"].value

    def test_it_is_the_share_of_pairs_of_one_question_in_the_right_order(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=15, n_queries=60)
        row = aucs(answers, dataset)["precision"]
        marked = mark(answers, dataset)
        values = [context.n_relevant / len(context.grades) for context in marked.contexts]
        pairs = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for i, a in enumerate(values)
            for j, b in enumerate(values)
            if marked.correct[i]
            and not marked.correct[j]
            and marked.question[i] == marked.question[j]
        ]
        assert row.value == pytest.approx(np.mean(pairs), abs=1e-6)

    def test_one_answer_to_each_question_allows_no_comparison(self) -> None:
        row = aucs(*simulate(CAREFUL, seed=16, n_pipelines=1))["recall"]
        assert (row.value, row.n) == (None, 0)
        assert row.reason_if_none == ("0 questions have a right and a wrong answer; 10 are needed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, *simulate(CAREFUL, seed=18))


def write_folder(tmp_path: Path, answers: tuple[Answer, ...], dataset: Dataset) -> Path:
    """Simulated answers and labels as files."""
    lines = [
        {"query_id": a.query_id, "passage_ids": a.passage_ids, "correct": a.correct}
        for a in answers
    ]
    write(tmp_path, *[json.dumps(line) for line in lines])
    queries = [json.dumps({"_id": q.query_id, "text": q.text}) for q in dataset.queries]
    (tmp_path / "queries.jsonl").write_text("\n".join(queries))
    (tmp_path / "qrels").mkdir()
    for name, table in (("qrels/test", dataset.qrels), ("distractors", dataset.distractors)):
        rows = [f"{q}\t{p}\t{label}" for q, labels in table.items() for p, label in labels.items()]
        header = "query-id\tcorpus-id\t" + ("score" if name == "qrels/test" else "kind")
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    return tmp_path


PROGRAM = """
import sys
from ctxguard.cli import app
app(["fit", "utilities", "--answers", sys.argv[1] + "/answers.jsonl", "--data", *sys.argv[1:]])
"""


def run_command(folder: Path, *options: str, n_threads: int = 1) -> bytes:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(n_threads))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *options],
        env={**os.environ, **threads, "COLUMNS": "200"},
        capture_output=True,
        check=True,
    )
    return done.stdout


def fit_command(*arguments: object) -> Result:
    words = ["fit", "utilities", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


class TestCommand:
    def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_threads(
        self, folder: Path
    ) -> None:
        one = run_command(folder, "--json", n_threads=1)
        assert run_command(folder, "--json", n_threads=4) == one
        document = json.loads(one)
        assert document["fit"]["terms"]["irrelevant"]["value"] > 0.0
        assert document["utilities"]["irrelevant"] < 0.0
        assert set(document["predictive_auc"]) == set(DESCRIPTIONS)

    def test_people_are_told_terms_metrics_and_rules(self, folder: Path) -> None:
        done = fit_command("--answers", folder / "answers.jsonl", "--data", folder)
        assert done.exit_code == 0
        for part in ("hard_negative", "udcg_fitted", "A term has a value where", "200 questions"):
            assert part in done.output

    def test_people_are_told_which_kinds_the_answers_cannot_tell_apart(
        self, tmp_path: Path
    ) -> None:
        equal = simulate(TestPooling.EQUAL, seed=5, n_queries=300, n_pipelines=4)
        folder = write_folder(tmp_path, *equal)
        done = fit_command("--answers", folder / "answers.jsonl", "--data", folder)
        assert "irrelevant + hard_negative" in done.output
        assert "cannot tell which costs more" in done.output

    def test_answers_of_several_readers_need_the_name_of_one(self) -> None:
        big, small = (Answer("q", ("a",), True, reader=name) for name in ("big", "small"))
        with pytest.raises(ConfigurationError, match=r"readers 'big', 'small', .*--reader"):
            of_reader([big, small], None)
        assert of_reader([big, small, big], "small") == (small,)
        assert of_reader([big, big], None) == (big, big)


@pytest.fixture(scope="module")
def found() -> ReaderFit:
    return fit(*simulate(CAREFUL, seed=18))


class TestSavedUtilities:
    def test_what_was_fitted_is_read_back_with_its_origin(
        self, found: ReaderFit, tmp_path: Path
    ) -> None:
        file = tmp_path / "utilities.json"
        file.write_text(json.dumps(utilities_document(found, "")))
        loaded, source = load_utilities(file)
        assert loaded == found.utilities()
        assert loaded.relevant == 1.0
        assert "600 answers of a reader without a name to 200 questions" in source

    @pytest.mark.parametrize(
        ("change", "error", "fault"),
        [
            ({"format": None}, DataError, "format: Input should be"),
            ({"format": "ctxguard utilities 2"}, DataError, "format: Input should be"),
            ({"utilities": {"irrelevant": "much"}}, DataError, "utilities.irrelevant"),
            ({"utilities": {"relevant": 2.0}}, DataError, "divide all of them by it"),
            ({"utilities": None}, CalibrationError, "leave utilities out"),
        ],
    )
    def test_another_format_or_scale_and_a_file_without_utilities_are_refused(
        self,
        found: ReaderFit,
        tmp_path: Path,
        change: dict[str, object],
        error: type[Exception],
        fault: str,
    ) -> None:
        file = tmp_path / "utilities.json"
        file.write_text(json.dumps({**utilities_document(found, ""), **change}))
        with pytest.raises(error, match=fault):
            load_utilities(file)


@pytest.mark.shared
def test_contexts_of_one_size_do_not_tell_what_an_irrelevant_passage_costs(
    shared_data: Path,
) -> None:
    folder = shared_data / "anthropic_docs"
    answers, dataset = read_answers(folder / "answers.jsonl"), read_beir(folder)
    found = fit(answers, dataset)
    assert (found.n_answers, found.n_queries, found.n_compared) == (271, 100, 43)
    assert found.terms["relevant"].lower > 0.0
    assert "cannot be told from" in found.terms["irrelevant"].reason_if_none
    recall = aucs(answers, dataset)["recall"]
    assert recall.lower > 0.5
    assert recall.n == 19
