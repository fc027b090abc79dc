"""The simulation of readers: the truth that estimates are compared with, and its report."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reader import COSTS, METHODS, READERS, main, simulate


def test_the_confounded_reader_has_easier_questions_with_longer_contexts() -> None:
    simulation = simulate("confounded", 800, seed=0)
    sizes: dict[str, list[int]] = {}
    right: dict[str, list[bool]] = {}
    for answer in simulation.answers:
        sizes.setdefault(answer.query_id, []).append(len(answer.passage_ids))
        right.setdefault(answer.query_id, []).append(answer.correct)
    size, share = ([np.mean(each[q]) for q in sizes] for each in (sizes, right))
    assert np.corrcoef(size, share)[0, 1] > 0.2


def test_the_settled_readers_costs_are_shares_of_answers_that_turn() -> None:
    truth = simulate("settled", 2_000, seed=0).truth
    assert 0.0 < truth["irrelevant"] < truth["hard_negative"] < 0.1


def test_the_report_holds_every_reader_method_and_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reader.json"
    main(["--repeats", "2", "--questions", "150", "--json", str(file)])
    report = json.loads(file.read_text())["outcomes"]
    assert {r: {m: set(report[r][m]) for m in report[r]} for r in report} == {
        reader: {method: set(COSTS) for method in METHODS} for reader in READERS
    }
    assert report["even"]["within questions"]["irrelevant"]["none"] < 1.0
    assert "2 repeats of 150 questions" in capsys.readouterr().out
