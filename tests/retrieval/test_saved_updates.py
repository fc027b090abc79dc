"""An index that is updated and saved, and readers that follow it.

Of writers that are killed, tests/chaos and test_concurrent_saves.py.
"""

import threading
from pathlib import Path

import pytest

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Passage, Route
from ctxguard.retrieval import HybridRetriever
from tests.doubles import WordHashEmbedder


def passages_of(corpus: dict[str, str]) -> list[Passage]:
    return [
        Passage(passage_id, text, metadata={"first": text.split()[0]})
        for passage_id, text in corpus.items()
    ]


def load(folder: Path) -> HybridRetriever:
    return HybridRetriever.load(folder, embedder=WordHashEmbedder())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus = passages_of({f"p{n}": f"red fox number{n}" for n in range(9)})
    HybridRetriever.build(corpus, embedder=WordHashEmbedder()).save(tmp_path / "index")
    return tmp_path / "index"


def test_a_generation_in_use_is_never_written_to(folder: Path) -> None:
    retriever = load(folder)
    (generation,) = folder.glob("generation-*")
    held = {file: file.open("rb") for file in generation.iterdir()}
    before = {file: open_file.read() for file, open_file in held.items()}
    retriever.update(passages_of({"new": "sea"}))
    retriever.save(folder)
    assert not generation.exists()
    for file, open_file in held.items():
        open_file.seek(0)
        assert open_file.read() == before[file]
        open_file.close()


def test_a_follower_reads_the_fields_that_its_filters_use(folder: Path) -> None:
    writer, reader = load(folder), load(folder)
    reader.warm_up(filter_fields=["first"])
    writer.update(passages_of({"new": "sea"}))
    writer.save(folder)
    assert reader.reload()
    assert reader.generation.passages.metadata_rows.fields == ("first",)
    assert reader.retrieve("sea", where=Where(first="sea")).passage_ids == ("new",)


def test_readers_follow_a_writer_and_see_one_generation_at_a_time(folder: Path) -> None:
    """Of each pair of passages that is added together, both are there or neither."""
    writer, reader = load(folder), load(folder)
    done = threading.Event()

    def write() -> None:
        corpus: dict[str, str] = {}
        for n in range(12):
            corpus |= {f"x{n}": f"pair number{n}", f"y{n}": f"pair number{n}"}
            writer.update(passages_of(corpus))
            writer.save(folder)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while not done.is_set() or reader.reload():
        reader.reload()
        found = reader.on_route(Route.LEXICAL).retrieve("pair", depth=100).passage_ids
        xs, ys = ({each[1:] for each in found if each[0] == side} for side in "xy")
        assert xs == ys
        assert len(xs) >= seen
        seen = len(xs)
    thread.join()
    assert seen == 12
