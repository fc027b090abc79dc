"""The benchmark of judged lists: what its coins choose, and what its bars say of known figures."""

import numpy as np
import pytest

from benchmarks._served import Answers, Recorded
from benchmarks.judged_lists import bars, figures, graded, judged_list, means
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
    assert all(holds for _, holds in bars(held).values())
    missed = {"a judge": {"coverage": 0.9, "udcg": 0.37, "by_labels": 0.41}}
    assert not any(holds for _, holds in bars(missed).values())
