"""The demonstration corpus: read from the running interpreter, the same on every supported one."""

import logging
import subprocess
import sys

import pytest

from calibration.data.dataset import Dataset
from ctxguard.cli.demonstration import corpus
from ctxguard.cli.demonstration.labelled_questions import questions, records
from ctxguard.core.types import Passage


@pytest.fixture(scope="module")
def entries() -> list[Passage]:
    return list(corpus.passages())


def test_grafted_names_are_no_part(entries: list[Passage], monkeypatch: pytest.MonkeyPatch) -> None:
    """What other libraries replace or graft on is not a part of it."""

    def warning_once(self: logging.Logger) -> None:
        """A method that some library adds to every logger."""

    warning_once.__module__ = "transformers.utils.logging"
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    assert list(corpus.passages()) == entries


def test_it_holds_a_few_thousand_passages(entries: list[Passage]) -> None:
    assert 2_000 <= len(entries) <= 4_000


def test_names_are_unique_and_listed(entries: list[Passage]) -> None:
    names = [entry.passage_id for entry in entries]
    assert len(set(names)) == len(names)
    prefixes = tuple(f"{module}." for module in corpus.MODULES)
    assert all(f"{name}.".startswith(prefixes) for name in names)


def test_passages_say_enough_not_much(entries: list[Passage]) -> None:
    assert all(entry.text.strip() and entry.title.strip() for entry in entries)
    assert max(len(entry.text) for entry in entries) <= corpus.MAX_CHARACTERS


def test_plausible_distractors_stand_side_by_side(entries: list[Passage]) -> None:
    names = {entry.passage_id for entry in entries}
    assert {"json.load", "json.loads", "asyncio.wait", "asyncio.wait_for"} <= names
    assert {"queue.Queue", "asyncio.Queue", "multiprocessing.Queue"} <= names


def test_another_process_reads_the_same_text() -> None:
    program = (
        "import hashlib; from ctxguard.cli.demonstration import corpus; "
        "print(hashlib.sha256(repr(list(corpus.passages())).encode()).hexdigest())"
    )
    command = [sys.executable, "-c", program]
    digests = {
        subprocess.run(
            command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return questions()


class TestQuestions:
    def test_at_least_150_some_unanswerable(self, dataset: Dataset) -> None:
        """A version may lack labelled names, but no whole question is lost."""
        assert len(dataset) == len(records()) >= 150
        assert 5 <= len(dataset) - len(dataset.answerable) <= 30

    def test_labels_name_passages_of_here(self, entries: list[Passage], dataset: Dataset) -> None:
        names = {entry.passage_id for entry in entries}
        labelled = {name for grades in dataset.qrels.values() for name in grades}
        labelled |= {name for found in dataset.distractors.values() for name in found}
        assert labelled <= names
        judged = [
            [*each["grades"], *each["distractors"], *each["irrelevant"]] for each in records()
        ]
        assert len({name for each in judged for name in each} - names) <= 40

    def test_grades_and_distractors_never_meet(self, dataset: Dataset) -> None:
        for query in dataset.queries:
            relevant = dataset.relevant(query.query_id)
            assert set(relevant.values()) <= {1, 2}
            assert not relevant.keys() & dataset.distractors[query.query_id].keys()

    def test_they_are_spread_over_the_modules(self, dataset: Dataset) -> None:
        topics = {(query.metadata or {})["topic"] for query in dataset.queries}
        assert len(topics) >= 40

    def test_judged_irrelevant_is_known(self, dataset: Dataset) -> None:
        zeros = [list(grades.values()).count(0) for grades in dataset.qrels.values()]
        assert min(zeros) >= 10
