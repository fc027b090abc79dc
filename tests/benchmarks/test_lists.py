"""The benchmarks of judged and of real lists: what they choose, and what their bars say."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import judged_lists, real_lists
from benchmarks._served import Answers, Recorded, mean_figures
from benchmarks.judged_lists import figures, graded, judged_list, means
from benchmarks.real_lists import BM25, RULES, read_lists, read_verdicts
from calibration.data.dataset import Dataset, Query
from calibration.replay import replay
from calibration.retrievers import RecordedRankings
from calibration.settings import Settings
from ctxguard.core.types import Hit, Ranking, ScoreKind


@pytest.fixture
def recorded() -> Recorded:
    queries = tuple(Query(f"q{row}", f"question {row}") for row in range(30))
    hits = [Hit(f"p{place}", 30.0 - place) for place in range(25)]
    rankings = {query.text: Ranking.from_hits(hits, ScoreKind.RATIO) for query in queries}
    labels = {query.query_id: {"p0": 1, "p1": 0, "p7": 1} for query in queries}
    dataset = Dataset("known", queries, labels)
    return Recorded("known", dataset, replay(RecordedRankings(rankings), queries))


def test_only_decided_candidates_are_judged(recorded: Recorded) -> None:
    said = {f"p{place}": float(place % 2) for place in (0, 1, 2, 24)}
    judge = Answers("binary", dict.fromkeys(recorded.texts, said))
    own = judged_list(recorded, judge, Settings())
    passages = own.judged.rows.passages
    is_judged = passages["size"] > 0.0
    assert passages["position"][is_judged].tolist() == [0, 1, 2] * 30
    assert passages["judge_grade"][is_judged].tolist() == [0, 1, 0] * 30
    assert own.relevant[is_judged].tolist() == [1.0, 0.0, 0.0] * 30


def test_others_are_graded_by_qrels(recorded: Recorded) -> None:
    judge = Answers("binary", {text: {f"p{n}": 1.0 for n in range(20)} for text in recorded.texts})
    own = judged_list(recorded, judge, Settings())
    one, other = (graded(own, Settings(), seed, 300) for seed in (0, 1))
    assert one.is_graded.sum() == pytest.approx(300, abs=60)
    assert (one.is_graded != other.is_graded).any()
    grades = one.rows.passages["people_grade"]
    assert (grades[one.is_graded] == own.relevant[one.is_graded]).all()


def test_bars_compare_with_labels() -> None:
    draw = np.array([0.1, 0.0, 0.3, 0.2, 0.5, 400.0])
    one = figures([draw, draw])
    assert (one["rmse"], one["coverage"]) == (pytest.approx(0.1), 1.0)
    assert means({"a": one, "b": {**one, "rmse": 0.3}})["rmse"] == pytest.approx(0.05**0.5)
    held = {"a judge": {"coverage": 0.95, "udcg": 0.4, "by_labels": 0.41}}
    assert all(holds for _, holds in judged_lists.bars(held).values())
    missed = {"a judge": {"coverage": 0.9, "udcg": 0.37, "by_labels": 0.41}}
    assert not any(holds for _, holds in judged_lists.bars(missed).values())


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
        found = real_lists.bars(by_labels, asked)
        assert len(found) == 9
        assert all(kept is holds for _, kept in found.values())
