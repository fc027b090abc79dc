"""The benchmark of stale documentation: passages and questions from two wheels of a package."""

from pathlib import Path

from benchmarks.stale import Release, documentation, documented
from tests.made_up import write_wheel

OLD, NEW = Release("shop", "1.0", "2020-01-01"), Release("shop", "2.0", "2024-01-01")
DOC = "Adds an item to the basket of a customer, who may take it out again before the order is {}."


def wheel(folder: Path, release: Release, word: str) -> None:
    functions = [
        f'def add_{n}(item, n={len(word)}):\n    """{DOC.format(word)}"""\n' for n in "abc"
    ]
    source = "\n".join([*functions, "def _hidden():\n    ...\n"])
    write_wheel(folder, release, "basket.py", source)


def test_public_functions_are_documented(tmp_path: Path) -> None:
    wheel(tmp_path, NEW, "paid")
    found = documented(tmp_path / "shop-2.0-py3-none-any.whl")
    assert sorted(found) == [f"shop.basket.add_{n}" for n in "abc"]
    assert found["shop.basket.add_a"].startswith("shop.basket.add_a(item, n=4)\n\nAdds an item")


def test_third_of_questions_name_older(tmp_path: Path) -> None:
    wheel(tmp_path, OLD, "confirmed")
    wheel(tmp_path, NEW, "paid")
    made = documentation([(OLD, NEW)], tmp_path)
    assert sorted(made.asked.values()) == ["new", "new", "old"]
    for query in made.dataset.queries:
        assert ("1.0" in query.text) is (made.asked[query.query_id] == "old")
        (right,) = made.dataset.relevant(query.query_id)
        (wrong,) = made.dataset.distractors[query.query_id]
        assert right.split("@")[0] == wrong.split("@")[0]
        assert made.release_of[right] == made.asked[query.query_id] != made.release_of[wrong]
    assert {passage.metadata["updated_at"] for passage in made.passages} == {
        "2020-01-01",
        "2024-01-01",
    }
