"""What a monitor exports, scraped, against the truth over all traffic, sampled or not.

Small forms of ``benchmarks.live``: everything between a request and the exposition is real. Seeds
are fixed, and the bar leaves room for so few runs: of 12 right intervals 8 hold the truth, but for
one time in five thousand.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from benchmarks._live_runs import SQLITE, Run
from benchmarks._live_scenarios import CAPPED, DRAWN, GOOD, SCENARIOS, UNEQUAL, Scenario, crossed
from benchmarks._live_service import Pick, Service, Setting, check_counts, label_some
from benchmarks._live_traffic import (
    DAY_SECONDS,
    DEPTH,
    JudgeErrors,
    Shape,
    SimulatedJudge,
    Traffic,
    draw_traffic,
    passage_id,
    query_of,
    question_of,
    true_grade,
)
from benchmarks.live import Cell, main, simulate
from ctxguard.core.types import DEFAULT_K
from ctxguard.measure.metrics import Metric, udcg
from ctxguard.measure.worth import READERS
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.labels.human import IF_NONE_ABOVE
from ctxguard.monitor.redaction import redact
from tests.command import invoke

LEAST_COVERED = 8 / 12
MAIN = (Metric.PRECISION, Metric.SERVED_MRR, Metric.UDCG, Metric.GAIN, Metric.HARM)
SMALL = Shape(n=4_000)
FALLING = Shape(n=4_000, precision=(0.8, 0.4))


Cells = dict[tuple[int, int, Window, Metric], Cell]


def cells_of(scenario: Scenario, traffics: int = 3, labellings: int = 4) -> Cells:
    """The figures of a scenario by step, labels, window and metric."""
    found = simulate(scenario, SQLITE, range(traffics), labellings)
    return {(cell.step, cell.labels, cell.window, cell.metric): cell for cell in found}


def covered(cell: Cell) -> float:
    """Share of the shown intervals that hold the truth."""
    return sum(figure.holds(truth) for _, figure, truth in cell.shown) / len(cell.shown)


def assert_covered(cells: Sequence[Cell], *, always_shown: bool = True) -> None:
    for cell in cells:
        if always_shown:
            assert len(cell.shown) == len(cell.truths), cell.to_dict()
        if cell.shown:
            assert covered(cell) >= LEAST_COVERED, cell.to_dict()


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    shape = Shape(
        n=400, popular=5, session_length=3, precision=(0.6, 0.3), abstention=0.3, top_grade=3
    )
    return draw_traffic(shape, np.random.default_rng(1))


def test_simulated_truth_is_the_librarys(traffic: Traffic) -> None:
    """The truth of simulated traffic is what the library says of every request."""
    found: dict[Metric, list[float]] = {metric: [] for metric in Metric}
    kept = in_pool = 0
    for question in traffic.asked.tolist():
        labels = [
            true_grade(traffic, query_of(question), passage_id(place)) for place in range(DEPTH)
        ]
        grades = [grade for grade, _ in labels]
        served = [] if traffic.empty[question] else grades[:DEFAULT_K]
        worth = [
            READERS.of(grade, top_grade=3, negative=negative)
            for grade, negative in labels[: len(served)]
        ]
        if served:
            ranks = [rank for rank, grade in enumerate(served, start=1) if grade > 0]
            found[Metric.PRECISION].append(len(ranks) / len(served))
            found[Metric.SERVED_MRR].append(1.0 / ranks[0] if ranks else 0.0)
        [gain], [harm] = udcg(np.array([worth]))
        found[Metric.UDCG].append(gain - harm)
        found[Metric.GAIN].append(gain)
        found[Metric.HARM].append(harm)
        own, of_all = sum(grade > 0 for grade in served), sum(grade > 0 for grade in grades)
        kept, in_pool = kept + own, in_pool + of_all
        if of_all:
            found[Metric.RECALL].append(own / of_all)
    truths = traffic.truths(0.0, 10 * DAY_SECONDS)
    for metric, values in found.items():
        if values:
            assert truths[metric] == pytest.approx(np.mean(values)), metric
    assert truths[Metric.POOLED_RECALL] == pytest.approx(kept / in_pool)


TO_COVER = {
    **{one.name: one for one in SCENARIOS},
    **{
        f"refuses {refuses}": Scenario(
            "failing", JudgeErrors(0.85, 0.9, *refuses), Shape(n=2_000), picks=(Pick(10, 300),)
        )
        for refuses in ((0.5, 0.2), (0.1, 0.35))
    },
}


@pytest.mark.parametrize(
    "name",
    ["refusals", "abstention", "both tenants graded", "refuses (0.5, 0.2)", "refuses (0.1, 0.35)"],
)
def test_published_figure_covers_the_truth(name: str) -> None:
    """Also where a judge fails on relevant passages more often, or less, than on others."""
    cells = cells_of(TO_COVER[name], traffics=12, labellings=1)
    assert_covered([cell for cell in cells.values() if cell.metric in MAIN], always_shown=False)
    precision = [cell for cell in cells.values() if cell.metric is Metric.PRECISION]
    assert any(cell.shown for cell in precision)


def test_drawn_scenarios_are_the_same() -> None:
    assert crossed(10) == DRAWN
    assert len({one.name for one in SCENARIOS}) == len(SCENARIOS)


def test_redactors_spare_simulated_questions() -> None:
    for question in range(0, 100_000, 997):
        text = query_of(question)
        assert redact(text) == text
        assert question_of(text) == question


def test_few_labels_cover_or_show_nothing() -> None:
    shape = replace(UNEQUAL, n=4_000, seconds=400.0)
    scenario = Scenario(
        "few labels",
        GOOD,
        shape,
        replace(CAPPED, window_seconds=80.0),
        picks=(Pick(10, 150), Pick(10, 150)),
        look_after_each_pick=True,
    )
    cells = cells_of(scenario, traffics=4, labellings=3)
    assert_covered(list(cells.values()), always_shown=False)
    for labels in (150, 300):
        cell = cells[10, labels, Window.ALL_RETAINED, Metric.PRECISION]
        own = [figure for _, figure, _ in cell.shown]
        assert all(figure.effective < 0.9 * labels for figure in own)


def test_ungraded_biases_no_estimate() -> None:
    picks = (Pick(10, 400, graded=0.6),)
    cells = cells_of(Scenario("a part", JudgeErrors(0.6, 0.6), SMALL, picks=picks))
    assert_covered([cells[10, 400, Window.ALL_RETAINED, metric] for metric in MAIN])


def test_outage_costs_and_biases_nothing() -> None:
    """An outage of store and judge costs no sample and biases nothing."""
    scenario = Scenario("outage", GOOD, FALLING, picks=(Pick(10, 200),), down=(7, 8), locked=(3,))
    cells = cells_of(scenario, traffics=6, labellings=1)
    assert_covered([cells[10, 200, Window.ALL_RETAINED, metric] for metric in MAIN])


def test_counters_add_up_over_restarts() -> None:
    """A monitor that begins anew after each step counts what the store holds."""
    traffic = draw_traffic(replace(SMALL, n=1_000), np.random.default_rng(3))
    judge = SimulatedJudge(traffic, GOOD, np.random.default_rng(4))
    with SQLITE.stores() as urls:
        service = Service(next(urls), traffic, judge, Setting(rate=0.3), "seed")
        for day in range(1, 4):
            service.serve(day * DAY_SECONDS)
            service.write()
            service.monitor_with(judge)
            service.judge_waiting()
        service.maintain()
        check_counts(service)
        service.close()


def test_every_database_publishes_the_same_figures(postgresql_url: str) -> None:
    scenario = Scenario("steady", shape=replace(SMALL, n=2_000), picks=(Pick(10, 200),))
    found = []
    with SQLITE.stores() as urls:
        for url in (next(urls), postgresql_url):
            found += list(Run(scenario, iter([url]), seed=0).looks(labellings=1))
    sqlite, postgresql = [look.figures for look in found]
    assert sqlite.keys() == postgresql.keys()
    for key, figure in sqlite.items():
        assert postgresql[key] == pytest.approx(figure), key


def test_graded_file_gives_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ctxguard label export`` and ``import``, with a person who follows the guide between."""
    scenario = Scenario("steady", shape=replace(SMALL, n=2_000), picks=(Pick(10, 200),))

    def by_file(service: Service, pick: Pick) -> None:
        store = f"sqlite:///{service.file}"
        file = tmp_path / "labels.csv"
        scale = ("--max-grade", 1)
        run("label", "export", "--store", store, "--out", file, "--n", pick.n, *scale)
        grade_file(file, service.traffic)
        run("label", "import", file, "--store", store, "--annotator", "ann", *scale)

    found = []
    for label in (label_some, by_file):
        monkeypatch.setattr("benchmarks._live_runs.label_some", label)
        with SQLITE.stores() as urls:
            found += list(Run(scenario, urls, seed=0).looks(labellings=1))
    by_call, by_command = [look.figures for look in found]
    assert by_call == by_command
    assert (Window.ALL_RETAINED, Metric.PRECISION) in by_call


