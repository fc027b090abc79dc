"""Chunks of tables and code, which keep their header and fence."""

import json

import pytest

from ctxguard.retrieval.chunks import PassageWindow

pytest.importorskip("semantic_text_splitter")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def window() -> PassageWindow:
    """A window of 40 words and signs."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return PassageWindow(json.dumps(tokenizer), 40)


ROWS = [f"| kettle {n} | {n} francs |" for n in range(30)]
HEADER = "| name | price |\n| --- | --- |"
CODE = [f"value_{n} = compute({n})" for n in range(30)]


def test_table_parts_have_their_header(window: PassageWindow) -> None:
    chunks = window.split("\n".join([HEADER, *ROWS]))
    assert len(chunks) > 3
    assert all(chunk.startswith(HEADER) for chunk in chunks)
    assert [row for chunk in chunks for row in chunk.split("\n")[2:]] == ROWS
    assert not any(window.is_longer(chunk) for chunk in chunks)


@pytest.mark.parametrize("fence", ["```", "~~~~"])
@pytest.mark.parametrize("end", [True, False])
def test_code_parts_have_their_fence(fence: str, end: bool, window: PassageWindow) -> None:
    chunks = window.split("\n".join([f"{fence}python", *CODE, *([fence] if end else [])]))
    assert len(chunks) > 3
    assert all(chunk.startswith(f"{fence}python\n") for chunk in chunks)
    assert all(chunk.endswith(f"\n{fence}") for chunk in chunks)
    assert [line for chunk in chunks for line in chunk.split("\n")[1:-1]] == CODE


def test_what_stands_around_is_kept(window: PassageWindow) -> None:
    text = "\n".join(
        ["Before.", "", HEADER, *ROWS, "", "Between.", "", "```", *CODE, "```", "", "After."]
    )
    joined = "\n".join(window.split(text))
    assert all(each in joined for each in ("Before.", "Between.", "After.", *ROWS, *CODE))


def test_overlong_row_is_split(window: PassageWindow) -> None:
    long = "| " + " ".join(f"word{n}" for n in range(100)) + " | x |"
    chunks = window.split(f"{HEADER}\n{long}\n{ROWS[0]}")
    assert all(f"word{n}" in " ".join(chunks) for n in range(100))
    assert not any(window.is_longer(chunk) for chunk in chunks)


def test_overlong_header_is_not_repeated(window: PassageWindow) -> None:
    header = "| " + " | ".join(f"column{n}" for n in range(30)) + " |\n|" + " --- |" * 30
    chunks = window.split(f"{header}\n| " + " | ".join("x" * 30) + " |")
    assert sum("column3 " in chunk for chunk in chunks) == 1


@pytest.mark.parametrize("text", ["a | b", "a ``` b", "| a |\ntext", "---\n| - |"])
def test_lookalike_lines_are_text(text: str, window: PassageWindow) -> None:
    words = " ".join(f"word{n}" for n in range(60))
    assert len(window.split(f"{text}\n{words}")) < 5


@pytest.mark.parametrize("n_words", [1, 40, 41, 10_000])
def test_longer_is_told_from_the_beginning(n_words: int, window: PassageWindow) -> None:
    assert window.is_longer("word " * n_words) == (n_words > 40)
    assert window.is_longer(" " * 100_000 + "word " * n_words) == (n_words > 40)
