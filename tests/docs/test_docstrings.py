"""Docstrings begin with a verb: at most 8% of a room's functions open with a noun phrase.

Properties are nouns, as attributes are, and the docstring of a command's call is its help.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 0.08

_WORDS = (
    "a after age all alarms an and as at both bounds by bytes candidates columns copies "
    "deciles distances each evidence every expected few for from gain how if in it its itself "
    "labels leaner length log-odds lower many mean names no notes nothing of on one only or "
    "p-value pairs passages payloads pieces positions probabilities profiles queries rates "
    "recall recorded replies requests rows samples several shape share shares sizes some "
    "texts that the these this those today today's upper utilities values verdicts ways "
    "weights what when where whether which who whole whose why with without words"
)
NO_VERBS = frozenset(_WORDS.split())
"""First words of a phrase that names a thing."""


def opening_words(file: Path) -> Iterator[str]:
    """Yield the first word of each function's docstring."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        of_property = any("property" in ast.unparse(each) for each in node.decorator_list)
        of_command = node.name == "__call__" and "cli" in file.parts
        text = ast.get_docstring(node)
        if text and not of_property and not of_command:
            yield text.split()[0].strip(".,:;`'\"()").lower()


def room_of(file: Path) -> str:
    """Name the room of a file: a package of ours, or a part of the monitor."""
    package, *folders = file.relative_to(ROOT).parts[:-1]
    if not folders:
        return package
    return "/".join(folders[:2]) if folders[0] == "monitor" else folders[0]


def rooms() -> dict[str, list[Path]]:
    found = defaultdict(list)
    for package in ("ctxguard", "calibration"):
        for file in sorted((ROOT / package).rglob("*.py")):
            found[room_of(file)].append(file)
    return found


@pytest.mark.parametrize(
    ("room", "files"), rooms().items(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_docstrings_begin_with_a_verb(room: str, files: list[Path]) -> None:
    words = [(file.name, word) for file in files for word in opening_words(file)]
    nouns = [
        each for each in words if each[1] in NO_VERBS or not each[1].replace("-", "").isalpha()
    ]
    assert len(nouns) <= max(1, MOST * len(words)), f"{room}: {nouns}"
