"""The benchmark of changing corpora changes as much as it says, and keeps labels with passages."""

from typing import get_args

import numpy as np
import pytest

from benchmarks.corpus_drift import SHARES, Change, Drifting, KnownTerms, KnownVectors, Measured
from benchmarks.corpus_drift import labels_within as within
from calibration.data.dataset import Dataset, Query
from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.core.types import Passage
from tests.doubles import WordHashEmbedder

N = 400
RELEVANT = [f"p{n:03}" for n in range(0, N, 40)]


@pytest.fixture
def collection() -> Drifting:
    passages = {f"p{n:03}": Passage(f"p{n:03}", f"text number {n}") for n in range(N)}
    dataset = Dataset(
        "made up",
        (*[Query(f"q{name}", name) for name in RELEVANT], Query("nothing", "unanswerable")),
        {f"q{name}": {name: 1} for name in RELEVANT},
    )
    return Drifting(dataset, passages, KnownVectors(WordHashEmbedder(), {}), KnownTerms())


@pytest.mark.parametrize("change", get_args(Change))
def test_each_step_changes_the_share_that_it_says(collection: Drifting, change: Change) -> None:
    sketches = {
        share: CorpusSketch.of(passage_digest(collection.passages[name]) for name in ids)
        for share, ids in collection.parts(change, 1).items()
    }
    assert tuple(sketches) == SHARES
    for share, sketch in sketches.items():
        assert sketches[0.0].changed_share(sketch) == pytest.approx(share, abs=0.005)


def test_relevant_passages_are_there_from_the_beginning_where_that_is_said(
    collection: Drifting,
) -> None:
    assert set(RELEVANT) <= set(collection.parts("around", 1)[0.0])
    assert not set(RELEVANT) <= set(collection.parts("added", 1)[0.0])


def test_queries_whose_answer_is_absent_wait_for_it(collection: Drifting) -> None:
    part = within(collection.dataset, {RELEVANT[0], "p001"})
    assert [query.query_id for query in part.queries] == [f"q{RELEVANT[0]}", "nothing"]
    assert part.qrels[f"q{RELEVANT[0]}"] == {RELEVANT[0]: 1}


def test_differences_are_paired_by_query_and_repeat() -> None:
    nan = np.nan
    values = {
        0.1: {
            "kept profile": {"recall": np.array([[0.5, nan, nan], [0.0, 1.0, nan]])},
            "calibrated anew": {"recall": np.array([[1.0, nan, nan], [0.5, 1.0, nan]])},
        }
    }
    measured = Measured({0.1: 0.1}, values)
    assert measured.by_query(0.1, "kept profile", "recall").tolist() == [0.25, 1.0]
    lost = measured.by_query(0.1, "calibrated anew", "recall", "kept profile")
    assert lost.tolist() == [0.5, 0.0]
