"""Runs what a page of docs/integrations/ shows."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SMALL_MODEL = {
    "ctxguard.retrieval.models.embedder import": "tests.doubles import WordHashEmbedder as",
    "size=384": "size=64",
}
"""Replaces the model of a page by one of a few lines, with shorter vectors."""

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "integrations"


def ran(name: str, replaced: Mapping[str, str] | None = None, **given: Any) -> dict[str, Any]:
    """The names that the snippets of a page leave behind, with ``given`` before them.

    The test is skipped where a library that they import is absent.

    Args:
        name: The page's.
        replaced: What stands in the text in the place of other texts, such as of a server's URL.
        given: Names that the snippets use.
    """
    page = FOLDER / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    for shown, own in (replaced or {}).items():
        text = text.replace(shown, own)
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert snippets
    for module in re.findall(
        r"^(?:from|import) (?!ctxguard)(\w+)", "".join(snippets), re.MULTILINE
    ):
        pytest.importorskip(module)
    names: dict[str, Any] = {"__name__": "snippet", **given}
    for code in snippets:
        exec(compile(code, str(page), "exec"), names)  # noqa: S102
    return names
