"""Labels of people: which passages they are asked about, and how they correct a judge."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import pytest
from contexts import make_context
from people import label as label_all
from storing import replace_payload
from stub_judges import ErringJudge
from watching import Watching

from ctxguard.measure.worth import READERS
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.evidence import Scale, asked_probabilities, judged_request
from ctxguard.monitor.labels.human import (
    ALWAYS,
    IF_NONE_ABOVE,
    adjudicated,
    human_grades,
    rows_left,
)
from ctxguard.monitor.labels.samples import GradedSample
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.store import LabelRow, PickedPassage, PickKind

POOL = [f"p{rank}" for rank in range(10)]
SCALE = Scale(READERS, 1)


def label(
    passage_id: str, grade: int, annotator: str = "ann", at: float = 0.0, request_id: str = "r"
) -> LabelRow:
    return LabelRow(request_id, passage_id, grade, None, annotator, at)


def grades_of(labels: Sequence[LabelRow]) -> Mapping[str, Judgment]:
    return human_grades((1, label) for label in labels)[1][0]


def test_withdrawn_grade_does_not_count() -> None:
    labels = [label("a", 3), label("a", 0, "bob"), label("b", 2)]
    withdrawn = [replace(label("a", 3, at=1.0), grade=None), replace(label("b", 2), grade=None)]
    found = grades_of([*labels, *withdrawn])
    assert {name: one.grade for name, one in found.items()} == {"a": 0}
    assert grades_of([*labels, *withdrawn, label("a", 1, at=2.0)])["a"].grade == 0
    assert grades_of([*labels, *withdrawn, label("b", 1, at=2.0)])["b"].grade == 1


HARD, DISTRACTOR = "hard_negative", "distractor"
Given = tuple[int, str | None, str, float]

ANN, EARLIER, BEN = (0, None, "ann", 2.0), (3, None, "ann", 1.0), (1, None, "ben", 1.0)


@pytest.mark.parametrize(
    ("labels", "grade", "negative", "is_disputed"),
    [
        ([ANN, EARLIER, BEN], 0, None, True),
        ([ANN, EARLIER], 0, None, False),
        ([(0, None, "ann", 1.0), (2, None, "ann", 1.0)], 2, None, False),
        (
            [(0, HARD, "ann", 3.0), (0, DISTRACTOR, "ben", 1.0), (0, None, "eve", 4.0)],
            0,
            HARD,
            False,
        ),
        (
            [(2, None, "ann", 1.0), (2, None, "ben", 1.0), (0, DISTRACTOR, "eve", 1.0)],
            2,
            None,
            True,
        ),
        ([(0, "damaged", "ann", 1.0)], 0, None, False),
    ],
    ids=["lower median", "latest", "later of one time", "latest kind", "relevant", "damaged"],
)
def test_labels_become_one(
    labels: list[Given], grade: int, negative: str | None, is_disputed: bool
) -> None:
    found, disputed = adjudicated([LabelRow("r", "p", *one) for one in labels])
    assert (found.grade, found.negative, disputed) == (grade, negative, is_disputed)


def coin(position: int, probability: float = 0.5) -> PickedPassage:
    return PickedPassage(1, PickKind.COIN, position, probability)


@pytest.fixture
def record() -> SampleRecord:
    """Four of ten passages were served, and all others are judged."""
    live = Watching(ErringJudge({}), rates=JudgingRates(dropped_rate=1.0))
    live.serve(make_context(POOL, 4))
    return live.store.records([1])[1]


RUN, STOPS = (PickedPassage(1, kind, -1, 0.6, 7) for kind in (PickKind.RUN, PickKind.FIRST))
FIRST = coin(0, 1.0)
BELOW = [(f"p{rank}", IF_NONE_ABOVE) for rank in (1, 2, 3)]


@pytest.mark.parametrize(
    ("grades", "picked", "left"),
    [
        ({}, [RUN, FIRST], [("p0", ALWAYS), *BELOW]),
        ({"p0": 0, "p1": 0}, [RUN, FIRST], BELOW[1:]),
        ({"p0": 0, "p1": 1}, [RUN, FIRST], []),
        ({"p0": 1}, [RUN, FIRST], []),
        (
            {},
            [RUN, FIRST, coin(2), coin(7)],
            [("p0", ALWAYS), BELOW[0], ("p2", ALWAYS), BELOW[2], ("p7", ALWAYS)],
        ),
        ({"p0": 1, "p2": 0}, [RUN, FIRST, coin(2), coin(7)], [("p7", ALWAYS)]),
        ({"p2": 1}, [RUN, FIRST, coin(2)], [("p0", ALWAYS), BELOW[0]]),
        ({}, [STOPS, FIRST, coin(2)], [("p0", ALWAYS), ("p2", ALWAYS)]),
        ({"p0": 0}, [STOPS, FIRST], []),
        ({}, [coin(5)], [("p5", ALWAYS)]),
    ],
)
def test_request_is_graded_to_first_relevant(
    record: SampleRecord,
    grades: dict[str, int],
    picked: list[PickedPassage],
    left: list[tuple[str, str]],
) -> None:
    """A request is graded down to its first relevant passage and coins below it."""
    rows = rows_left(record, picked, grades_by_name(grades))
    assert [(record.passage_ids[position], when) for position, when in rows] == left


def grades_by_name(grades: Mapping[str, int]) -> dict[str, Judgment]:
    return {name: Judgment(name, grade) for name, grade in grades.items()}


@pytest.mark.parametrize(
    ("opened", "grades", "chances"),
    [
        (RUN, {"p0": 1, "p2": 0, "p7": 0}, {0: 1.0, 2: 0.5, 7: 0.2}),
        (RUN, {"p0": 0, "p1": 1, "p2": 0, "p7": 1}, {0: 1.0, 1: 1.0, 2: 0.5, 7: 0.2}),
        (RUN, dict.fromkeys(POOL[:4] + POOL[7:8], 0), {**dict.fromkeys(range(4), 1.0), 7: 0.2}),
        (STOPS, {"p0": 0, "p2": 0, "p7": 1}, {0: 1.0, 2: 0.5, 7: 0.2}),
        # Nobody was asked about the fifth.
        (STOPS, {"p0": 1, "p2": 0, "p7": 0, "p5": 1}, {0: 1.0, 2: 0.5, 7: 0.2}),
    ],
)
def test_grade_counts_by_asking_probability(
    record: SampleRecord,
    opened: PickedPassage,
    grades: Mapping[str, int],
    chances: Mapping[int, float],
) -> None:
    picked = [opened, FIRST, coin(2, 0.5), coin(7, 0.2)]
    given = grades_by_name(grades)
    sample = GradedSample(1, record, given, given, tuple(picked))
    assert asked_probabilities(sample) == chances
    scale = SCALE._replace(people_max_grade=1)
    rows = judged_request(sample, scale, probability=1.0)
    of_judged = [chances.get(record.passage_ids.index(name), 0.0) for name in sorted(grades)]
    asked = sorted(one for one in rows.passages["asked_probability"].tolist() if one)
    assert asked == pytest.approx(sorted(one for one in of_judged if one))
    [request] = rows.requests
    assert (request["draw"], request["run_probability"]) == (7, 0.6)
    assert request["is_run"] == (opened is RUN)


@pytest.mark.parametrize(
    ("grades", "picked"),
    [
        ({"p0": 0, "p1": 0}, [RUN, FIRST]),
        ({"p0": 1}, [RUN, FIRST, coin(2)]),
        ({"p5": 1}, [coin(5)]),
    ],
    ids=["half a run", "a coin is left", "not opened"],
)
def test_incompletely_graded_draw_stands_for_nothing(
    record: SampleRecord, grades: Mapping[str, int], picked: list[PickedPassage]
) -> None:
    """Where a run ends depends on what was found."""
    sample = GradedSample(1, record, grades_by_name(grades), {}, tuple(picked))
    assert asked_probabilities(sample) == {}


def live_with_labels(n_labelled: int) -> tuple[Watching, dict[str, set[str]]]:
    rng = random.Random(1)
    truth = {
        f"q{i}": {name for rank, name in enumerate(POOL) if rng.random() < 0.5 / (rank + 1)}
        for i in range(600)
    }
    live = Watching(ErringJudge(truth), rates=JudgingRates(dropped_rate=1.0), min_n=30)
    live.watch(*[make_context(POOL, 5, query=name, request_id=name) for name in truth])
    if n_labelled:
        label_all(
            live.store,
            live.monitor.series,
            n_labelled,
            lambda row: row.passage_id in truth[row.query],
        )
    return live, truth


def test_unpicked_labels_correct_nothing() -> None:
    """Such as those that somebody chose by hand."""
    live, _ = live_with_labels(200)
    before = live.monitor.report()
    labelled = {sample_id for sample_id, _ in live.store.labels()}
    targeted = [number for number in range(1, 601) if number not in labelled][:40]
    for sample_id in targeted:
        record = live.store.records([sample_id])[sample_id]
        live.store.add_labels(
            [label(name, 0, request_id=record.request_id) for name in record.passage_ids]
        )
    report = live.monitor.report()
    assert (report.labelled - before.labelled, report.unpicked) == (40, 40)
    assert report.populations == before.populations
    for metric, estimate in report.estimates[Window.ALL_RETAINED].items():
        assert astuple(estimate) == pytest.approx(
            astuple(before.estimates[Window.ALL_RETAINED][metric])
        )


def test_disagreements_are_reported() -> None:
    live, _ = live_with_labels(30)
    (sample_id, first), *_ = live.store.labels()
    live.store.add_labels(
        [LabelRow(first.request_id, first.passage_id, 1 - first.grade, None, "another person", 5.0)]
    )
    assert live.monitor.report().disagreements == 1
    assert sample_id


def test_damaged_labelled_sample_fails_no_report() -> None:
    live, _ = live_with_labels(40)
    damaged = live.store.labels()[0][0]
    labelled = len({sample_id for sample_id, _ in live.store.labels()})

    replace_payload(live.store, damaged, b"no record")
    assert live.monitor.report().labelled == labelled - 1
