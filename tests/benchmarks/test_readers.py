"""Concordance of measures with recorded answers: known answers, and a round from file to figure."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.readers import DECIDES, Answer, concordances, main, price, udcg_of
from ctxguard.measure.worth import STRICT


def test_measure_preferring_better_answers_agrees() -> None:
    alone, tenth = Answer("R", True, 1, 1.0), Answer("N" * 9 + "R", True, 1, 0.0)
    found = concordances([alone, tenth])
    assert (found[DECIDES], found["recall"], found["precision"]) == (1.0, 0.5, 1.0)
    # Equal answers say nothing.
    assert concordances([Answer("R", True, 1, 1.0), Answer("N", True, 1, 1.0)]) is None


def test_an_unknown_order_has_its_expectation() -> None:
    """Two passages in either order: the mean of both."""
    either, first, last = (
        udcg_of(STRICT)(Answer(context, ordered, 1, 1.0))
        for context, ordered in (("RN", False), ("RN", True), ("NR", True))
    )
    assert either == pytest.approx((first + last) / 2)


def test_price_is_share_of_gain() -> None:
    by_question = {
        f"q{n}": [
            Answer("", True, 1, 0.5),
            Answer("R", True, 1, 0.9),
            Answer("R" + "N" * 4, True, 1, 0.8),
        ]
        for n in range(40)
    }
    found = price(by_question)
    assert (found.gain, found.each((1, 5))) == (pytest.approx(0.4), pytest.approx(0.1 / 4 / 0.4))


def test_a_round_from_file_to_figure(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "source": "s",
            "set": "nq",
            "reader": reader,
            "block": "docs",
            "variant": "v",
            "question": f"q{n}",
            "labels": labels,
            "relevant": 1,
            "correct": correct,
        }
        for reader in ("one", "other")
        for n in range(4)
        for labels, correct in (("R", 1.0), ("RNN", 0.5), ("N" * 20 + "R", 0.0))
    ]
    with gzip.open(tmp_path / "readers.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in [{"about": "test"}, *rows]))
    report = tmp_path / "report.json"
    assert main(["--data", str(tmp_path), "--json", str(report)]) == 0
    figures = json.loads(report.read_text(encoding="utf-8"))["sets"]["nq"]["measures"]
    assert (figures[DECIDES]["value"], figures["recall"]["value"]) == (1.0, 0.5)
