"""Labels of copies and of chunks; a question itself is no candidate, as in BEIR."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query, unknown_passages
from calibration.evaluate import contexts, measure
from calibration.hard_negatives import mine
from calibration.pools import (
    LabelledPools,
    Pools,
    check_labels_are_found,
    label,
    notes_on_themselves,
)
from calibration.replay import replay
from calibration.retrievers import RankingSource, wrapped
from ctxguard import ContextGuard, Hit, Passage
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Ranking, Route, ScoreKind
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.worth import READERS
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import CHUNK_OF
from tests.doubles import WordHashEmbedder

TEXT = "To clean the kettle, use warm vinegar."
ALIKE = {
    "equal": (TEXT, TEXT),
    "case": (TEXT, TEXT.upper()),
    "white space": (TEXT, f"  {TEXT}\n".replace(" ", "\n")),
    "compatibility form": (TEXT + " ﬁn", TEXT + " fin"),
    "long": (TEXT * 4_000, TEXT * 4_000),
}
QUERY = Query("q", "how do I clean a kettle?")


def answered(hits: Sequence[Hit], qrels: Mapping[str, int], depth: int = 10) -> LabelledPools:
    return label(*replayed(hits, qrels, depth))


def replayed(
    hits: Sequence[Hit], qrels: Mapping[str, int], depth: int = 10, distractors: Sequence[str] = ()
) -> tuple[Pools, Dataset]:
    dataset = Dataset("d", (QUERY,), {"q": qrels}, {"q": dict.fromkeys(distractors, "distractor")})
    source = RankingSource(lambda query, *, depth: hits[:depth], score_kind="ratio")
    source.add_passages([Passage(hit.passage_id, hit.text) for hit in hits])
    return replay(source, [QUERY], depth=depth, labels=dataset), dataset


def hits_of(*texts: str) -> list[Hit]:
    names = "abcdefgh"
    return [Hit(names[at], 1.0 - at / 10, text) for at, text in enumerate(texts)]


class TestLabels:
    @pytest.mark.parametrize("labelled", ["a", "b"])
    @pytest.mark.parametrize("alike", ALIKE)
    def test_of_any_copy_count(self, alike: str, labelled: str) -> None:
        first, second = ALIKE[alike]
        labels = answered(hits_of(first, second, "something else"), {labelled: 1})
        assert labels.retrieved.sum() == 2
        assert labels.grades[0, :2].tolist() == [1, 0]
        assert labels.n_relevant.tolist() == [1]

    @pytest.mark.parametrize("labelled", ["a", "b", "c"])
    def test_unretrieved_copys_label_counts(self, labelled: str) -> None:
        """The text of a labelled passage is looked up."""
        labels = answered(hits_of(TEXT, TEXT, TEXT), {labelled: 1}, depth=1)
        assert (labels.grades[0, 0], labels.n_relevant[0]) == (1, 1)

    def test_the_highest_grade_of_all(self) -> None:
        labels = answered(hits_of("other", TEXT, TEXT, TEXT), {"b": 1, "c": 3, "d": 0})
        assert labels.grades[0, :2].tolist() == [0, 3]
        assert labels.best_grades[0, :2].tolist() == [3, 0]

    def test_relevant_before_misleading(self) -> None:
        pools, dataset = replayed(hits_of(TEXT, TEXT, "b"), {"b": 1}, distractors=["a"])
        labels = label(pools, dataset)
        assert labels.grades[0, 0] == 1
        assert not labels.misleading[0, 0]
        assert mine(pools, dataset)["q"] == []

    def test_texts_without_a_word_are_none(self) -> None:
        assert answered(hits_of("", " ", ""), {"a": 1, "c": 1}).n_relevant.tolist() == [2]

    def test_retrieved_copy_belongs_to_labels(self) -> None:
        pools, dataset = replayed(hits_of(TEXT, TEXT), {"b": 1}, depth=1)
        check_labels_are_found(pools, dataset)

    @pytest.mark.parametrize("labelled", ["one", "two"])
    def test_of_copied_documents(self, labelled: str) -> None:
        """Whole documents are labelled, and their chunks are copies."""
        chunks = [
            Passage(f"{name}#{number}", f"kettle {text}", metadata={CHUNK_OF: name})
            for name in ("one", "two")
            for number, text in enumerate(["vinegar clean", "history"], start=1)
        ]
        retriever = HybridRetriever.build(chunks, embedder=WordHashEmbedder())
        both = Dataset("d", (QUERY,), {"q": {labelled: 1}})
        pools = replay(retriever, [QUERY], depth=1, labels=both)
        assert label(pools, both).grades.tolist() == [[1]]
        both = Dataset("d", (QUERY,), {"q": {"one": 1, "two": 1}})
        pools = replay(retriever, [QUERY], depth=4, labels=both)
        labels = label(pools, both)
        assert (labels.grades.sum(), labels.n_relevant[0], labels.retrieved.sum()) == (1, 1, 2)


class TestPlaces:
    def test_ranking_tells_its_copies(self) -> None:
        """As a sample does, whose texts are not kept."""
        ranking = Ranking("abc", [3.0, 2.0, 1.0], ScoreKind.RATIO, [], copies={0: 1, 2: 1})
        [*_, ids] = replay(lambda query, *, depth: ranking, [QUERY]).passage_ids
        assert ids == ("a",)

    @given(st.lists(st.sampled_from(["one", "ONE", "two", "three", ""]), min_size=1, max_size=8))
    def test_are_those_of_the_served(self, texts: list[str]) -> None:
        """Recall is measured at 2 of the passages that a guard serves, and of their tokens."""
        hits = hits_of(*texts)
        pools, dataset = replayed(hits, {hits[-1].passage_id: 1})
        order, kept = contexts(pools, RatioPolicy(k=2))
        ids = np.array(pools.passage_ids[0])[order[0][: kept[0].sum()]]
        guard = ContextGuard(
            lambda query, *, depth: hits,
            k=2,
            mode="enforce",
            score_kind="ratio",
            telemetry=Telemetry(CollectorRegistry()),
        )
        served = guard.retrieve(QUERY.text).passages
        assert [passage.passage_id for passage in served] == ids.tolist()
        measured = measure(pools, dataset, RatioPolicy(k=2), READERS, baseline_k=2, text_of=str)
        found = any(passage.text.lower() == texts[-1].lower() for passage in served)
        if texts[-1]:
            assert measured["recall"][0] == found


ARGUMENT = "Being vegetarian helps the environment, as farming animals takes much land."
OTHERS = [Hit("b", 0.5, "Plants take land too."), Hit("c", 0.4, "Cows eat grass.")]


def candidates(own: Hit, *, query: str = ARGUMENT, relevant: str = "b") -> tuple[str, ...]:
    dataset = Dataset("d", (Query("a", query),), {"a": {relevant: 1}})
    source = wrapped(
        lambda query, *, depth: [Hit("x", 0.9, "First."), own, *OTHERS], score_kind="cosine"
    )
    pools = replay(source, dataset.queries, labels=dataset)
    assert bool(notes_on_themselves([pools, pools])) is bool(pools.themselves)
    return pools.passage_ids[0]


@pytest.mark.parametrize(
    "own",
    [
        Hit("a", 0.8, ARGUMENT),
        Hit("other", 0.8, ARGUMENT),
        Hit("other", 0.8, ARGUMENT.upper().replace(" ", "\n")),
        Hit("a", 0.8, ARGUMENT.partition(" ")[2], title=ARGUMENT.partition(" ")[0]),
        Hit("a", 0.8, f"{ARGUMENT} Hence it should be encouraged."),
        Hit("a", 0.8),
    ],
    ids=["both", "text", "another form", "title and text", "near text", "id without text"],
)
def test_question_itself_is_left_out(own: Hit) -> None:
    assert candidates(own) == ("x", "b", "c")


@pytest.mark.parametrize(
    ("own", "relevant"),
    [
        (Hit("a", 0.8, "Quite another text under the same number."), "b"),
        (Hit("a", 0.8, ARGUMENT), "a"),
        (Hit("q", 0.8, ARGUMENT), "q"),
        (Hit("other", 0.8), "b"),
    ],
    ids=["an id by chance", "labelled relevant", "a labelled answer", "no text"],
)
def test_answer_is_no_question_itself(own: Hit, relevant: str) -> None:
    assert own.passage_id in candidates(own, relevant=relevant)


def test_questions_themselves_are_said_once() -> None:
    """In the notes of a calibration, whatever the number of questions and routes."""
    texts = [f"argument number {n} about land" for n in range(30)]
    dataset = Dataset(
        "d",
        tuple(Query(f"a{n}", text) for n, text in enumerate(texts)),
        {f"a{n}": {f"a{(n + 1) % 30}": 1} for n in range(30)},
    )

    def search(query: str, *, depth: int) -> list[Hit]:
        first = texts.index(query)
        places = [(first + n) % 30 for n in range(10)]
        return [Hit(f"a{n}", 0.9 - at / 20, texts[n]) for at, n in enumerate(places)]

    made = calibrate(search, dataset, score_kind="cosine")
    said = [note for note in made.profile.provenance.notes if "passages themselves" in note]
    [note] = said
    assert note.endswith("left out of their own candidates as BEIR does: 30, such as 'a0'")
    [evidence] = [outcome.profile.evidence for outcome in made.outcomes.values()]
    assert evidence.metrics["mrr"].value == 1.0


FOX = Query("q", "red fox")


def chunk(document: str, number: int, text: str) -> Passage:
    return Passage(f"{document}#{number}", text, metadata={CHUNK_OF: document})


PASSAGES = (
    chunk("fox", 1, "a brown dog and a red barn and a road"),
    chunk("fox", 2, "red fox"),
    chunk("fox", 3, "a red fox crosses"),
    chunk("dog", 1, "red dog on the road to town"),
    Passage("short", "fox in town"),
    Passage("song#4", "red song that is no chunk of anything at all, and long enough"),
)


@pytest.fixture
def retriever() -> HybridRetriever:
    built = HybridRetriever.build(PASSAGES, embedder=WordHashEmbedder())
    return built.on_route(Route.LEXICAL)


def dataset(**grades: int) -> Dataset:
    qrels = {name.replace("_", "#"): grade for name, grade in grades.items()}
    return Dataset("documents", (FOX,), {"q": qrels})


@pytest.mark.parametrize(
    ("labels", "relevant"),
    [
        # A document's label is that of its best chunk.
        ({"fox": 2, "dog": 1, "short": 1}, {"fox#2": 2, "dog#1": 1, "short": 1}),
        # A chunk's own label comes first.
        ({"fox_2": 1, "fox_3": 1}, {"fox#2": 1, "fox#3": 1}),
        # What only looks like the id of a chunk is none.
        ({"song": 1, "fox": 1}, {"fox#2": 1}),
    ],
)
def test_documents_label_is_best_chunks(
    retriever: HybridRetriever, labels: dict[str, int], relevant: dict[str, int]
) -> None:
    pools = replay(retriever, [FOX], depth=10)
    assert pools.passage_ids[0][0] == "fox#2"
    grades = label(pools, dataset(**labels)).grades[0].tolist()
    found = dict(zip(pools.passage_ids[0], grades, strict=False))
    assert {each: grade for each, grade in found.items() if grade} == relevant


def test_recall_counts_a_document_once(retriever: HybridRetriever) -> None:
    labels = label(replay(retriever, [FOX], depth=10), dataset(fox=1, short=1))
    assert labels.n_relevant.tolist() == [2]
    assert np.count_nonzero(labels.at_stake) == 2


def test_what_is_judged_follows(retriever: HybridRetriever) -> None:
    """Also in a part of the pools."""
    whole, labels = replay(retriever, [FOX], depth=10), dataset(fox=1)
    for pools in (whole, whole.subset(["q"])):
        judged = dict(zip(pools.passage_ids[0], label(pools, labels).judged[0], strict=False))
        assert judged["fox#2"]
        assert not judged["fox#3"]


def test_documents_are_known_to_the_index(retriever: HybridRetriever) -> None:
    assert unknown_passages(dataset(fox=1, short=1, cat=1), retriever.labelled_ids) == ("cat",)
    assert retriever.labelled_ids == {*retriever.passage_ids, "fox", "dog"}


def test_chunkless_pools_are_unchanged() -> None:
    retriever = HybridRetriever.build([Passage("a", "red")], embedder=WordHashEmbedder())
    assert replay(retriever, [FOX], depth=3).documents == ()
