"""Markdown cut at its headings, as a person reads it."""

from collections import Counter

import pytest

from calibration.data.documents.markdown import read_markdown, without_data

BASE64 = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"


def headings(text: str) -> list[tuple[str, ...]]:
    return [above for above, _ in read_markdown(text)[1]]


def body(text: str) -> str:
    return "\n".join([own for _, own in read_markdown(text)[1]])


def test_sections_have_the_headings_above_them() -> None:
    text = """Before.
# Kettle
## Cleaning *deeply*
Vinegar.
### With [lemon](x.html)
Lemon.
## Repair
Workshop.
"""
    assert read_markdown(text)[1] == [
        ((), "Before."),
        (("Kettle", "Cleaning deeply"), "Vinegar."),
        (("Kettle", "Cleaning deeply", "With lemon"), "Lemon."),
        (("Kettle", "Repair"), "Workshop."),
    ]


def test_underlined_headings_count() -> None:
    """Rules, tables and lists beside them do not."""
    text = "Kettle\n======\nA\n\n---\nB\n\n| a |\n| - |\n- item\n---\nCare\n---\nC"
    assert headings(text) == [("Kettle",), ("Kettle", "Care")]


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_headings_inside_code_are_code(fence: str) -> None:
    text = f"# A\n{fence}sh\n# none\n<!-- a -->\n``\n{fence}\n# B\nb"
    assert headings(text) == [("A",), ("B",)]
    assert "<!-- a -->" in body(text)


def test_inline_ticks_open_no_code() -> None:
    assert headings("```x``` is code\n# A\na") == [(), ("A",)]


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("C#", "C#"),
        ("F# ##", "F#"),
        ("C++", "C++"),
        ("C #", "C"),
        ("F\\#", "F#"),
        ("MAX_RETRIES", "MAX_RETRIES"),
        ("MAX\\_RETRIES", "MAX_RETRIES"),
        ("`__init__` of *it*", "__init__ of it"),
        ("__init__", "__init__"),
        ("List<String> <b>here</b>", "List<String> here"),
        ("[Kettle](a_(b).html)", "Kettle"),
        ("Q &amp; A {#questions}", "Q & A"),
        ("2 * 3 * 4", "2 * 3 * 4"),
    ],
)
def test_titles_keep_their_signs(heading: str, title: str) -> None:
    assert headings(f"# {heading}\n\ntext") == [(title,)]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("MAX\\_RETRIES", "MAX_RETRIES"),
        ("\\*args and \\[1\\]", "*args and [1]"),
        ("a &lt; b &amp; c", "a < b & c"),
        ("`MAX\\_RETRIES`", "`MAX\\_RETRIES`"),
        ("$\\alpha\\_1$", "$\\alpha\\_1$"),
        ("C:\\Temp\\_x", "C:\\Temp\\_x"),
        ("| a \\| b |", "| a \\| b |"),
        ("```\nMAX\\_RETRIES\n```", "```\nMAX\\_RETRIES\n```"),
    ],
)
def test_escapes_outside_code_are_resolved(written: str, seen: str) -> None:
    assert body(written) == seen


@pytest.mark.parametrize(
    ("front", "title"),
    [
        ("---\ntitle: Kettle care\ntags: [a]\n---\n", "Kettle care"),
        ('---\ntitle: "Care: kettles" # x\n---\n', "Care: kettles"),
        ("---\ntitle: 'It''s hot'\n...\n", "It's hot"),
        ("---\nlist:\n  - a\ntitle: >-\n  Kettle\n  care\n---\n", "Kettle care"),
        ('+++\ntitle = "Kettle"\n+++\n', "Kettle"),
        ("---\nslug: x\n---\n", ""),
    ],
)
def test_front_matter_gives_the_title(front: str, title: str) -> None:
    assert read_markdown(f"{front}Text.") == (title, [((), "Text.")])


def test_leading_rule_is_no_matter() -> None:
    assert "Plain words" in body("---\n\nPlain words, and more.\n\n---\nText.")


def test_comments_are_not_read() -> None:
    """But those in code are, and so is one that does not end."""
    text = "a<!-- x -->b\n<!-- y\n# z\n-->\nc `<!--` d\n[//]: # (e)\n<!-- f"
    assert body(text) == "ab\nc `<!--` d\n<!-- f"


@pytest.mark.parametrize(
    "data",
    [
        f"{BASE64}\n{BASE64}\n{BASE64}",
        f"![x](data:image/png;base64,{BASE64}{BASE64})",
        "key = " + BASE64 * 2,
        "00000000: 4d5a 9000 0300 0000 0400 0000 ffff 0000  MZ......\n" * 2,
        "ab 12 " * 20 + "\n" + "cd 34 " * 20,
        "0123456789abcdef" * 12,
    ],
)
def test_encoded_data_is_left_out(data: str) -> None:
    counts = Counter[str]()
    shown = without_data(f"Before.\n{data}\nAfter.", counts)
    assert "…" in shown
    assert len(shown) < 40
    assert shown.startswith("Before.")
    assert shown.endswith("After.")
    assert counts["lines of encoded data left out"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "sha512 " + "0123456789abcdef" * 8,
        "https://example.com/guides/how-to-descale-a-kettle-with-vinegar-or-lemon/and-then-rinse-it-well",
        "test_what_happens_when_a_very_long_name_of_a_function_is_written_in_snake_case_for_eighty",
        "10 12 15 17 20 22 25 27 30 32 35 37 40 42\n11 13 16 18 21 23 26 28 31 33 36 38 41 43",
        "ACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTACGT",
    ],
)
def test_digests_and_long_words_stay(text: str) -> None:
    assert without_data(text, Counter()) == text
