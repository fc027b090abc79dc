"""Copies: texts that are equal but for Unicode form, case and white space."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core import passages
from ctxguard.core.decision import Decision, decide
from ctxguard.core.passages import copies_of
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DropReason, Hit, Ranking, ScoreKind, Threshold

LONG = "The quick brown fox jumps over the lazy dog. " * 10


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("same", "same"),
        ("Up to 40 °C.", "up  to\n40 °C. "),
        ("Café", "Cafe\u0301"),
        ("ｆｕｌｌ ｗｉｄｔｈ", "Full Width"),
        ("Straße", "STRASSE"),
        ("ệ", "ê\u0323"),
        ("다람쥐", unicodedata.normalize("NFD", "다람쥐")),
        (LONG, " \n" * 200 + LONG.upper().replace(" ", "\u00a0 ")),
        ("─" * 60, "─" * 60 + "\n"),
        ("x" * 200_000, "x" * 200_000),
    ],
)
def test_form_case_and_space_are_ignored(text: str, copy: str) -> None:
    assert copies_of([text, "another", copy]) == {2: 0}


@given(
    st.lists(
        st.text("aB \n\x1c\0zé", min_size=16, max_size=24).map(lambda end: "letter " * 3 + end)
        | st.text("aB \né", max_size=60)
        | st.text(st.characters(codec="ascii"), max_size=30),
        max_size=8,
    )
)
def test_each_copy_names_the_first(texts: list[str]) -> None:
    first: dict[str, int] = {}
    expected = {}
    for at, text in enumerate(texts):
        words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        if words and first.setdefault(words, at) != at:
            expected[at] = first[words]
    assert copies_of(texts) == expected


@pytest.mark.parametrize(
    ("text", "other"), [("one two", "onetwo"), ("1", "2"), (LONG, LONG + "More."), ("a", "á")]
)
def test_other_texts_are_no_copies(text: str, other: str) -> None:
    assert copies_of([text, other]) == {}


def test_texts_without_words_are_no_copies() -> None:
    assert copies_of(["", "", " ", "\n", " "]) == {}


def test_a_null_character_ends_no_text() -> None:
    long = "a text of some length"
    assert copies_of([f"{long}\0 and {long}", f"{long}\0 and  {long.upper()}"]) == {1: 0}


def test_expanding_letters_and_marks_stay_linear() -> None:
    """``unicodedata.normalize`` alone would take minutes."""
    piled = ["a" + "\u0301\u0323" * 500_000 + f"{n} the same end of both texts" for n in range(2)]
    many = ["\ufdfa" * 90_000 + f"{n} the same end of both texts" for n in range(2)]
    assert copies_of([*piled, *many]) == {}


def decided(copies: dict[int, int], **settings: float) -> Decision:
    hits = [Hit(f"p{at}", score) for at, score in enumerate([0.9, 0.9, 0.8, 0.1, 0.05])]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
    ranking = Ranking(ranking.passage_ids, ranking.scores, ranking.kind, [], copies=copies)
    return decide(ranking, RatioPolicy(**settings))


def test_copies_take_no_place_in_k() -> None:
    decision = decided({1: 0}, k=2)
    assert decision.kept_ids == ("p0", "p2")
    assert decision.dropped_by_reason == {DropReason.DUPLICATE_TEXT: 1, DropReason.BEYOND_K: 2}


def test_copy_shares_the_better_ones_decision() -> None:
    *_, second, worst = decided({1: 0, 4: 0}, k=5).decisions
    for copy in (second, worst):
        assert (copy.rank, copy.relative_score) == (None, 1.0)
        assert copy.reason is DropReason.DUPLICATE_TEXT
        assert copy.kept_if == (Threshold("drop_duplicates", 0.0),)


def test_best_of_copies_is_kept_anywhere() -> None:
    assert decided({2: 4}, k=5).kept_ids == ("p0", "p1", "p2", "p3")


def test_only_so_many_characters_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts after them count as copies of exactly the same text alone; ASCII costs little."""
    monkeypatch.setattr(passages, "_MOST_FOLDED", 9)
    assert copies_of(["Café", "café", "Thé", "thé", "thé", "TEA", "tea"]) == {1: 0, 4: 3, 6: 5}
