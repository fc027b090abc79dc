"""What every engine's adapter does beside searching: building, keeping up, filtering, reading."""

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from ctxguard import ContextGuard, Flag, Passage, Ranking, Route, ScoreKind, Where
from ctxguard.core import corpus_sketch
from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.guard.wrapped_retriever import RetrieverAdapter
from ctxguard.integrations.engines import retriever
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.signals import NAMES
from ctxguard.testing import RetrieverContract
from tests.doubles import WordHashEmbedder, WordTokenEmbedder
from tests.profiles import profile_with

EXACT = ("match", "vector_match", "length")
"""The signals that do not depend on a leg's scores."""

_names = count(1)
_searched: dict[type, EngineRetriever] = {}
"""One index for each engine, which no test changes."""

PASSAGES = tuple(
    [
        Passage(
            f"p{n:03}",
            f"A passage of {word} and {other}, number{n}.",
            word.title() if n % 2 else "",
            {"tenant": "abc"[n % 3], "groups": [word, other], "level": n % 4, "open": n % 2 == 0},
        )
        for n, (word, other) in enumerate(
            [
                (word, other)
                for word in ("foxes", "kettles", "violins", "lanterns")
                for other in ("rivers", "ladders", "cameras")
            ]
        )
    ]
)


class CountingEmbedder(WordHashEmbedder):
    """Counts the passages that it encodes."""

    encoded = 0

    def encode_passages(self, texts: Sequence[str], progress: Any = None) -> Any:
        self.encoded += len(texts)
        return super().encode_passages(texts)


class SwappedEmbedder(WordHashEmbedder):
    """Another model may answer under the same name and fingerprint, as behind a URL."""

    is_swapped = False

    def encode_query(self, text: str) -> Any:
        other = WordHashEmbedder(self.dimension, salt="other")
        return other.encode_query(text) if self.is_swapped else super().encode_query(text)


def raised_in_a_child(work: Callable[[], object]) -> str:
    """Run ``work`` in a forked child; return what it raises there, with its type."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:1_000])
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return said.read()


def run_at_once(*works: Callable[[], object]) -> None:
    """Run each on a thread of its own, and raise what one raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def build(url: str, passages: Sequence[Passage] = PASSAGES, **options: Any) -> EngineRetriever:
    return EngineRetriever.build(passages, url, **{"embedder": WordHashEmbedder(), **options})


def open_index(url: str, **options: Any) -> EngineRetriever:
    return EngineRetriever.open(url, **{"embedder": WordHashEmbedder(), **options})


def scores_by_id(ranking: Ranking) -> dict[str, Any]:
    return dict(zip(ranking.passage_ids, ranking.scores, strict=True))


