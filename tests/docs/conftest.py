"""A small labelled collection in BEIR's form, for the commands that the pages show."""

import json
from pathlib import Path

import pytest

from tests.opened_once import open_models_once  # noqa: F401  a fixture for all tests here

# fmt: off
_THINGS = (
    "kettle", "teapot", "grinder", "scale", "filter", "jug", "mug", "spoon", "tamper",
    "thermometer",
    "strainer", "whisk", "tray", "towel", "brush", "tin", "saucer", "carafe", "dripper", "press",
    "pitcher", "canister", "lid", "handle",
)
# fmt: on
_TOPICS = ("cleaning", "warranty", "delivery", "repair")


@pytest.fixture(scope="session")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A passage for every thing and topic, and a question for each, half of them in ``train``."""
    folder = tmp_path_factory.mktemp("data") / "beir"
    (folder / "qrels").mkdir(parents=True)
    pairs = [(thing, topic) for thing in _THINGS for topic in _TOPICS]
    _write_lines(
        folder / "corpus.jsonl",
        [
            {"_id": f"{thing}-{topic}", "text": f"How {topic} of the {thing} works in our shop."}
            for thing, topic in pairs
        ],
    )
    _write_lines(
        folder / "queries.jsonl",
        [{"_id": f"q-{thing}-{topic}", "text": f"{topic} of a {thing}"} for thing, topic in pairs],
    )
    for split, part in (("train", pairs[::2]), ("test", pairs[1::2])):
        rows = [f"q-{thing}-{topic}\t{thing}-{topic}\t1" for thing, topic in part]
        table = "\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n"
        (folder / "qrels" / f"{split}.tsv").write_text(table, encoding="utf-8")
    return folder


def _write_lines(path: Path, documents: list[dict[str, str]]) -> None:
    lines = [json.dumps(document) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="session")
def made_before(beir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the collection and a profile calibrated on it, as pages take them for granted."""
    from calibration.calibrate import calibrate
    from calibration.data.readers import read_beir, read_corpus
    from ctxguard import HybridRetriever

    folder = tmp_path_factory.mktemp("made")
    retriever = HybridRetriever.build(read_corpus(beir))
    retriever.save(folder / "index")
    calibrate(retriever, read_beir(beir, "train")).profile.save(folder / "profile.json")
    return folder
