"""An id that the guard takes is taken wherever ids are: 7, numpy's 7 and "7" are one id."""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from calibration.data.readers import read_trec_run, write_trec_run
from calibration.evaluate import measure
from calibration.replay import replay
from calibration.retrievers import wrapped
from ctxguard import ContextGuard, Hit
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.worth import READERS
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.labels.files import read_label_file
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.doubles import WordHashEmbedder

KINDS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "numpy int": np.int64,
    "numpy text": np.str_,
    "uuid": lambda n: UUID(int=n),
    "mixed": lambda n: n if n % 2 else str(n),
}
QUERIES = tuple(Query(f"q{i}", f"question {i}") for i in range(40))


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    return KINDS[request.param]


class TestEverywhere:
    def test_calibrate_evaluate_and_serve(self, make: Callable[[int], Any]) -> None:
        def search(query: str, *, depth: int) -> list[Hit]:
            first = int(query.rsplit(maxsplit=1)[-1])
            numbers = [(first + i) % 50 for i in range(20)]
            return [Hit(make(n), 0.9 - i / 100, f"text {n}") for i, n in enumerate(numbers)][:depth]

        by_text = {f"q{i}": {str(make(i % 50)): 1} for i in range(40)}
        own = {f"q{i}": {make(i % 50): 1} for i in range(40)}
        dataset = Dataset("own ids", QUERIES, own)
        assert dataset.digest() == Dataset("texts", QUERIES, by_text).digest()
        made = calibrate(search, dataset, score_kind="cosine")
        pools = replay(wrapped(search, score_kind="cosine"), QUERIES)
        measured = measure(pools, dataset, RatioPolicy(k=1), READERS, baseline_k=5, text_of=str)
        assert measured["recall"].mean() == 1.0
        guard = ContextGuard(
            search,
            profile=made.profile,
            score_kind="cosine",
            telemetry=Telemetry(CollectorRegistry()),
        )
        context = guard.retrieve("question 3")
        assert context.passages[0].passage_id == str(make(3))
        record = record_of(context, 1.0, 0.0)
        assert SampleRecord.from_bytes(record.to_bytes()).passage_ids[0] == str(make(3))

    def test_a_ranking_made_by_hand(self, make: Callable[[int], Any]) -> None:
        ids = [make(3), make(4)]
        passages = [Passage(each, "text") for each in ids]
        ranking = Ranking(np.array(ids, object), [2.0, 1.0], ScoreKind.RATIO, passages)  # type: ignore[arg-type]
        assert ranking.passage_ids == (str(ids[0]), str(ids[1]))
        assert passages[0].passage_id == str(ids[0])

    def test_trec_runs(self, make: Callable[[int], Any], tmp_path: Path) -> None:
        file = tmp_path / "run.txt"
        write_trec_run(file, {"q": [Hit(make(3), 1.0, rank=1)]})
        assert read_trec_run(file)["q"][0].passage_id == str(make(3))

    def test_judges_that_know_labels(self, make: Callable[[int], Any]) -> None:
        judge = LabelJudge({"how?": {make(3): 2}}, {"how?": [make(4)]})
        grades = judge.judge("how?", [Passage(make(n), "") for n in (3, 4)])
        assert [each.grade for each in grades if each] == [2, 0]
        assert grades[1].judged


def test_index_is_asked_by_id(make: Callable[[int], Any]) -> None:
    passages = [Passage(make(n), f"kettle number {n}") for n in (3, 4)]
    built = HybridRetriever.build(passages, embedder=WordHashEmbedder())
    assert built.passage(make(3)).passage_id == str(make(3))
    assert wrapped(built).passage(make(4)).text == "kettle number 4"


def test_a_graded_file_may_hold_numbers(tmp_path: Path) -> None:
    """As data frames write a column of ids that are all digits."""
    file = tmp_path / "graded.jsonl"
    file.write_text(json.dumps({"request_id": "r", "passage_id": 7, "grade": 1}) + "\n")
    [label], _ = read_label_file(file, "ann", 1.0, 3)
    assert label.passage_id == "7"


@pytest.mark.parametrize(
    "value", [None, True, np.True_, 7.0, np.float32(7), b"7", Decimal(7), ("a", 1), object()]
)
def test_refused_id_names_the_mend(value: Any) -> None:
    mend = r"an id of type \w+ \(.*\) must be a string, .*: pass the string"
    for make in (Hit, lambda one: Passage(one, ""), lambda one: Query(one, "?")):
        with pytest.raises(ConfigurationError, match=mend):
            make(value)
    with pytest.raises(ConfigurationError, match=mend):
        Dataset("d", (Query("q", "?"),), {"q": {value: 1}})
    with pytest.raises(ConfigurationError, match="candidate 2 of 2: " + mend):
        Ranking(["a", value], [2.0, 1.0], ScoreKind.RATIO, [])