def run(*arguments: object) -> None:
    result = invoke(arguments)
    assert result.exit_code == 0, result.output


def grade_file(file: Path, traffic: Traffic) -> None:
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = list(csv.DictReader(opened))
    for _, of_request in groupby(rows, lambda row: row["request_id"]):
        grades: list[int] = []
        for row in of_request:
            if row["when"] == IF_NONE_ABOVE and any(grades):
                continue
            grade, negative = true_grade(traffic, row["query"], row["passage_id"])
            grades.append(grade)
            row |= {"grade": str(grade), "negative": negative or ""}
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_quick_form_prints_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario("steady", shape=replace(SMALL, n=2_000), picks=(Pick(10, 200),))
    monkeypatch.setattr("benchmarks.live.SCENARIOS", (scenario,))
    report = tmp_path / "live.json"
    main(["--repeats", "4", "--postgresql", "0", "--json", str(report)])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    [found] = json.loads(report.read_text(encoding="utf-8"))["scenarios"]
    cells = found["figures"]
    assert {(cell["window"], cell["metric"]) for cell in cells} == {
        (window.value, metric.value) for window in Window for metric in Metric
    }
    assert all(cell["runs"] == 4 for cell in cells)


def test_absent_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no scenario's name has 'nothing'" in capsys.readouterr().err
