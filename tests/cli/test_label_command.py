"""`ctxguard label`: samples go out to people, their labels come back."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from household import read_rows, write_jsonl
from live_traffic import EVERYTHING, Traffic, judge, mean_precision, profile_of, serve
from running import Run

from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.errors import DataError
from ctxguard.monitor.labels.files import read_label_file
from ctxguard.monitor.sampling.record import Privacy
from ctxguard.monitor.store import LabelRow, SampleStore

Rows = list[dict[str, Any]]
Export = Callable[..., Rows]
Import = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def judged(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    """Twenty judged requests, of which the whole pool is to be judged."""
    made = serve(tmp_path_factory.mktemp("judged"), 20, rates=EVERYTHING)
    assert judge(run, made).exit_code == 0
    return made


@pytest.fixture
def traffic(judged: Traffic, tmp_path: Path) -> Traffic:
    return judged.copied(tmp_path)


@pytest.fixture
def export(run: Run, tmp_path: Path) -> Export:
    def exported(traffic: Traffic, *options: object) -> Rows:
        out = tmp_path / "out.jsonl"
        run.ok("label", "export", "--store", traffic.url, "--out", out, *options)
        return read_rows(out)

    return exported


@pytest.fixture
def import_(run: Run, tmp_path: Path) -> Import:
    def imported(traffic: Traffic, rows: Rows, annotator: str = "ann") -> dict[str, Any]:
        file = write_jsonl(tmp_path / f"{annotator}.jsonl", rows)
        found: dict[str, Any] = run.read(*importing(traffic, file, annotator))
        return found

    return imported


def importing(traffic: Traffic, file: Path, annotator: str = "ann") -> tuple[object, ...]:
    """The command that imports the labels of one annotator."""
    return ("label", "import", file, "--store", traffic.url, "--annotator", annotator)


def graded(rows: Rows, traffic: Traffic) -> Rows:
    """The rows with the truth filled in."""
    return [
        {**row, "grade": int(row["passage_id"] in traffic.relevant[row["query"]])} for row in rows
    ]


def labels_of(traffic: Traffic) -> list[LabelRow]:
    with SampleStore.open(traffic.url) as store:
        return [label for _, label in store.labels()]


def served_of(traffic: Traffic, query: str) -> set[str]:
    with SampleStore.open(traffic.url) as store:
        for record in store.records(range(1, 1_000)).values():
            if record.query == query:
                return {record.passage_ids[place] for place in record.served}
    raise AssertionError(query)


class TestExport:
    def test_row_has_all_for_grading(self, export: Export, traffic: Traffic) -> None:
        """A row is a passage with all that it takes to grade it."""
        rows = export(traffic, "--n", "36", "--whole")
        assert len({row["request_id"] for row in rows}) == 3
        assert len(rows) == 3 * 12
        first, columns = rows[0], ("when", "query", "title", "text", "grade", "negative")
        assert tuple(first) == (*columns, "request_id", "passage_id")
        assert first["when"] == "always"
        assert first["query"] in traffic.relevant
        assert first["text"]
        assert all(row["grade"] is None for row in rows)
        # Rows of a request stand together, in an order that tells nothing.
        requests = [row["request_id"] for row in rows]
        assert sum(one != other for one, other in pairwise(requests)) == 2
        first = [row["passage_id"] in served_of(traffic, row["query"]) for row in rows[:12]]
        assert first != sorted(first, reverse=True)

    def test_tenants_file_holds_own_requests(
        self, run: Run, export: Export, tmp_path: Path
    ) -> None:
        """A file of one tenant holds no request that could see another's passages."""
        filters = [
            *(Where(tenant="a"), Where(tenant="b"), Where(tenant=["a", "b"]), None),
            *(Where(tenant="a", level=3), Where(level=3)),
        ]
        traffic = serve(tmp_path, 12, filters=filters)
        judge(run, traffic)

        def numbers(*options: str) -> list[int]:
            rows = export(traffic, *options)
            return sorted({int(row["query"].rsplit(" ", 1)[1]) for row in rows})

        assert numbers("--tenant", "a") == [0, 4, 6, 10]
        assert numbers("--tenant", "b") == [1, 7]
        assert numbers("--tenant", "level=3") == [4, 5, 10, 11]
        assert numbers("--tenant", "level=3", "--n", "2") != []
        assert numbers("--tenant", "c") == []
        nobody = run.ok("label", "export", "--store", traffic.url, "--tenant", "c")
        assert "none from c lacks labels" in nobody.stdout
        assert numbers() == [*range(12)]
        with SampleStore.open(traffic.url) as store:
            picked = [one for asked in store.picked(store.series()[0]).values() for one in asked]
        assert {one.pick_id for one in picked} == {1}, "one draw, split by tenant"
        for options, is_said in (((), True), (("--tenant", "b"), False)):
            printed = run.ok("label", "export", "--store", traffic.url, *options).stdout
            assert ("different filters" in printed) is is_said

    def test_same_question_passage_graded_once(
        self, run: Run, export: Export, import_: Import, tmp_path: Path
    ) -> None:
        for session in "abc":
            traffic = serve(tmp_path, 5, rates=EVERYTHING, session=session)
        judge(run, traffic)
        rows = export(traffic, "-n", "1000", "--whole")
        asked = [(row["query"], row["passage_id"]) for row in rows]
        assert len(set(asked)) == len(asked)
        queries = [query for query, _ in asked]
        assert sum(one != other for one, other in pairwise(queries)) == len(set(queries)) - 1
        found = import_(traffic, graded(rows, traffic))
        assert found["added"] == len(rows)
        assert found["repeated"] == 2 * 5 * 12
        assert found["usable"]["unfinished"] == 0
        assert export(traffic, "-n", "1000", "--whole") == []
        grades = {(label.passage_id, label.grade) for label in labels_of(traffic)}
        assert len(grades) == len({passage_id for passage_id, _ in grades})

    def test_labelled_is_not_asked_again(
        self, export: Export, import_: Import, traffic: Traffic, run: Run
    ) -> None:
        first = export(traffic, "-n", "96", "--whole")
        import_(traffic, graded(first, traffic))
        others = export(traffic, "-n", "600", "--whole")
        assert len({row["request_id"] for row in others}) == 12
        assert not {row["request_id"] for row in first} & {row["request_id"] for row in others}
        import_(traffic, graded(others, traffic))
        assert export(traffic) == []
        result = run("label", "export", "--store", traffic.url)
        assert "every judged request already has its labels" in result.stdout

    def test_without_stored_texts_that_is_said(self, run: Run, tmp_path: Path) -> None:
        traffic = serve(tmp_path, 2, rates=EVERYTHING, privacy=Privacy(passages="omitted"))
        judge(run, traffic)
        out = tmp_path / "out.jsonl"
        result = run("label", "export", "--store", traffic.url, "--out", out, "--whole")
        assert "the store has no text for 24 passages" in result.stdout

    def test_costs_first_then_how_to(self, run: Run, tmp_path: Path) -> None:
        """Before anything is picked it says what labels cost and then how to grade."""
        made = serve(tmp_path, 60)
        judge(run, made)
        command = ("label", "export", "--store", made.url, "-n", "60")
        found = run.read(*command)
        assert found["out"] is found["guide"] is None
        assert found["expected_passages"] == pytest.approx(60, abs=12)
        assert found["requests"] < found["expected_passages"] <= found["passages"]
        with SampleStore.open(made.url) as store:
            (series,) = store.series()
            assert store.picked(series) == {}
        shown = run(*command, columns="80").stdout
        said = f"{found['requests']} requests, about {found['expected_passages']} passages to grade"
        assert said in " ".join(shown.split())
        assert max(map(len, shown.splitlines()[:12])) <= 80
        run.ok(*command, "--max-grade", "1", "--out", tmp_path / "todo.csv")
        guide = (tmp_path / "todo-guide.md").read_text(encoding="utf-8")
        for words in ("| 1 |", "| 0 |", "`always`", "label import todo.csv", "--max-grade 1"):
            assert words in guide
        assert "| 2 |" not in guide