class EngineContract(RetrieverContract):
    """Inherit in an engine's test module, as ``class TestEngine``; a retriever's contract too."""

    scores_as_a_folder = False
    """Whether both legs score every candidate as an index in a folder does."""

    bm25_factor = 1.0
    """BM25 of the engine, divided by that of an index in a folder."""

    @abstractmethod
    def url(self, name: str) -> str:
        """The URL of an index with a name, in an engine that runs."""

    def built(self, passages: Sequence[Passage] = PASSAGES, **options: Any) -> EngineRetriever:
        url = self.url(f"index_{next(_names)}")
        return build(url, passages, **{"signals": "none", **options})

    def retriever(self, passages: Sequence[Passage]) -> EngineRetriever:
        if passages is not self.PASSAGES:
            return self.built(passages)
        if type(self) not in _searched:
            _searched[type(self)] = self.built(passages)
        return _searched[type(self)]

    def test_opened_index_finds_the_same(self) -> None:
        url = self.url(f"index_{next(_names)}")
        with build(url) as built:
            asked = "kettles and ladders", "violins"
            before = [built.retrieve(query, depth=5) for query in asked]
            fingerprint = built.fingerprint()
        with open_index(url) as opened:
            assert (len(opened), opened.fingerprint()) == (len(PASSAGES), fingerprint)
            for query, ranking in zip(asked, before, strict=True):
                assert opened.retrieve(query, depth=5).passage_ids == ranking.passage_ids

    def test_an_index_is_never_replaced(self) -> None:
        url = self.url(f"index_{next(_names)}")
        with build(url), pytest.raises(ConfigurationError, match="--update"):
            build(url, PASSAGES[:2])

    def test_absent_index_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match="no index with that name"):
            open_index(self.url("absent"))

    def test_swapped_embedder_is_told(self) -> None:
        """A model that changed behind its name is known by the texts that the profile keeps."""
        embedder = SwappedEmbedder()
        with self.built(embedder=embedder) as built:
            then = RetrieverAdapter(built).fingerprint()
            guard = ContextGuard(built, profile=profile_with({}, fingerprint=then))
            assert guard.probe().differences == ()
            embedder.is_swapped = True
            assert guard.probe().flags == (Flag.PROFILE_MISMATCH,)
            embedder.is_swapped = False
            assert guard.probe().flags == ()

    def test_another_embedder_is_refused(self) -> None:
        url = self.url(f"index_{next(_names)}")
        build(url).close()
        with pytest.raises(ConfigurationError, match="embedder"):
            open_index(url, embedder=WordHashEmbedder(dimension=32))

    def test_candidates_have_a_folders_signals(self) -> None:
        """All passages are candidates, so that words are as rare among them as in the index."""
        options: Any = {"embedder": WordTokenEmbedder(), "signals": "full"}
        others = [replace(PASSAGES[0], text="Umbrellas. A fox runs by."), *PASSAGES[2:]]
        with self.built(**options) as built:
            for passages in (PASSAGES, others):
                built.update(passages)
                folder = HybridRetriever.build(passages, **options)
                for query in ("kettles and ladders", "A passage of rivers. Foxes", "unheard"):
                    own, found = [each.retrieve(query, depth=50) for each in (folder, built)]
                    assert not found.failures
                    assert found.kind is ScoreKind.LOGIT
                    assert list(found.signals) == list(own.signals)
                    same = [own.passage_ids.index(each) for each in found.passage_ids]
                    for name in own.signals if self.scores_as_a_folder else EXACT:
                        values = own.signals[name][same]
                        assert found.signals[name] == pytest.approx(values, abs=1e-5, nan_ok=True)
                    if self.scores_as_a_folder:
                        assert list(found.scores) == pytest.approx(list(own.scores), abs=1e-5)
            alone = built.on_route(Route.LEXICAL).retrieve("kettles and ladders", depth=50)
            assert set(alone.signals) == set(NAMES) - {"match", "vector_match"}

    def test_two_indexes_do_not_meet(self) -> None:
        with self.built(PASSAGES[:6]) as first, self.built(PASSAGES[6:]) as second:
            first_ids = set(first.retrieve("violins and foxes", depth=50).passage_ids)
            second_ids = set(second.retrieve("violins and foxes", depth=50).passage_ids)
            assert first_ids == {each.passage_id for each in PASSAGES[:6]}
            assert second_ids == {each.passage_id for each in PASSAGES[6:]}

    def test_legs_score_as_a_folders(self) -> None:
        folder = HybridRetriever.build(PASSAGES, embedder=WordHashEmbedder(), signals="none")
        with self.built() as built:
            for route, factor in ((Route.DENSE, 1.0), (Route.LEXICAL, self.bm25_factor)):
                for query in ("kettles and ladders", "foxes foxes number3", "violins"):
                    own, found = [
                        scores_by_id(each.on_route(route).retrieve(query, depth=50))
                        for each in (folder, built)
                    ]
                    own = {name: factor * score for name, score in own.items()}
                    assert found == pytest.approx(own, abs=1e-5)

    def test_passages_come_back_whole(self) -> None:
        odd = Passage(
            "größe/東京 #1",
            "Tokyo:\t東京タワー 🗼 \"quoted\" 'single' \\ back\nslash",
            "Título",
            {"n": 1, "f": 1.5, "nested": {"a": [None, True]}, "text": "ü\u2028"},
        )
        with self.built([*PASSAGES, odd]) as built:
            assert built.passage(odd.passage_id) == odd
            found = built.retrieve("Tokyo", depth=1)
            assert found.passages[0] == odd
            with pytest.raises(KeyError):
                built.passage("absent")

    def test_filters_are_exact_and_come_first(self) -> None:
        with self.built() as built:
            for where in (
                Where(tenant="a"),
                Where(level=[1, 2], open=True),
                Where(groups=["foxes", "cameras"], tenant=["a", "b"]),
            ):
                ranking = built.retrieve("foxes by rivers", depth=50, where=where)
                allowed = {each.passage_id for each in PASSAGES if where.allows(each.metadata)}
                assert set(ranking.passage_ids) == allowed
                few = built.retrieve("foxes by rivers", depth=2, where=where)
                assert len(few) == min(2, len(allowed))
            for where in (Where(level="1"), Where(level=True), Where(groups=[]), Where(no="a")):
                assert len(built.retrieve("foxes", depth=50, where=where)) == 0

    def test_a_long_value_is_compared_whole(self) -> None:
        long = "x" * 500
        passages = [
            replace(PASSAGES[0], metadata={"tenant": f"{long}a"}),
            replace(PASSAGES[1], metadata={"tenant": f"{long}b"}),
        ]
        with self.built(passages) as built:
            found = built.retrieve("foxes", depth=5, where=Where(tenant=f"{long}b"))
            assert found.passage_ids == (PASSAGES[1].passage_id,)

    def test_update_writes_only_changes(self) -> None:
        embedder = CountingEmbedder()
        with self.built(embedder=embedder) as built:
            assert embedder.encoded == len(PASSAGES)
            changed = [
                replace(PASSAGES[0], text="Quite another text of umbrellas."),
                replace(PASSAGES[1], metadata={"tenant": "moved"}),
                *PASSAGES[3:],
                Passage("new", "A new passage of umbrellas."),
            ]
            embedder.encoded = 0
            done = built.update(changed)
            assert (done.added, done.changed, done.deleted) == (1, 2, 1)
            assert embedder.encoded == done.encoded == 3
            found = built.retrieve("umbrellas", depth=2)
            assert set(found.passage_ids) == {PASSAGES[0].passage_id, "new"}
            moved = built.retrieve("foxes", depth=5, where=Where(tenant="moved"))
            assert moved.passage_ids == (PASSAGES[1].passage_id,)
            assert PASSAGES[2].passage_id not in built.retrieve("foxes", depth=50).passage_ids
            assert built.update(changed).unchanged == len(changed)

    def test_what_is_deleted_is_gone(self) -> None:
        with self.built() as built:
            ids = [each.passage_id for each in PASSAGES[:3]]
            assert (built.delete([*ids, "absent"]), len(built)) == (3, len(PASSAGES) - 3)
            assert not built.known_ids(ids)
            assert not set(ids) & set(built.retrieve("foxes", depth=50).passage_ids)

    def test_update_finishes_an_interrupted_build(self) -> None:
        class Stopping(WordHashEmbedder):
            def encode_passages(self, texts: Sequence[str], progress: Any = None) -> Any:
                raise OSError("the machine was stopped")

        url = self.url(f"index_{next(_names)}")
        with pytest.raises(OSError, match="stopped"):
            build(url, embedder=Stopping())
        with open_index(url) as opened:
            assert len(opened.retrieve("foxes", depth=5)) == 0
            assert (opened.upsert(PASSAGES).added, len(opened)) == (len(PASSAGES), len(PASSAGES))

    def test_sketch_is_of_the_corpus(self) -> None:
        """Of its smallest digests, where there are more passages than a sketch has."""
        with self.built() as built, pytest.MonkeyPatch.context() as patch:
            for size in (corpus_sketch.SKETCH_SIZE, 5):
                for module in (corpus_sketch, retriever):
                    patch.setattr(module, "SKETCH_SIZE", size)
                assert built.corpus_sketch() == CorpusSketch.of(map(passage_digest, PASSAGES))
            built.delete([PASSAGES[0].passage_id])
            assert built.corpus_sketch() == CorpusSketch.of(map(passage_digest, PASSAGES[1:]))

    def test_ids_that_are_there_are_known(self) -> None:
        chunks = [Passage("whole#1", "first part"), Passage("whole#2", "second part")]
        with self.built([*PASSAGES, *chunks]) as built:
            asked = ["whole", "whole#2", PASSAGES[0].passage_id, "absent"]
            assert built.known_ids(asked) == {"whole#2", PASSAGES[0].passage_id}
            stored = {each.passage_id: each for each in built.stored_passages()}
            assert stored == {each.passage_id: each for each in (*PASSAGES, *chunks)}
            assert built.labelled_ids(asked) == {"whole", "whole#2", PASSAGES[0].passage_id}

    def test_vector_of_other_length_is_refused(self) -> None:
        with self.built() as built, pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
            built.retrieve("fox", query_vector=np.ones(3, np.float32))

    def test_metadata_must_be_json(self) -> None:
        with pytest.raises(DataError, match="p1"):
            self.built([Passage("p1", "text", metadata={"when": object()})])
