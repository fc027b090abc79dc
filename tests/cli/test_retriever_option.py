"""Commands on a retriever of the user's own, and on TREC runs: from the name to the table."""

import re
import shutil
import sys
from itertools import count
from pathlib import Path

import pytest
from household import write_collection, write_jsonl
from running import Run, figures

from ctxguard.guard.context_guard import ContextGuard
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile

ENGINE = '''
import json, re
from pathlib import Path
from ctxguard import Hit, Ranking
rows = [json.loads(line) for line in Path({corpus!r}).read_text().splitlines()]
words = {{row["_id"]: set(re.findall("\\\\w+", row["title"].lower())) for row in rows}}

def search(query, *, depth):
    """Passages by the share of the words of their title that the query has."""
    asked = set(re.findall("\\\\w+", query.lower()))
    scores = [len(asked & words[row["_id"]]) / 4 for row in rows]
    hits = [
        Hit(row["_id"], score, row["text"], title=row["title"])
        for row, score in zip(rows, scores)
    ]
    return sorted(hits, key=lambda hit: (-hit.score, hit.passage_id))[:depth]

async def asearch(query, *, depth):
    return search(query, depth=depth)

def unscored(query, *, depth):
    return [Hit(hit.passage_id, text=hit.text) for hit in search(query, depth=depth)]

class Engine:
    def __init__(self, version):
        self.version = version
    def retrieve(self, query, *, depth):
        return Ranking.from_hits(search(query, depth=depth), "ratio")
    def fingerprint(self):
        return {{"engine": self.version}}

class Nested:
    engine = Engine("1")

newer = Engine("2")
plain = {{"not": "a retriever"}}

def without_depth(query):
    return []

def texts(query, *, depth):
    return ["a text"]

def broken(query, *, depth):
    raise OSError("engine.example refused the connection")

print("imported")
'''

_numbers = count()
RATIO: dict[str, object] = {"score-kind": "ratio"}


@pytest.fixture
def engine(collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the current folder that searches the collection."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"engine_{next(_numbers)}"
    code = ENGINE.format(corpus=str(collection / "corpus.jsonl"))
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def test_function_is_calibrated_and_guarded(run: Run, engine: str, collection: Path) -> None:
    """From the module's name to the tables, the profile, the report and the served context."""
    described = RATIO | {"retriever": f"{engine}:search", "fingerprint": {"v": "1"}}
    asked = ("calibrate", "--data", collection, "--out", "p.json", "--report", "r.html")
    made = run.ok(*asked, system=described)
    assert "route external" in made.stdout
    profile = Profile.load(Path("p.json"))
    assert profile.fingerprint == {"v": "1"}
    page = Path("r.html").read_text(encoding="utf-8")
    assert "with a damp cloth" in page or "in a dry room" in page or "test each joint" in page

    data = ("--data", collection, "--profile", "p.json")
    measured = run.ok("evaluate", *data, system=described)
    assert "route       external, 100 candidates a query" in measured.stdout
    assert "recall" in measured.stdout
    assert "not in the index" not in measured.stdout

    shown = run.ok("query", "--profile", "p.json", "how do I clean a kettle", system=described)
    assert "clean-kettle" in shown.stdout

    compared = run.ok("evaluate", *data, "--candidate", "three=k=3", system=described)
    assert "system" in compared.stdout

    module = sys.modules[engine]
    guard = ContextGuard(
        module.search,
        score_kind="ratio",
        profile="p.json",
        check=ProfileCheck({"v": "1"}, strict=True),
    )
    context = guard.retrieve("what is the right way to clean my kettle")
    assert context.kept_ids[0] == "clean-kettle"
    assert context.flags == ()


def test_object_forms_give_same_figures(run: Run, engine: str, collection: Path) -> None:
    """The module prints while it is imported, which is not part of the document."""
    found = {
        name: run.read(
            *("evaluate", "--data", collection),
            system={"retriever": f"{engine}:{name}", "score-kind": "ratio"},
        )
        for name in ("search", "asearch", "Nested.engine", "newer")
    }
    assert all(figures(each) == figures(found["search"]) for each in found.values())
    assert (found["newer"]["fusion"], found["newer"]["fingerprint"]) == (None, {"engine": "2"})
    assert found["newer"]["unknown_passages"] == 0


def test_scoreless_retriever_is_cut_by_k(run: Run, engine: str, collection: Path) -> None:
    named = ("--retriever", f"{engine}:unscored")
    run.ok("calibrate", *named, "--data", collection, "--out", "p.json", "--json")
    (route,) = Profile.load(Path("p.json")).routes.values()
    assert route.score_kind.value == "rank"
    measured = run.read("evaluate", *named, "--data", collection, "--profile", "p.json")
    assert figures(measured)["kept"]["mean"]["value"] >= 1.0


def test_foreign_profile_is_a_finding(run: Run, engine: str, collection: Path) -> None:
    data = ("--data", collection)
    run.ok("calibrate", "--retriever", f"{engine}:newer", *data, "--out", "p.json")
    for other, said in (
        ({"retriever": f"{engine}:Nested.engine"}, "engine is '1', was '2'"),
        (
            {"retriever": f"{engine}:unscored", "fingerprint": {"engine": "2"}},
            "score_kind is 'rank', was 'ratio'",
        ),
    ):
        run.finding("evaluate", *data, "--profile", "p.json", system=other, says=said)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("search", "is not MODULE:OBJECT, such as app.search:retriever"),
        ("nowhere_at_all:search", "the module 'nowhere_at_all' cannot be imported"),
        ("fails_on_import:search", "cannot be imported (SystemExit: usage: …)"),
        ("{engine}:absent", "has no attribute 'absent'"),
        ("{engine}:plain", "a dict is not a retriever"),
        ("{engine}:without_depth", "cannot be called with (query, depth=…)"),
        ("{engine}:texts", "make each item a ctxguard.Hit"),
        ("{engine}:search", "plain hits require score_kind (the key score-kind)"),
        ("{engine}:broken", "OSError: engine.example refused the connection"),
    ],
)
def test_unusable_object_names_the_mend(
    run: Run, engine: str, collection: Path, name: str, message: str
) -> None:
    name = name.format(engine=engine)
    Path("fails_on_import.py").write_text("raise SystemExit('usage: …')\n", encoding="utf-8")
    result = run("evaluate", "--retriever", name, "--data", collection)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "please report" not in result.stderr


