"""Labels of another corpus are refused, also where its ids are those of the index."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from calibration.data.dataset import Dataset, Query
from calibration.data.label_check import check_ids, check_texts
from ctxguard.core.types import Passage
from ctxguard.errors import DataError

IDS = [f"d{number}" for number in range(30)]


def labels(*passage_ids: str) -> Dataset:
    return Dataset("mine/test", (Query("q", "?"),), {"q": dict.fromkeys(passage_ids, 1)})


def corpus(folder: Path, texts: Mapping[str, str]) -> Path:
    file = folder / "corpus.jsonl"
    rows = [json.dumps({"_id": one, "text": text}) for one, text in texts.items()]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def indexed(passage_id: str) -> Passage:
    return Passage(passage_id, f"text of {passage_id}")


def test_labels_of_which_the_index_lacks_none_need_no_note() -> None:
    assert check_ids(labels("d0", "d1"), set(IDS)) == ()
    assert check_ids(labels(), set(IDS)) == ()


def test_a_part_that_the_index_lacks_is_counted_in_a_note() -> None:
    (note,) = check_ids(labels("d0", "d1", "gone"), set(IDS))
    assert "1 of 3 labelled passages are not in the index, first 'gone'" in note


def test_labels_of_which_the_index_lacks_most_are_refused_with_counts() -> None:
    with pytest.raises(DataError, match=r"holds 1 of the 3 labelled passages, and lacks 'x'"):
        check_ids(labels("d0", "x", "y"), set(IDS))


def test_the_same_texts_are_no_news_whatever_their_white_space(tmp_path: Path) -> None:
    file = corpus(tmp_path, {one: f"text  of\n{one}" for one in IDS})
    assert check_texts(labels("d3", "d4"), file, set(IDS), indexed) == ()


def test_colliding_ids_with_other_texts_are_refused(tmp_path: Path) -> None:
    file = corpus(tmp_path, {one: f"something about {one}" for one in IDS})
    with pytest.raises(DataError, match=r"2 of 2 passages .* another corpus with the same ids"):
        check_texts(labels("d3", "d4"), file, set(IDS), indexed)


def test_other_passages_are_compared_where_no_labelled_one_is_at_hand(tmp_path: Path) -> None:
    file = corpus(tmp_path, dict.fromkeys(IDS, "something else"))
    with pytest.raises(DataError, match="30 of 30 passages"):
        check_texts(labels(), file, set(IDS), indexed)


def test_some_changed_texts_are_a_note(tmp_path: Path) -> None:
    texts = {one: indexed(one).text for one in IDS} | {"d5": "revised"}
    (note,) = check_texts(labels(*IDS), corpus(tmp_path, texts), set(IDS), indexed)
    assert "1 of 30 passages" in note
    assert "first 'd5'" in note


def test_what_cannot_be_read_is_not_compared(tmp_path: Path) -> None:
    assert check_texts(labels("d0"), tmp_path / "corpus.jsonl", set(IDS), indexed) == ()
    broken = tmp_path / "corpus.jsonl"
    broken.write_text("{")
    assert check_texts(labels("d0"), broken, set(IDS), indexed) == ()


def test_a_passage_that_the_index_lacks_is_not_compared(tmp_path: Path) -> None:
    file = corpus(tmp_path, {"elsewhere": "a text"})
    assert check_texts(labels("elsewhere"), file, set(IDS), indexed) == ()
