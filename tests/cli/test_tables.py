"""Tables change their form with the width, and never lose a character of a figure or an id."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from running import Run

from ctxguard.cli._tables import TextTable

WIDTHS = (40, 60, 80, 100, 120)
SYSTEMS = ("lexical", "dense", "reciprocal_rank", "convex:0.5")
METRICS = ("recall", "precision", "mrr", "ndcg", "udcg", "distractor rate", "kept", "ms")


def printed(rows: TextTable, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False)
    console.print(rows)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return text


def systems() -> TextTable:
    rows = (
        [system, *(f"{row}.{column}23" for column in range(len(METRICS)))]
        for row, system in enumerate(SYSTEMS)
    )
    return TextTable(["candidate", *(f"{metric}>" for metric in METRICS)], rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off(width: int) -> None:
    """Figures and names stay whole; a long id is broken, a text wrapped between words."""
    words = printed(systems(), width).split()
    for row, system in enumerate(SYSTEMS):
        assert {system, *(f"{row}.{at}23" for at in range(len(METRICS)))} <= set(words)
    long = "0123456789" * 15
    rows = TextTable(("query", "passage", "n>"), [("q", long, "1")])
    assert long in "".join(printed(rows, width).split())
    meaning = "passages that are relevant to the question and were kept by the policy"
    cells = [
        ("recall", "0.810", "[0.758, 0.862]", "100", meaning),
        ("kept", "5.000", "[5.000, 5.000]", "100", "passages kept"),
    ]
    text = printed(TextTable(("metric", "mean>", "95% interval>", "n>", "meaning"), cells), width)
    assert "[0.758, 0.862]" in text
    assert set(meaning.split()) <= set(text.split())


def test_unfitting_records_become_blocks() -> None:
    lines = [" ".join(line.split()) for line in printed(systems(), 40).splitlines()]
    for row, system in enumerate(SYSTEMS):
        start = lines.index(f"candidate {system}")
        fields = [f"{metric} {row}.{column}23" for column, metric in enumerate(METRICS)]
        assert lines[start + 1 : start + 1 + len(METRICS)] == fields


def test_headless_rows_stay_with_record() -> None:
    cells = []
    for system in SYSTEMS:
        cells.append((system, "recall", "+0.007", "[-0.060, +0.077]", "within noise"))
        cells.append(("", "harm", "-0.067", "[-0.100, -0.035]", "better"))
    columns = ("candidate", "metric", "difference>", "95% interval>", "outcome")
    rows = TextTable(columns, cells)
    lines = [" ".join(line.split()) for line in printed(rows, 60).splitlines()]
    for system in SYSTEMS:
        start = lines.index(f"candidate {system}")
        record = lines[start : start + 6]
        assert "recall +0.007 [-0.060, +0.077] within noise" in record
        assert "harm -0.067 [-0.100, -0.035] better" in record


def test_empty_table_is_its_header() -> None:
    """An empty table is its header and a row has a cell for each column."""
    assert "metric" in printed(TextTable(("metric", "mean>"), []), 60)
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        TextTable(("metric", "mean>"), [("recall",)])


@pytest.fixture
def places(index: Path, collection: Path, profile: Path, tmp_path: Path) -> dict[str, object]:
    """What stands for the words in capitals."""
    return {"INDEX": index, "DATA": collection, "PROFILE": profile, "NEW": tmp_path / "p.json"}


@pytest.mark.model
@pytest.mark.parametrize(
    "words",
    [
        "calibrate --index INDEX --data DATA --out NEW --context richer",
        "evaluate --index INDEX --data DATA --profile PROFILE -k 5",
        "query violin --index INDEX --profile PROFILE",
        "evaluate --index INDEX --data DATA --profile PROFILE --candidate all",
    ],
)
def test_result_is_40_by_80(run: Run, places: dict[str, object], words: str) -> None:
    shown = run.ok(*[places.get(word, word) for word in words.split()], columns="80").stdout
    assert len(shown.splitlines()) <= 40
    assert max(map(len, shown.splitlines())) <= 80