def test_labels_of_another_corpus_are_refused(run: Run, engine: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"query_id": f"q{n}", "text": f"clean a kettle {n}", "relevant": ["elsewhere"]}
        for n in range(4)
    ]
    data = write_jsonl(tmp_path / "labels.jsonl", rows)
    says = "none of the 1 relevant passages, such as 'elsewhere', is among"
    asked = ("calibrate", "--retriever", f"{engine}:newer", "--data", data, "--out", "p.json")
    run.finding(*asked, says=says)


def test_labels_without_corpus_are_unverified(run: Run, engine: str, tmp_path: Path) -> None:
    row = {"query_id": "q", "text": "clean a kettle", "relevant": ["clean-kettle"]}
    data = write_jsonl(tmp_path / "labels.jsonl", [row])
    shown = run.ok("evaluate", "--retriever", f"{engine}:newer", "--data", data).stdout
    assert "unverified: there is no corpus in which" in " ".join(shown.split())


class TestRuns:
    @pytest.fixture
    def trec(self, run: Run, engine: str, collection: Path, tmp_path: Path) -> Path:
        """A run of both splits, written by the command."""
        files = []
        for split in ("train", "test"):
            file, data = tmp_path / f"{split}.run", collection / f"qrels/{split}.tsv"
            asked = ("evaluate", "--retriever", f"{engine}:newer", "--data", data)
            result = run.ok(*asked, system={"evaluate": {"write-run": str(file)}})
            assert f"{split}.run" in result.stdout
            files.append(file.read_text(encoding="utf-8"))
        both = tmp_path / "both.run"
        both.write_text("".join(files), encoding="utf-8")
        return both

    def test_run_gives_its_retrievers_figures(
        self, run: Run, engine: str, collection: Path, trec: Path
    ) -> None:
        data = ("--data", collection, "--json")
        live = figures(run.read("evaluate", "--retriever", f"{engine}:newer", *data))
        read = figures(run.read("evaluate", "--run", trec, *data, system=RATIO))
        assert live["tokens"]["mean"]["value"] > 0  # a run's texts are in the labels' corpus
        assert read == live
        lines = trec.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("q-clean-piano")]
        trec.write_text("".join(kept), encoding="utf-8")
        short = run.ok("evaluate", "--run", trec, "--data", collection).stdout
        assert "no candidates for 1 queries, such as 'q-clean-piano-0'" in short
        trec.write_text("".join([*kept, "q Q0 p one 0.5 tag\n"]), encoding="utf-8")
        says = f"both.run, line {len(kept) + 1}: rank 'one'"
        run.refused("evaluate", "--run", trec, "--data", collection, says=says)

    @pytest.mark.parametrize("labelled", "ab")
    @pytest.mark.parametrize("several", [False, True])
    def test_texts_beside_the_labels_tell_copies(
        self, run: Run, tmp_path: Path, labelled: str, several: bool
    ) -> None:
        """A label of either copy counts, whichever the run has."""
        texts = {"a": "Boil it.", "b": "boil  it.", "c": "Play it.", "d": "Ride it."}
        write_jsonl(tmp_path / "corpus.jsonl", [{"_id": n, "text": t} for n, t in texts.items()])
        write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "text": "kettle?"}])
        (tmp_path / "qrels").mkdir()
        (tmp_path / "qrels/test.tsv").write_text(f"q\t{labelled}\t1\n")
        trec = tmp_path / "some.run"
        trec.write_text("q Q0 a 1 3.0 t\nq Q0 c 2 2.0 t\n")
        source: list[object] = ["--run", trec]
        if several:
            (tmp_path / "same.toml").write_text('run = "some.run"\n')
            source += ["--system", tmp_path / "same.toml"]
        document = run.read("evaluate", *source, "--data", tmp_path, "-k", 1)
        rows = document["results"]["rows"]
        assert {row["mean"]["value"] for row in rows if row["metric"] == "recall"} == {1.0}

    def test_commands_take_least_relevant_grade(
        self, run: Run, engine: str, collection: Path, trec: Path, tmp_path: Path
    ) -> None:
        data = tmp_path / "graded"
        shutil.copytree(collection, data)
        for file in (data / "qrels").iterdir():
            rows = file.read_text(encoding="utf-8").splitlines()
            file.write_text("".join(f"{row[:-1]}{3 * int(row[-1])}\n" for row in rows[1:]))
        commands: dict[str, tuple[object, ...]] = {
            "evaluate": ("--run", trec, "--data", data),
            "calibrate": ("--run", trec, "--data", data, "--out", tmp_path / "p.json"),
            "golden freeze": (data, "--out", tmp_path / "g"),
        }
        for name, options in commands.items():
            arguments = (*name.split(), *options)
            run.ok(*arguments, system={"relevant-from": 3})
            shutil.rmtree(tmp_path / "g", ignore_errors=True)
            says = "no grade reaches relevant-from = 9: the highest is"
            run.refused(*arguments, system={"relevant-from": 9}, says=says)

    def test_labels_meet_neighbouring_corpus(
        self, run: Run, engine: str, collection: Path, trec: Path, tmp_path: Path
    ) -> None:
        """Ids that are typing errors are told, and labels of another corpus refused."""
        for share, other in ((0.3, "a part"), (1.0, "all")):
            data = tmp_path / other
            shutil.copytree(collection, data)
            file = data / "qrels/test.tsv"
            rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]
            wrong = {row[1] for row in rows[1 : 1 + round(share * len(rows))]}
            lines = [f"{q}\t{'x' * (name in wrong)}{name}\t{grade}\n" for q, name, grade in rows]
            file.write_text("".join(lines), encoding="utf-8")
            for source in (("--run", trec), ("--retriever", f"{engine}:newer")):
                arguments = ("evaluate", *source, "--data", data)
                if share == 1.0:
                    run.refused(*arguments, says="these labels belong to a different corpus")
                else:
                    notes = " ".join(run.read(*arguments)["notes"])
                    assert re.search(
                        r"labelled passages are not in .+corpus.jsonl, such as 'x", notes
                    )

    def test_run_defaults_to_rank(self, run: Run, collection: Path, trec: Path) -> None:
        arguments = ("calibrate", "--run", trec, "--data", collection, "--out", "p.json")
        for kind, named in (("rank", {}), ("ratio", RATIO)):
            run.ok(*arguments, system=named | {"fingerprint": {"engine": "2"}})
            profile = Profile.load(Path("p.json"))
            assert [each.score_kind.value for each in profile.routes.values()] == [kind]
            assert profile.fingerprint == {"engine": "2"}

    def test_runs_and_retrievers_compare(
        self, run: Run, engine: str, collection: Path, trec: Path, tmp_path: Path
    ) -> None:
        sources: list[object] = []
        for name, source in (
            ("newer", f'retriever = "{engine}:newer"'),
            ("both", f'run = "{trec}"'),
        ):
            (tmp_path / f"{name}.toml").write_text(source, encoding="utf-8")
            sources += ["--system", tmp_path / f"{name}.toml"]
        document = run.read("evaluate", *sources, "--data", collection, "-k", "2")
        assert [each["name"] for each in document["candidates"]] == ["newer", "both"]
        assert figures(document, "both")["recall"]["difference"]["value"] == 0.0
        # A system that options describe stands beside those of files.
        asked = ("--run", trec, *sources[:2], "--data", collection, "-k", "2", "--json")
        document = run.read("evaluate", *asked)
        assert [each["name"] for each in document["candidates"]] == ["newer", "run"]
        # Candidates cut a run by k and ratio.
        arguments = ("evaluate", "--data", collection, "--candidate")
        described = {"run": str(trec), "score-kind": "ratio", "profile": "in-force.json"}
        document = run.read(*arguments, "near=k=8,min_ratio=0.7", system=described)
        assert [each["name"] for each in document["candidates"]] == ["near", "system"]
        run.refused(*arguments, "x=dense", system=described, says="have no stages to choose")

    def test_foreign_run_is_refused(self, run: Run, tmp_path: Path, trec: Path) -> None:
        other = write_collection(tmp_path / "other")
        queries = (other / "queries.jsonl").read_text(encoding="utf-8")
        (other / "queries.jsonl").write_text(queries.replace('"q-', '"x-'), encoding="utf-8")
        for qrels in (other / "qrels").iterdir():
            qrels.write_text(qrels.read_text().replace("q-", "x-"))
        run.refused(
            "evaluate",
            "--run",
            trec,
            "--data",
            other,
            says="the run contains none of the 13 queries",
        )
