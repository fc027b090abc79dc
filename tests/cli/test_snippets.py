"""The stretch of a text around a query's terms."""

from hypothesis import given
from hypothesis import strategies as st

from ctxguard.cli._snippets import snippet
from ctxguard.retrieval.analysers import analyser_for

analyse = analyser_for("en").analyse
FILLER = "nothing to see here today, " * 40


def test_the_terms_are_in_it_and_bold() -> None:
    text = f"{FILLER}open a JSON file and decode it. {FILLER}"
    found = snippet(text, "decode json", analyse, 60)
    shown = found.plain
    assert "JSON file and decode" in shown
    assert shown.startswith("… ")
    assert shown.endswith("…")
    assert [shown[span.start : span.end] for span in found.spans] == ["JSON", "decode"]


def test_the_stretch_with_most_different_terms_is_taken_or_the_beginning_or_all() -> None:
    text = f"json json json {FILLER} parse a json string {FILLER}"
    assert "parse a json string" in snippet(text, "parse json string", analyse, 50).plain
    shown = snippet(FILLER, "zebra", analyse, 30).plain
    assert (shown[:14], shown[-1]) == ("nothing to see", "…")
    for short, whole in (("a JSON file",) * 2, ("",) * 2, ("a\x1b]0;x\x07 b\u202e", "a]0;x b")):
        assert snippet(short, "json", analyse, 60).plain == whole


def test_a_script_without_spaces_is_cut_between_its_characters() -> None:
    cjk = analyser_for("cjk").analyse
    shown = snippet("我喜欢学习演奏小提琴的方法，每天练习。" * 5, "小提琴", cjk, 24)
    assert "小提琴" in shown.plain
    assert len(shown.plain) <= 24


@given(
    st.text(st.sampled_from("ab c.\n\x1b小"), max_size=300),
    st.text(st.sampled_from("ab c"), max_size=10),
    st.integers(min_value=8, max_value=120),
)
def test_it_is_never_wider_and_holds_no_control_character(
    text: str, query: str, width: int
) -> None:
    shown = snippet(text, query, analyse, width).plain
    assert len(shown) <= width
    assert shown.isprintable()


def test_a_long_text_is_searched_up_to_a_limit() -> None:
    assert snippet("word " * 100_000 + "needle", "needle", analyse, 60).plain.endswith("…")