BAD_LABELS = {
    "a grade out of range": ({"grade": 4}, "grade 4 must be a whole number from 0"),
    "below zero": ({"grade": -1}, "grade -1"),
    "half a grade": ({"grade": 1.5}, "grade 1.5"),
    "yes": ({"grade": True}, "grade True"),
    "infinite": ({"grade": "inf"}, "grade 'inf'"),
    "a word": ({"grade": "good"}, "grade 'good'"),
    "a list": ({"grade": [1]}, "grade [1]"),
    "no request": ({"request_id": ""}, "request_id is ''"),
    "no request nor grade": ({"request_id": "", "grade": None}, "request_id is ''"),
    "a fraction for a passage": ({"passage_id": 7.5}, "passage_id is 7"),
    "misleads and helps": ({"grade": 2, "negative": "distractor"}, "negative 'distractor'"),
    "another kind": ({"grade": 0, "negative": "liar"}, "negative 'liar'"),
    "a list for a kind": ({"grade": 0, "negative": ["x"]}, "does not fit grade 0"),
    "an object for a kind": ({"grade": 0, "negative": {"x": 1}}, "does not fit grade 0"),
    "true for a kind": ({"grade": 0, "negative": True}, "does not fit grade 0"),
}

COLUMNS = b"request_id,passage_id,grade\n"
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "not UTF-8": ("back.jsonl", b'{"request_id": "\xff"}\n', "not UTF-8"),
    "not UTF-8 either": ("back.csv", COLUMNS + b"\xc3\xa9,a,1\n\xff,a,1", "not UTF-8"),
    "other columns": ("back.csv", b"id,score\na,1\n", "the columns are id, score"),
    "a key twice": (
        "back.jsonl",
        b'{"request_id": "r", "passage_id": "p", "grade": 1, "grade": 0}\n',
        "line 1: not JSON (the key 'grade' occurs twice",
    ),
    "a torn quote": ("back.csv", COLUMNS + b'"a"b,a,1\n', "line 2: is not CSV"),
    "too many cells": ("back.csv", COLUMNS + b"a,b,1,2\n", "has 4 cells"),
    "an empty table": ("back.csv", b"", "the columns are none"),
    "broken JSON": ("back.jsonl", b'{"request_id": "r"\n', "line 1: not JSON"),
    "a list": ("back.jsonl", b"[1]\n", "line 1: this line is not a JSON object"),
    "deep": ("back.jsonl", b"[" * 100_000, "line 1: not JSON"),
}


