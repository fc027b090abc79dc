"""What a system would take, multiplied out, and what few judged requests of many tell."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._scale_live import Alarm, Day, estimates
from benchmarks._scale_model import (
    Index,
    Load,
    Machine,
    Queue,
    Units,
    breaks,
    choice,
    cost_per_day,
    engines,
    extrapolate,
    judging,
    serving,
    storing,
    vector_bytes,
    watching,
)
from benchmarks._scale_units import from_dict
from benchmarks.scale import alarm_budgets, duration, main
from ctxguard.monitor.sampling.inclusion import JudgingRates

QUEUE = Queue(10_000.0, 100.0, append_ms=0.5, claim_ms=0.3, finish_ms=0.2, scan_us=5.0)
UNITS = Units(
    index=Index(
        words=50.0,
        dimension=384,
        vectors=1_536.0,
        postings=300.0,
        passages=400.0,
        terms=200.0,
        pieces=2_000.0,
        encode_ms=20.0,
        build_ms={"none": 21.0, "full": 25.0},
        query_ms=10.0,
        search_ms=5.0,
        searched=100_000,
        search_ms_per_million=50.0,
        signals_ms=4.0,
    ),
    guard_ms=0.05,
    utility_ms=0.1,
    service_ms=0.8,
    request_bytes=1e5,
    stores={"postgresql": QUEUE},
    pgvector_bytes={"vector": 2_000.0, "halfvec": 1_200.0, "bit": 350.0},
    prompt_tokens=300.0,
    reply_tokens=7.0,
    losses_per_sample=0.2,
    guard_series=400,
    monitor_series=300,
    series_bytes=2_500.0,
)
MACHINE = Machine()
EVERYTHING = JudgingRates(dropped_rate=1.0)
"""Every passage of a sample is judged."""

sizes = st.floats(1.0, 1e11)
rates = st.floats(1.0, 1e6)


def test_a_case_worked_by_hand() -> None:
    load = Load(1e8, 50_000.0, judged_per_day=2_000.0, candidates=20, rates=EVERYTHING)
    assert load.sampling_rate == pytest.approx(2_000 / 4.32e9)
    assert load.verdicts == pytest.approx(20.0)

    stored = storing(QUEUE, load, MACHINE)
    assert stored["verdicts_per_day"] == pytest.approx(40_000.0)
    assert stored["bytes_per_day"] == pytest.approx(2_000 * (10_000 + 20 * 100))
    assert stored["bytes_retained"] == pytest.approx(30 * stored["bytes_per_day"])
    # 1 ms a sample is 86.4 million a day, half of it when the server is half busy.
    assert stored["most_per_day_by_rate"] == pytest.approx(43.2e6)
    # Half of 15 s at 5 µs a row is 1.5 million rows, of 30 days.
    assert stored["most_per_day_by_report"] == pytest.approx(50_000.0)
    assert stored["stores"] == 1

    judged = judging(UNITS, load, MACHINE)
    assert judged["input_mtokens_per_day"] == pytest.approx(12.0)
    assert judged["output_mtokens_per_day"] == pytest.approx(0.28)
    assert cost_per_day(judged, 1.0, 10.0) == pytest.approx(14.8)
    # 4 calls at once of a second each, half of the time: 172,800 a day.
    assert judged["processes"] == 1

    served = serving(UNITS, load, MACHINE)
    assert served["guard_cores"] == pytest.approx(5.0)
    assert served["service_cores"] == pytest.approx(80.0)
    assert served["query_encoding_cores"] == pytest.approx(1_000.0)
    assert served["corpus_core_days"] == pytest.approx(1e8 * 0.020 / 86_400)

    watched = watching(UNITS, 80.0, MACHINE)
    assert watched["series"] == 80 * 400 + 300
    assert watched["disk_bytes"] == pytest.approx(32_300 / 15 * 86_400 * 15 * 2)


def test_default_rates_judge_what_was_kept_and_a_part_of_the_rest() -> None:
    assert Load(1.0, candidates=5, kept=5).verdicts == pytest.approx(5.0)
    # With a hit: 0.05 + 0.95 · 0.2 = 0.24 of the rest, and 0.392 of 2.5 of the first five.
    found = Load(1.0, candidates=20, kept=5, no_hit=0.0).verdicts
    assert found == pytest.approx(5.0 + 2.5 * 0.392 + 12.5 * 0.24)
    assert Load(1.0, candidates=20, kept=5, no_hit=1.0).verdicts == pytest.approx(20.0)


@given(sizes, sizes)
def test_more_passages_take_no_fewer_bytes_and_machines(one: float, other: float) -> None:
    fewer, more = sorted((one, other))
    for less, greater in zip(
        engines(UNITS, fewer, MACHINE), engines(UNITS, more, MACHINE), strict=True
    ):
        assert less.name == greater.name
        assert (less.bytes or 0.0) <= (greater.bytes or 0.0)
        assert (less.machines or 0) <= (greater.machines or 0)
        assert (less.search_ms or 0.0) <= (greater.search_ms or 0.0)


@given(sizes, rates, st.floats(1.0, 1e7))
def test_what_breaks_is_told_in_order(passages: float, per_second: float, judged: float) -> None:
    load = Load(passages, per_second, judged_per_day=judged)
    times = [one.times for one in breaks(UNITS, load, MACHINE, QUEUE)]
    assert times == sorted(times, reverse=True)
    assert min(times) > 0.0


@given(rates)
def test_twice_the_requests_take_twice_the_cores_and_no_more_judging(per_second: float) -> None:
    once, twice = (Load(1e8, factor * per_second) for factor in (1.0, 2.0))
    one, two = (serving(UNITS, load, MACHINE) for load in (once, twice))
    for name in one:
        if name.endswith("_cores"):
            assert two[name] == pytest.approx(2.0 * one[name])
    assert judging(UNITS, once, MACHINE) == judging(UNITS, twice, MACHINE)
    assert twice.sampling_rate == pytest.approx(once.sampling_rate / 2.0)


def test_vectors_halve_and_their_signs_take_a_bit() -> None:
    found = vector_bytes(1e8, 384)
    assert found["float32"] == 2 * found["halfvec"] == 32 * found["binary"] == 1e8 * 1_536


@pytest.mark.parametrize(
    ("passages", "name"),
    [(1e6, "embedded"), (3e7, "pgvector, vector"), (5e7, "pgvector, halfvec"), (1e8, "Qdrant")],
)
def test_the_simplest_engine_that_holds_the_index_is_chosen(passages: float, name: str) -> None:
    assert choice(engines(UNITS, passages, MACHINE), MACHINE) == name


def test_what_nobody_measured_is_none_and_the_last_choice() -> None:
    found = engines(UNITS, 1e10, MACHINE)
    assert choice(found, MACHINE) == "Milvus"
    assert (found[-1].name, found[-1].bytes, found[-1].machines) == ("Milvus, DiskANN", None, None)
    unknown = replace(UNITS, series_bytes=None)
    assert watching(unknown, 80.0, MACHINE)["memory_bytes"] is None
    assert "Prometheus" not in {one.part for one in breaks(unknown, Load(1e8), MACHINE, QUEUE)}


def test_units_survive_a_report() -> None:
    assert from_dict(json.loads(json.dumps(asdict(UNITS)))) == UNITS


def test_alarms_are_as_late_as_losses_are_rare() -> None:
    alarm = Alarm("recall_loss", "exact", 0.2, 100, 0, 240.0, 400.0, 100, 10_000, 0)
    at_500, *_, at_100_000 = alarm_budgets(alarm, losses_per_sample=0.2)
    assert (at_500["losses_per_day"], at_500["text"]) == (100.0, "3.0 days")
    assert at_100_000["text"] == duration(24.0)
    # None in a million losses: at most 3.0 in a million, the rule of three.
    assert at_500["most_false_per_year"] == pytest.approx(36_500 * 3.0e-6, rel=0.01)
    assert alarm_budgets(replace(alarm, quantity="harm"), 0.2)[0]["losses_per_day"] == 500.0


def test_a_simulated_day_tells_what_is_known_by_the_hour_and_by_the_day() -> None:
    found = {(one.window, one.metric): one for one in estimates([Day(400, 2)])}
    day, hour = found["day", "mrr"], found["hour", "mrr"]
    assert (day.looks, day.shown, hour.looks) == (2, 2, 48)
    assert day.half_width is not None
    assert 0.0 < day.half_width < 0.1
    assert day.coverage is None
    assert day.coverage_text == "– of 2"
    # 17 requests an hour are too few for an estimate.
    assert hour.shown == 0
    assert hour.width_text == "–"


def test_a_report_goes_on_from_the_unit_costs_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "scale.json"
    report.write_text(json.dumps({"units": asdict(UNITS)}))
    assert main(["--only", "paper", "--json", str(report)]) == 0
    sizes = json.loads(report.read_text())["paper"]["sizes"]
    assert [size["choice"] for size in sizes] == ["Qdrant", "Milvus"]
    assert sizes[0] == json.loads(json.dumps(extrapolate(UNITS, Load(1e8), MACHINE, "postgresql")))
    assert "encoding queries" in capsys.readouterr().out


def test_without_unit_costs_the_command_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "paper"])
    assert "--only units" in capsys.readouterr().err
