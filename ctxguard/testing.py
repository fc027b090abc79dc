"""Public fakes and contract suites, for the tests of ctxguard and of what is built on it."""

# ruff: noqa: S101  a contract suite asserts

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ctxguard.monitor.judges import Judge
from ctxguard.retrieval.analysis import analyse
from ctxguard.retrieval.protocols import Float32Array, LexicalIndex, Progress
from ctxguard.types import Passage


class WordHashEmbedder:
    """An embedder without a model: each word adds a direction that its hash chooses.

    Texts that share words are near each other; a text without words has the zero vector.

    Args:
        dimension: Length of a vector.
        salt: Another salt is another model.
    """

    def __init__(self, dimension: int = 64, salt: str = "") -> None:
        self.name = "word-hash"
        self.dimension = dimension
        self._salt = salt

    def encode_query(self, text: str) -> Float32Array:
        """One unit vector, shape (dimension,)."""
        vector = np.zeros(self.dimension, np.float32)
        for word in analyse(text):
            seed = hashlib.sha256((self._salt + word).encode()).digest()
            rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
            vector += rng.standard_normal(self.dimension, dtype=np.float32)
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if length > 0.0 else vector

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """One unit vector per text, shape (n, dimension)."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self.encode_query(text)
            if progress is not None:
                progress(row + 1)
        return vectors

    def fingerprint(self) -> str:
        """What the vectors depend on."""
        return f"word-hash {self.dimension} {self._salt}"


class LexicalContract(ABC):
    """What every lexical index does. Inherit in a test module, as ``class TestMine``."""

    @abstractmethod
    def build(self, texts: Sequence[str]) -> LexicalIndex:
        """Index the texts, one per row."""

    @abstractmethod
    def load(self, folder: Path) -> LexicalIndex:
        """Read what the index saved."""

    TEXTS = (
        "the red fox jumps over the dog",
        "a red, red rose",
        "the dog sleeps",
        "nothing of interest here",
        "a red, red rose",
        "wait_for a task",
        "clouds over hills",
        "snow on roads",
        "rain in autumn",
    )

    def test_the_best_match_comes_first_and_passages_without_a_match_stay_out(self) -> None:
        hits = self.build(self.TEXTS).search("red rose", 10)
        assert hits.rows.tolist()[:2] == [1, 4]
        assert set(hits.rows.tolist()) == {0, 1, 4}
        assert (hits.scores > 0.0).all()
        assert (np.diff(hits.scores) <= 0.0).all()

    def test_ties_are_broken_by_row(self) -> None:
        assert self.build(self.TEXTS).search("rose", 1).rows.tolist() == [1]

    def test_many_ties_at_the_cut_keep_the_lowest_rows(self) -> None:
        index = self.build(["apple pie"] * 50 + ["pear"] * 80)
        assert index.search("apple", 7).rows.tolist() == list(range(7))

    def test_every_row_has_a_score_and_the_hits_have_theirs(self) -> None:
        hits = self.build(self.TEXTS).search("red dog", 2)
        assert hits.every.shape == (len(self.TEXTS),)
        assert hits.every[hits.rows].tolist() == hits.scores.tolist()
        assert hits.every[3] == 0.0

    def test_a_query_of_unknown_words_finds_nothing(self) -> None:
        hits = self.build(self.TEXTS).search("zebra quagga", 5)
        assert hits.rows.size == hits.scores.size == 0
        assert not hits.every.any()

    def test_a_query_of_stop_words_and_signs_finds_nothing(self) -> None:
        assert self.build(self.TEXTS).search("the of !? \U0001f98a", 5).rows.size == 0

    def test_k_may_exceed_the_corpus(self) -> None:
        assert self.build(self.TEXTS).search("red", 1000).rows.size == 3

    def test_no_score_is_negative_where_every_passage_has_the_word(self) -> None:
        hits = self.build(["common word", "common thing", "common place"]).search("common", 3)
        assert (hits.every >= 0.0).all()

    def test_an_identifier_is_found_by_name_and_by_its_words(self) -> None:
        index = self.build(self.TEXTS)
        assert index.search("wait_for", 1).rows.tolist() == [5]
        assert index.search("wait", 1).rows.tolist() == [5]

    def test_passages_without_words_do_no_harm(self) -> None:
        index = self.build(["", "...", "a word here", "other words there"])
        assert index.search("word", 4).rows.tolist() == [2]

    def test_an_index_of_no_words_and_an_index_of_nothing_find_nothing(self) -> None:
        assert self.build(["...", ""]).search("word", 3).rows.size == 0
        assert self.build([]).search("word", 3).rows.size == 0
        assert len(self.build([])) == 0

    def test_a_saved_index_answers_as_before(self, tmp_path: Path) -> None:
        index = self.build(self.TEXTS)
        index.save(tmp_path)
        loaded = self.load(tmp_path)
        assert len(loaded) == len(index) == len(self.TEXTS)
        assert loaded.fingerprint == index.fingerprint
        for query in ("red rose", "dog", "wait_for", "zebra"):
            assert loaded.search(query, 4).rows.tolist() == index.search(query, 4).rows.tolist()
            assert loaded.search(query, 4).every.tolist() == index.search(query, 4).every.tolist()

    def test_an_index_without_words_can_be_saved(self, tmp_path: Path) -> None:
        self.build(["..."]).save(tmp_path)
        assert self.load(tmp_path).search("word", 3).rows.size == 0

    def test_files_are_named_for_the_leg_and_hold_no_pickle(self, tmp_path: Path) -> None:
        self.build(self.TEXTS).save(tmp_path)
        names = sorted(file.name for file in tmp_path.iterdir())
        assert names
        assert all(name.startswith("lexical") for name in names)
        assert {Path(name).suffix for name in names} <= {".npy", ".json"}
        for name in names:
            if name.endswith(".npy"):
                np.load(tmp_path / name, allow_pickle=False)


class JudgeContract(ABC):
    """What every judge does. Inherit in a test module, as ``class TestMine``."""

    QUERY = "How long does a red fox live?"
    RELEVANT = Passage("relevant", "A red fox lives three years in the wild.", "Red fox")
    IRRELEVANT = Passage("irrelevant", "The kettle boils water within minutes.", "Kettle")
    AWKWARD = (
        Passage("empty", ""),
        Passage("white", " \n\t"),
        Passage("surrogate", "half a pair: \ud800"),
        Passage("hidden", "a\x00b\u202ec\u200bd"),
        Passage("fences", '</passage> </query> {text} {{ }} %s \\ " \n```'),
        Passage("long", "water and kettles " * 5000),
        Passage("", "without an id"),
    )

    @abstractmethod
    def judge(self) -> Judge:
        """A judge that can tell ``RELEVANT`` from ``IRRELEVANT`` for ``QUERY``."""

    def test_a_relevant_passage_is_graded_above_an_irrelevant_one(self) -> None:
        relevant, irrelevant = self.judge().judge(self.QUERY, [self.RELEVANT, self.IRRELEVANT])
        assert relevant is not None
        assert irrelevant is not None
        assert relevant.grade > irrelevant.grade == 0

    def test_verdicts_come_in_the_order_of_the_passages_and_bear_their_ids(self) -> None:
        judge = self.judge()
        passages = [self.RELEVANT, self.IRRELEVANT, self.RELEVANT]
        verdicts = judge.judge(self.QUERY, passages)
        assert [verdict and verdict.passage_id for verdict in verdicts] == [
            passage.passage_id for passage in passages
        ]
        assert list(judge.judge(self.QUERY, passages[1::-1])) == list(verdicts[1::-1])

    def test_a_verdict_does_not_depend_on_the_passages_beside_it(self) -> None:
        judge = self.judge()
        together = judge.judge(self.QUERY, [self.IRRELEVANT] * 3 + [self.RELEVANT])
        assert together[3] == judge.judge(self.QUERY, [self.RELEVANT])[0]

    def test_no_passages_get_no_verdicts(self) -> None:
        assert list(self.judge().judge(self.QUERY, [])) == []

    def test_grades_are_whole_numbers_up_to_the_highest(self) -> None:
        judge = self.judge()
        assert judge.max_grade >= 1
        for verdict in judge.judge(self.QUERY, [self.RELEVANT, self.IRRELEVANT, *self.AWKWARD]):
            assert verdict is None or type(verdict.grade) is int
            assert verdict is None or 0 <= verdict.grade <= judge.max_grade

    def test_an_awkward_passage_costs_at_most_its_own_verdict(self) -> None:
        judge = self.judge()
        alone = judge.judge(self.QUERY, [self.RELEVANT])[0]
        for awkward in self.AWKWARD:
            verdicts = judge.judge(self.QUERY, [self.RELEVANT, awkward, self.RELEVANT])
            assert len(verdicts) == 3
            assert verdicts[0] == verdicts[2] == alone

    def test_an_awkward_query_raises_nothing(self) -> None:
        for query in ("", " ", "half a pair: \ud800", "</query> {title}", "fox " * 2000):
            assert len(self.judge().judge(query, [self.RELEVANT])) == 1

    def test_name_and_version_are_said_and_stay(self) -> None:
        judge = self.judge()
        pinned = (judge.name, judge.version)
        assert all(pinned)
        judge.judge(self.QUERY, [self.RELEVANT])
        assert (judge.name, judge.version) == pinned
        assert self.judge().version == judge.version

    def test_many_threads_may_ask_at_once(self) -> None:
        judge = self.judge()
        passages = [self.RELEVANT, self.IRRELEVANT]
        alone = list(judge.judge(self.QUERY, passages))
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(judge.judge, self.QUERY, passages) for _ in range(8)]
        assert all(list(verdicts.result()) == alone for verdicts in asked)
