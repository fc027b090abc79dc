"""The pictures of the documentation are no older than what they show."""

import json
from pathlib import Path

import pytest

from tools.picture_sources import PICTURES, RECORD, SOURCES, current, digest_of


def test_every_picture_has_sources() -> None:
    pictures = {each.name for each in PICTURES.iterdir() if each != RECORD}
    assert pictures == set(SOURCES)


@pytest.mark.parametrize("picture", SOURCES)
def test_pictures_are_of_todays_sources(picture: str) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    sources = ", ".join(SOURCES[picture])
    assert recorded.get(picture) == current()[picture], (
        f"docs/images/{picture} is older than {sources}: run `make pictures`, look at it, and "
        "commit it with docs/images/sources.json"
    )


def test_digest_follows_name_and_content(tmp_path: Path) -> None:
    """A digest changes with the name and the content of a source."""
    folder = tmp_path / "templates"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "a.html").write_text("one", encoding="utf-8")
    before = digest_of(tmp_path, ("templates",))
    (folder / "__pycache__" / "a.pyc").write_bytes(b"0")
    assert digest_of(tmp_path, ("templates",)) == before
    (folder / "a.html").write_text("two", encoding="utf-8")
    changed = digest_of(tmp_path, ("templates",))
    (folder / "a.html").rename(folder / "b.html")
    assert len({before, changed, digest_of(tmp_path, ("templates",))}) == 3


def test_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_of(tmp_path, ("templates",))
