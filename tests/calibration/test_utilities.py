"""What answers marked right or wrong tell about a reader, and what they cannot tell."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from simulated_readers import Reader, simulate
from typer.testing import CliRunner

from calibration.data.dataset import Dataset, Query
from calibration.data.readers import read_beir
from calibration.reader.answers import Answer, mark, read_answers, term_columns
from calibration.reader.predictive_auc import DESCRIPTIONS, predictive_aucs
from calibration.reader.utilities import TERMS, ReaderFit, fit_utilities
from ctxguard.cli.utilities import register
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.errors import CalibrationError, DataError

CAREFUL = Reader(
    {
        "relevant": 3.0,
        "irrelevant": -0.25,
        "hard_negative": -0.7,
        "position": -0.8,
        "completeness": 1.0,
    }
)
RESAMPLES = 200


def fit(answers: tuple[Answer, ...], dataset: Dataset) -> ReaderFit:
    return fit_utilities(answers, dataset, seed=0, resamples=RESAMPLES)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


GOOD = '{"query_id": "q", "passage_ids": ["a", "b"], "correct": true, "pipeline": "p"}'


class TestReading:
    def test_an_answer_keeps_its_context_in_order(self, tmp_path: Path) -> None:
        assert read_answers(write(tmp_path, GOOD)) == (Answer("q", ("a", "b"), True, "p"),)

    def test_a_pipeline_need_not_be_named(self, tmp_path: Path) -> None:
        line = '{"query_id": 7, "passage_ids": [1], "correct": false}'
        assert read_answers(write(tmp_path, line)) == (Answer("7", ("1",), False),)

    @pytest.mark.parametrize(
        ("line", "fault"),
        [
            ('{"query_id": "q", ', "broken JSON"),
            ("[1, 2]", "not a JSON object"),
            ('{"passage_ids": ["a"], "correct": true}', "query_id is missing"),
            ('{"query_id": "q", "correct": true}', "passage_ids is missing"),
            ('{"query_id": "q", "passage_ids": ["a"]}', "correct is missing"),
            ('{"query_id": "q", "passage_ids": ["a"], "correct": 1}', "write true or false"),
            ('{"query_id": "q", "passage_ids": ["a"], "correct": "yes"}', "write true or false"),
            ('{"query_id": "q", "passage_ids": ["a"], "correct": null}', "write true or false"),
            ('{"query_id": "q", "passage_ids": [], "correct": true}', "without a context"),
            ('{"query_id": "q", "passage_ids": null, "correct": true}', "without a context"),
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
        assert (len(marked), marked.n_unanswerable, marked.n_unknown_queries) == (1, 1, 2)
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
        "irrelevant": 2.0,
        "hard_negative": 1.0,
        "distractor": 1.0,
        "position": 0.5,
        "completeness": 0.0,
        "needed": 2.0,
    }


class TestKnownReaders:
    def test_intervals_cover_the_true_costs(self) -> None:
        repeats = 30
        covered = dict.fromkeys(("irrelevant", "hard_negative", "position", "completeness"), 0)
        for seed in range(repeats):
            answers, dataset = simulate(CAREFUL, seed=seed, n_queries=150)
            terms = fit_utilities(answers, dataset, seed=seed, resamples=RESAMPLES).terms
            needed = np.array([len(relevant) for relevant in dataset.qrels.values()])
            for name, truth in CAREFUL.true_costs(needed).items():
                if name in covered:
                    lower, upper = terms[name].lower, terms[name].upper
                    covered[name] += lower is not None and lower <= truth <= upper
        # Of 30 intervals at 95%, fewer than 24 cover once in 1,700 such counts.
        assert min(covered.values()) >= 24, covered

    def test_the_gain_is_in_log_odds_where_questions_are_alike(self) -> None:
        reader = replace(CAREFUL, question_spread=0.0)
        answers, dataset = simulate(reader, seed=1, n_queries=1_000)
        needed = np.array([len(relevant) for relevant in dataset.qrels.values()])
        gain = fit(answers, dataset).terms["relevant"]
        assert gain.lower <= reader.true_costs(needed)["relevant"] <= gain.upper

    def test_a_reader_whom_nothing_harms_gets_no_positive_utility(self) -> None:
        reader = Reader({"relevant": 4.0, "irrelevant": 0.3, "hard_negative": -0.8})
        answers, dataset = simulate(reader, seed=2, n_queries=300)
        found = fit(answers, dataset)
        assert found.terms["irrelevant"].upper < 0.0
        utilities = found.utilities()
        assert utilities.irrelevant == 0.0
        assert utilities.hard_negative == -found.terms["hard_negative"].value

    def test_more_pipelines_with_the_same_contexts_add_no_certainty(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=3, n_pipelines=1, n_queries=300)
        once, copied = fit(answers, dataset), fit(answers * 5, dataset)

        def width(found: ReaderFit) -> float:
            return found.terms["irrelevant"].upper - found.terms["irrelevant"].lower

        assert width(copied) == pytest.approx(width(once), rel=0.15)


class TestRefusals:
    def test_without_labels_a_hard_negative_has_no_cost(self) -> None:
        found = fit(*simulate(CAREFUL, seed=4, hard_negatives=False))
        assert found.terms["hard_negative"].value is None
        assert "0 in every context" in found.terms["hard_negative"].reason_if_none
        assert found.terms["irrelevant"].value is not None
        assert found.identified_costs == ("irrelevant",)
        assert found.utilities().hard_negative == DEFAULT_UTILITIES.hard_negative

    def test_with_one_context_size_an_irrelevant_passage_has_no_cost(self) -> None:
        found = fit(*simulate(CAREFUL, seed=5, sizes=(5, 5), hard_negatives=False))
        assert "follows from the number of relevant" in found.terms["irrelevant"].reason_if_none
        assert any("in its place" in note for note in found.notes)
        with pytest.raises(CalibrationError, match="identify no cost"):
            found.utilities()

    def test_with_one_context_size_two_kinds_of_passage_cannot_be_told_apart(self) -> None:
        found = fit(*simulate(CAREFUL, seed=5, sizes=(5, 5)))
        assert "number of labelled hard negatives" in found.terms["irrelevant"].reason_if_none
        assert "number of irrelevant passages" in found.terms["hard_negative"].reason_if_none

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

    def test_where_one_passage_suffices_completeness_is_the_share_held(self) -> None:
        found = fit(*simulate(CAREFUL, seed=7, max_needed=1))
        assert "the share of the needed passages" in found.terms["completeness"].reason_if_none
        assert found.terms["irrelevant"].value is not None

    def test_complete_separation_leaves_every_term_without_a_value(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=8)
        marked = mark(answers, dataset)
        answers = tuple(
            replace(answer, correct=context.n_relevant == context.n_needed)
            for answer, context in zip(answers, marked.contexts, strict=True)
        )
        found = fit(answers, dataset)
        assert {term.value for term in found.terms.values()} == {None}
        assert all(
            "separated" in term.reason_if_none or "0 in every" in term.reason_if_none
            for term in found.terms.values()
        )

    def test_where_the_gain_is_infinite_nothing_is_measured_by_it(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=8)
        marked = mark(answers, dataset)
        answers = tuple(
            replace(answer, correct=answer.correct or context.n_relevant == context.n_needed)
            for answer, context in zip(answers, marked.contexts, strict=True)
        )
        found = fit(answers, dataset)
        assert "separated" in found.terms["completeness"].reason_if_none
        assert "no finite estimate" in found.terms["irrelevant"].reason_if_none

    def test_a_reader_who_ignores_the_context_gives_no_unit(self) -> None:
        found = fit(*simulate(Reader({}, intercept=0.0), seed=9))
        assert "not clearly above 0" in found.terms["irrelevant"].reason_if_none
        assert found.identified_costs == ()

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

    def test_too_few_questions_tell_nothing(self) -> None:
        found = fit(*simulate(CAREFUL, seed=12, n_queries=19, n_pipelines=20))
        assert "only 19 questions" in found.terms["relevant"].reason_if_none

    def test_too_few_wrong_answers_tell_nothing(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=13)
        kept = [replace(a, correct=True) if i > 20 else a for i, a in enumerate(answers)]
        reason = fit(tuple(kept), dataset).terms["relevant"].reason_if_none
        assert "questions have a wrong answer; 6 columns need 30" in reason


class TestPredictiveAuc:
    def test_fitted_costs_serve_a_reader_better_than_the_preset(self) -> None:
        reader = Reader({"relevant": 5.0, "irrelevant": -0.05, "hard_negative": -2.0})
        answers, dataset = simulate(reader, seed=14, n_queries=300)
        table = predictive_aucs(answers, dataset, fit(answers, dataset), resamples=RESAMPLES)
        assert list(table) == list(DESCRIPTIONS)
        assert table["udcg_fitted"].overall.value > table["udcg_strict"].overall.value
        assert table["udcg_fitted"].within.value > table["udcg_strict"].within.value

    def test_it_is_the_share_of_pairs_in_the_right_order(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=15, n_queries=60)
        row = predictive_aucs(answers, dataset, fit(answers, dataset), resamples=20)["precision"]
        marked = mark(answers, dataset)
        values = [context.n_relevant / len(context.grades) for context in marked.contexts]
        pairs = [
            (1.0 if a > b else 0.5 if a == b else 0.0, marked.question[i] == marked.question[j])
            for i, a in enumerate(values)
            for j, b in enumerate(values)
            if marked.correct[i] and not marked.correct[j]
        ]
        assert row.overall.value == pytest.approx(np.mean([p for p, _ in pairs]), abs=1e-6)
        same = [p for p, within in pairs if within]
        assert row.within.value == pytest.approx(np.mean(same), abs=1e-6)

    def test_where_answers_are_chance_the_honest_fit_is_at_chance(self) -> None:
        values = []
        for seed in range(8):
            answers, dataset = simulate(Reader({}, intercept=0.0), seed=seed, n_queries=60)
            table = predictive_aucs(answers, dataset, fit(answers, dataset), resamples=20)
            values.append(table["reader_model"].overall.value)
        assert np.mean(values) == pytest.approx(0.5, abs=0.05)

    def test_a_reader_that_is_not_identified_has_no_fitted_metric(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=5, sizes=(5, 5), hard_negatives=False)
        row = predictive_aucs(answers, dataset, fit(answers, dataset), resamples=20)["udcg_fitted"]
        assert row.overall.value is None
        assert "do not identify a cost" in row.overall.reason_if_none

    def test_one_pipeline_allows_no_comparison_within_questions(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=16, n_pipelines=1)
        row = predictive_aucs(answers, dataset, fit(answers, dataset), resamples=20)["recall"]
        assert row.overall.value is not None
        assert (row.within.value, row.within.n) == (None, 0)

    def test_answers_of_one_mark_have_no_predictive_aucs(self) -> None:
        answers, dataset = simulate(CAREFUL, seed=17, n_queries=30)
        answers = tuple(replace(answer, correct=True) for answer in answers)
        row = predictive_aucs(answers, dataset, fit(answers, dataset), resamples=20)["recall"]
        assert row.overall.reason_if_none == "0 questions have a wrong answer; 10 are needed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Simulated answers and labels as files."""
    answers, dataset = simulate(CAREFUL, seed=18)
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
import sys, typer
from ctxguard.cli.utilities import register
app = typer.Typer()
register(app)
app(["--answers", sys.argv[1] + "/answers.jsonl", "--data", *sys.argv[1:]])
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
        app = typer.Typer()
        register(app)
        done = CliRunner().invoke(
            app,
            ["--answers", str(folder / "answers.jsonl"), "--data", str(folder)],
            env={"COLUMNS": "200"},
        )
        assert done.exit_code == 0
        for part in ("hard_negative", "udcg_fitted", "A term has a value where", "200 questions"):
            assert part in done.output


@pytest.mark.shared
def test_contexts_of_one_size_do_not_tell_what_an_irrelevant_passage_costs(
    shared_data: Path,
) -> None:
    folder = shared_data / "anthropic_docs"
    answers, dataset = read_answers(folder / "answers.jsonl"), read_beir(folder)
    found = fit(answers, dataset)
    assert (found.n_answers, found.n_queries) == (271, 100)
    assert found.terms["relevant"].lower > 0.0
    assert "rests on the equivalent of" in found.terms["irrelevant"].reason_if_none
    table = predictive_aucs(answers, dataset, found, resamples=RESAMPLES)
    assert table["recall"].overall.lower > 0.5
    assert table["recall"].within.n == 19
