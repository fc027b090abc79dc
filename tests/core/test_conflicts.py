"""Conflicts: which pairs of passages contradict each other, and which only look as if they did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.conflicts import MAX_CHARS, MAX_PASSAGES, find_conflicts

PAGE = (
    "Pilzno is a town in the county of {county}, on the left bank of the river Wisloka. The parish "
    "was founded in {founded}, and the town hall was designed by {architect} two centuries later. "
    "At the last census its population was {population}, most of them employed in the town itself."
)
FACTS = {"county": "Debica", "founded": "1328", "architect": "Jan Kowalski", "population": "4,411"}


def page(**changed: str) -> str:
    return PAGE.format(**FACTS | changed)


def values(one: str, other: str, query: str = "") -> list[tuple[str, str]]:
    """What the two texts say where they differ; empty if they do not contradict each other."""
    return [
        (difference.first.text, difference.second.text)
        for conflict in find_conflicts(query, [one, other])
        for difference in conflict.differences
    ]


@pytest.mark.parametrize(
    ("fact", "value"),
    [("population", "9,650"), ("founded", "12 May 1402"), ("architect", "Piotr Aigner")],
)
def test_near_copies_that_differ_in_a_number_a_date_or_a_name_conflict(
    fact: str, value: str
) -> None:
    assert values(page(), page(**{fact: value})) == [(FACTS[fact], value)]


def test_every_difference_is_named_in_the_order_of_the_text() -> None:
    found = values(page(), page(founded="1402", population="9,650"))
    assert found == [("1328", "1402"), ("4,411", "9,650")]


def test_a_part_of_a_long_page_conflicts_with_its_altered_copy_elsewhere() -> None:
    before, after = (" ".join(prefix + chr(97 + n) for n in range(26)) for prefix in "xy")
    found = values(f"{page()} {after}", f"{before} {page(population='9,650')}")
    assert found == [("4,411", "9,650")]


def test_spans_are_positions_in_the_text_as_it_is_written() -> None:
    texts = ["Beiſspiel İ. " + page(), "other words", page(population="9,650")]
    [conflict] = find_conflicts("", texts)
    assert (conflict.first, conflict.second) == (1, 3)
    for difference in conflict.differences:
        for span, text in zip(difference, (texts[0], texts[2]), strict=True):
            assert text[span.start : span.end] == span.text


def test_two_numbers_stated_for_the_same_word_of_the_query_conflict() -> None:
    query = "population of Pilzno in Poland"
    one = "Pilzno (Poland). Population: 4,411. Area: 16 km2."
    other = "The small town of Pilzno in southern Poland has a population of 9,650, says the mayor."
    assert values(one, other, query) == [("4,411", "9,650")]
    # Neither does where one of them has both numbers, or is about something else.
    assert values(one, f"{other} It was 4,411 then.", query) == []
    assert values(one, "The district has a population of 9,650, says the mayor.", query) == []


@pytest.mark.parametrize(
    ("before", "one", "other"),
    [
        ("This page was last edited on", "11 April 2024", "3 May 2021"),
        ("Retrieved", "2021-04-03", "2024-05-06"),
        ("This is the handbook of version", "2.1", "3.0"),
        ("It describes the release", "1.20.3", "2.0.1"),
        ("as the county says", "[3]", "[17]"),
        ("\n", "3. ", "14. "),
        ("The distance to Debica is about", "20 km", "20.4 km"),
        ("The population in thousands is about", "4,411", "4411"),
        ("the bridge of Saint", "Nicolas", "Nicholas"),
        ("whose", "centre", "center"),
    ],
)
def test_page_dates_numbering_versions_rounding_and_spelling_are_no_conflict(
    before: str, one: str, other: str
) -> None:
    assert (
        values(
            f"{page()} {before} {one} and {page()[:60]}",
            f"{page()} {before} {other} and {page()[:60]}",
        )
        == []
    )


def test_a_paragraph_of_two_towns_by_one_template_is_no_conflict() -> None:
    template = "{} is a village in {} County. As of the census of 2010 its population was {}."
    texts = [template.format(*each) for each in (("Alden", "Polk", "310"), ("Byron", "Lee", "977"))]
    assert find_conflicts("where is Alden", texts) == ()


def test_equal_passages_and_passages_without_words_are_no_conflict() -> None:
    assert find_conflicts("", [page(), page(), "", "\n", "..."]) == ()


def test_only_the_beginning_of_the_first_passages_is_compared() -> None:
    late = "x " * MAX_CHARS + page(population="9,650")
    others = [f"passage {n}" for n in range(MAX_PASSAGES)]
    assert find_conflicts("", [page(), late]) == ()
    assert find_conflicts("", [page(), *others, page(population="9,650")]) == ()


WORDS = st.sampled_from(
    ["Pilzno", "town", "4,411", "9,650", "was", "\n", "[3]", "١٢", "ſ", "İ", "."]
)


@given(st.text(max_size=30), st.lists(st.lists(WORDS, max_size=60).map(" ".join), max_size=6))
def test_any_texts_are_compared_without_an_error(query: str, texts: list[str]) -> None:
    for conflict in find_conflicts(query, texts):
        assert 1 <= conflict.first < conflict.second <= len(texts)
        assert 1 <= len(conflict.differences) <= 5
        for difference in conflict.differences:
            for at, span in zip((conflict.first, conflict.second), difference, strict=True):
                assert texts[at - 1][span.start : span.end] == span.text != ""
