"""What labelled requests cost a person: ``benchmarks.labelling``, in small."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks import labelling
from benchmarks.labelling import MOST_PASSAGES, PICKED, Outcome, is_met, main
from ctxguard.monitor.store import LabelDepth

WORDS = [f"word{number}" for number in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BEIR folder whose queries name words; one of three has no relevant passage."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=30)) for _ in range(80)]
    folder = tmp_path / "words"
    (folder / "qrels").mkdir(parents=True)
    write(folder / "corpus.jsonl", ({"_id": f"d{n}", "text": t} for n, t in enumerate(texts)))
    queries = [" ".join(rng.sample(WORDS, 4)) for _ in range(30)]
    write(folder / "queries.jsonl", ({"_id": f"q{n}", "text": t} for n, t in enumerate(queries)))
    grades = [
        f"q{n}\td{d}\t{int(n % 3 > 0 and len(set(query.split()) & set(text.split())) >= 3)}"
        for n, query in enumerate(queries)
        for d, text in enumerate(texts)
    ]
    rows = ["query-id\tcorpus-id\tscore", *grades]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")
    return folder


def write(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_picked_request_is_usable_and_few_passages_are_graded(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    assert main(["--data", str(folder), "--repeats", "1", "--json", str(file), "--check"]) == 0
    found = json.loads(file.read_text())["collections"]["words"]
    served, pool = found["served"], found["pool"]
    assert served["usable"]["mrr"] == served["usable"]["precision"] == PICKED
    assert pool["usable"]["recall"] == PICKED
    assert 5 * PICKED <= served["passages"] <= min(MOST_PASSAGES, served["rows"])
    assert served["passages"] < pool["passages"]


def test_a_collection_that_costs_too_much_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = dict.fromkeys((metric.value for metric in labelling.COUNTED), PICKED)
    dear = Outcome("dear", LabelDepth.SERVED.value, 501.0, 520, 900.0, 400.0, usable, usable)
    assert not is_met(dear)
    monkeypatch.setattr(labelling, "outcomes", lambda *_: [dear])
    assert main(["--data", str(folder)]) == 0
    assert main(["--data", str(folder), "--check"]) == 1
