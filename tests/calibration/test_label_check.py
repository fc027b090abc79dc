"""Labels of another corpus are refused, also where its ids are those of the index."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from calibration.data.dataset import Dataset, Query
from calibration.data.label_check import check_ids, check_texts
from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from tests.documents import write_lines

IDS = [f"d{number}" for number in range(30)]


def labels(*passage_ids: str) -> Dataset:
    return Dataset("mine/test", (Query("q", "?"),), {"q": dict.fromkeys(passage_ids, 1)})


def corpus(folder: Path, texts: Mapping[str, str]) -> Path:
    rows = [{"_id": one, "text": text} for one, text in texts.items()]
    return write_lines(folder / "corpus.jsonl", *rows)


def indexed(passage_id: str) -> Passage:
    return Passage(passage_id, f"text of {passage_id}")


def test_missing_part_is_noted() -> None:
    assert check_ids(labels("d0", "d1"), set(IDS)) == check_ids(labels(), set(IDS)) == ()
    (note,) = check_ids(labels("d0", "d1", "gone"), set(IDS))
    assert "1 of 3 labelled passages are not in the index, first 'gone'" in note


def test_mostly_missing_labels_are_refused() -> None:
    with pytest.raises(DataError, match=r"holds 1 of the 3 labelled passages, and lacks 'x'"):
        check_ids(labels("d0", "x", "y"), set(IDS))


@pytest.mark.parametrize(("named", "compared"), [(("d3", "d4"), 2), ((), 30)])
def test_colliding_ids_are_refused(named: tuple[str, ...], compared: int, tmp_path: Path) -> None:
    """Other passages are compared where no labelled one is at hand."""
    file = corpus(tmp_path, {one: f"something about {one}" for one in IDS})
    says = rf"{compared} of {compared} passages .* another corpus with the same ids"
    with pytest.raises(DataError, match=says):
        check_texts(labels(*named), file, set(IDS), indexed)


@pytest.mark.parametrize(
    "texts",
    [{one: f"text  of\n{one}" for one in IDS}, {"elsewhere": "a text"}, {}, None],
    ids=["other white space", "not in the index", "no passage", "no file"],
)
def test_equal_or_unreadable_says_nothing(texts: dict[str, str] | None, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl" if texts is None else corpus(tmp_path, texts)
    assert check_texts(labels("d3", "elsewhere"), file, set(IDS), indexed) == ()


def test_some_changed_texts_are_a_note(tmp_path: Path) -> None:
    texts = {one: indexed(one).text for one in IDS} | {"d5": "revised"}
    (note,) = check_texts(labels(*IDS), corpus(tmp_path, texts), set(IDS), indexed)
    assert "1 of 30 passages" in note
    assert "first 'd5'" in note