class TestImport:
    def test_what_came_back_is_counted(
        self, export: Export, import_: Import, traffic: Traffic
    ) -> None:
        rows = graded(export(traffic, "-n", "24", "--whole"), traffic)
        served = served_of(traffic, rows[0]["query"])
        next(row for row in rows if row["passage_id"] in served)["grade"] = None
        found = import_(traffic, rows)
        (note,) = found.pop("notes")
        assert found == {
            "added": 23,
            "repeated": 0,
            "duplicates": 0,
            "unknown": [],
            "blank": 1,
            "usable": {"passages": 12, "requests": 1, "unfinished": 1, "unpicked": 0},
        }
        assert note == "12 grades on 1 complete request count; grades are missing for 1 request"
        assert {label.annotator for label in labels_of(traffic)} == {"ann"}
        rows[0] |= {"request_id": "from elsewhere"}
        again = import_(traffic, rows)
        assert (again["added"], again["duplicates"], again["blank"]) == (0, 22, 1)
        assert again["unknown"] == ["from elsewhere"]
        assert "unknown: from elsewhere" in again["notes"]
        others = [
            {**row, "grade": 1 - row["grade"]} for row in rows[1:] if row["grade"] is not None
        ]
        found = import_(traffic, others[:2], annotator="bob")
        assert found["added"] == 2
        assert len(labels_of(traffic)) == 25

    @pytest.mark.parametrize("name", ["passage", "request"])
    def test_changed_ids_are_named(
        self, run: Run, export: Export, traffic: Traffic, tmp_path: Path, name: str
    ) -> None:
        """As spreadsheets and people change them."""
        rows = graded(export(traffic, "--n", "36", "--whole"), traffic)
        column = f"{name}_id"
        right = rows[3][column]
        rows[3][column] = changed = right.upper()
        if name == "passage":
            rows[5][column] = "12-May"
        file = write_jsonl(tmp_path / "back.jsonl", rows)
        says = [f"{changed!r} (did you mean {right!r}?)", "none of its labels were imported"]
        if name == "passage":
            says += ["no passage '12-May'", "2 ids"]
        run.refused(*importing(traffic, file), says=says)
        assert labels_of(traffic) == []

    @pytest.mark.parametrize(("change", "said"), BAD_LABELS.values(), ids=BAD_LABELS)
    def test_bad_row_is_named_by_line(
        self, tmp_path: Path, change: dict[str, Any], said: str
    ) -> None:
        good = {"request_id": "r", "passage_id": "p", "grade": 1}
        file = write_jsonl(tmp_path / "back.jsonl", [good, {**good, **change}])
        with pytest.raises(DataError, match=f"{re.escape(str(file))}, line 2: .*{re.escape(said)}"):
            read_label_file(file, "ann", 0.0, 3)

    def test_bad_file_changes_nothing(
        self, run: Run, traffic: Traffic, export: Export, tmp_path: Path
    ) -> None:
        """Nothing of a bad file is taken in nor grades of another scale."""
        rows = export(traffic, "-n", "12", "--whole")[:2]
        rows = [{**rows[0], "grade": 1}, {**rows[1], "grade": 5}]
        command = importing(traffic, write_jsonl(tmp_path / "b.jsonl", rows))
        error = json.loads(run.refused(*command, "--json").stdout)["error"]
        assert "line 2" in error["message"]
        assert labels_of(traffic) == []
        run.ok(*command, "--max-grade", "5")
        run.refused(*command, "--max-grade", "6", says="graded from 0 to 5, but these from 0 to 6")

    @pytest.mark.parametrize(("name", "content", "said"), BAD_FILES.values(), ids=BAD_FILES)
    def test_unreadable_file_is_named(
        self, tmp_path: Path, name: str, content: bytes, said: str
    ) -> None:
        (file := tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{re.escape(str(file))}.*{re.escape(said)}"):
            read_label_file(file, "ann", 0.0, 3)


def test_people_grade_an_unjudged_store(
    run: Run, tmp_path: Path, export: Export, import_: Import
) -> None:
    """From requests to estimates and to a new profile, without a judge."""
    traffic = serve(tmp_path, 60, rates=EVERYTHING, profile=profile_of(RatioPolicy(k=5)))
    nothing = run("label", "export", "--store", traffic.url)
    assert "have people grade without a judge" in " ".join(nothing.stderr.split())
    rows = export(traffic, "--whole", "-n", 60 * 12)
    assert import_(traffic, graded(rows, traffic))["usable"]["requests"] == 60
    monitor = ("monitor", "--store", traffic.url, "--judge", "people", "--once")
    document = run.read(*monitor)
    assert document["labelled"] == 60
    assert document["judge_estimates"] == {}, "nobody judged"
    precision = document["estimates"]["all_retained"]["precision"]
    assert precision["value"] == pytest.approx(mean_precision(traffic), abs=0.02)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    profile_of(RatioPolicy(k=5)).save(before)
    made = ("calibrate", "--store", traffic.url, "--profile", before, "--out", after, "--json")
    assert run.read(*made)["requests"] == 60
