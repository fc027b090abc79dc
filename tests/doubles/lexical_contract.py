"""The contract of every lexical index, as a suite that an index's tests inherit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ctxguard.retrieval.index.lexical import Bm25sIndex


class LexicalContract(ABC):
    """The contract of every lexical index. Inherit in a test module, as ``class TestMine``."""

    @abstractmethod
    def build(self, texts: Sequence[str]) -> Bm25sIndex:
        """Index the texts, one per row."""

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
        assert hits.all_scores.shape == (len(self.TEXTS),)
        assert hits.all_scores[hits.rows].tolist() == hits.scores.tolist()
        assert hits.all_scores[3] == 0.0

    def test_a_query_of_unknown_words_finds_nothing(self) -> None:
        hits = self.build(self.TEXTS).search("zebra quagga", 5)
        assert hits.rows.size == hits.scores.size == 0
        assert not hits.all_scores.any()

    def test_a_query_of_stop_words_and_signs_finds_nothing(self) -> None:
        assert self.build(self.TEXTS).search("the of !? \U0001f98a", 5).rows.size == 0

    def test_k_may_exceed_the_corpus(self) -> None:
        assert self.build(self.TEXTS).search("red", 1000).rows.size == 3

    def test_no_score_is_negative_where_every_passage_has_the_word(self) -> None:
        hits = self.build(["common word", "common thing", "common place"]).search("common", 3)
        assert (hits.all_scores >= 0.0).all()

    def test_an_identifier_is_found_by_name_and_by_its_words(self) -> None:
        index = self.build(self.TEXTS)
        assert index.search("wait_for", 1).rows.tolist() == [5]
        assert index.search("wait", 1).rows.tolist() == [5]

    def test_passages_without_words_do_no_harm(self) -> None:
        index = self.build(["", "...", "a word here", "other things there"])
        assert index.search("word", 4).rows.tolist() == [2]

    def test_an_index_of_no_words_and_an_index_of_nothing_find_nothing(self) -> None:
        assert self.build(["...", ""]).search("word", 3).rows.size == 0
        assert self.build([]).search("word", 3).rows.size == 0
        assert len(self.build([])) == 0
