"""The benchmark of real lists: what its rules keep, and what its bars say of known figures."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks._served import Recorded, mean_figures
from benchmarks.real_lists import BM25, RULES, bars, read_lists, read_verdicts

SCORES = {"a": (10.0, 9.0, 2.0, 1.0), "b": (5.0, 4.9, 4.8, -1.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("qrels", "runs", "verdicts"):
        (tmp_path / name).mkdir()
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "a", "text": "one"}\n{"_id": "b", "text": "two"}\n', encoding="utf-8"
    )
    (tmp_path / "qrels" / "test.tsv").write_text("a\tp0\t3\na\tp2\t1\nb\tp1\t2\n", encoding="utf-8")
    run = [
        f"{query} Q0 p{rank} {rank + 1} {score} engine\n"
        for query, scores in SCORES.items()
        for rank, score in enumerate(scores)
    ]
    (tmp_path / "runs" / "engine.run").write_text("".join(run), encoding="utf-8")
    (tmp_path / "verdicts" / "model.tsv").write_text(
        "query-id\tcorpus-id\tverdict\na\tp0\t2.0\nb\tp1\t0.0\n", encoding="utf-8"
    )
    return tmp_path


@pytest.fixture
def collection(folder: Path) -> Recorded:
    (found,) = read_lists(folder)
    return found


def test_partly_relevant_counts_as_irrelevant(collection: Recorded) -> None:
    assert collection.pools.relevant[0].tolist()[:4] == [True, False, False, False]
    assert collection.pools.judged[0].tolist()[:4] == [True, False, True, False]
    assert collection.pools.n_relevant.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("score > 0", [4, 3]),
        ("70% of the top", [2, 3]),
        ("elbow", [2, 3]),
        ("best fixed k", [1, 1]),
    ],
)
def test_rule_keeps_its_meaning(collection: Recorded, rule: str, kept: list[int]) -> None:
    labelled, rows = np.array([0]), np.arange(2)
    assert RULES[rule](collection, labelled, rows).tolist() == kept


def test_recorded_verdicts_answer_by_passage(folder: Path, collection: Recorded) -> None:
    answers = read_verdicts(folder / "verdicts" / "model.tsv", collection.dataset)
    found = answers.assess("one", ["p1", "p0"])["model"]
    np.testing.assert_array_equal(found, [np.nan, 2.0])


def test_bars_can_be_met_and_missed() -> None:
    run = {"net": 0.6, "share": 0.5, "forecast": 0.6, "enforced": 1.0, "unlike": 0.0}
    poor = {**run, "net": -0.1, "unlike": 2.0}
    for recall, each, holds in ((0.03, run, True), (-0.1, poor, False)):
        policy = {"recall": recall, "equal": recall, "kept": 6.0}
        lists = {BM25: dict.fromkeys(("leaner", "balanced", "richer"), policy)}
        by_labels = dict.fromkeys((20, 27), lists)
        asked = {"model": {name: mean_figures([each]) for name in (BM25, "tas_b", "repllama")}}
        found = bars(by_labels, asked)
        assert len(found) == 9
        assert all(kept is holds for _, kept in found.values())
