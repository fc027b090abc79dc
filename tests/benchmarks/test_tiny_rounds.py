"""Each published benchmark runs: one tiny round, whose report has the figures that pages quote."""

import json
import logging
import random
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import alarms, certificate, encode, stale
from benchmarks.figures import TEMPLATES, value_at
from tests.made_up import write_wheel

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
QUERIES = 40
SHOPS = ("bakery", "pharmacy")
STEMS = ("ida", "one", "ust", "aver", "ine", "ock", "elt", "ang", "oft", "esk")


class Round(NamedTuple):
    """The arguments of one tiny round of a command.

    Attributes:
        arguments: ``DATA`` stands for the folder of what the test writes, ``TMP`` for an empty one.
        figure: A figure of its report; of those that pages quote, all that match it.
        fails: Whether so few repeats may miss a bar, of which the exit status then tells.
        needs: A program that is absent in most places.
    """

    arguments: str
    figure: str
    fails: bool = False
    needs: str = ""


ROUNDS = {
    "alarms": Round("--repeats 1", "rhythms/rhythm=steady&reference=promise&per_day=200/repeats"),
    "assessor": Round(
        "--data DATA --collections musique --assessors 'd′ 1' --splits 1 --cache DATA/cache",
        "assessors/d′ 1/musique/",
    ),
    "certificate": Round("--repeats 1", "outcomes/", fails=True),
    "encode": Round("--scifact DATA/scifact --rounds 1", "passages/default/p50"),
    "engines": Round(
        "--data DATA/noveleval --engines postgresql --rounds 1",
        "engines/postgresql/milliseconds/p50",
    ),
    "judged_lists": Round("--data DATA/lists --draws 2", "means/graded_gpt4o/"),
    "labelling": Round("--months 1 --only good", "cases/good judge/", fails=True),
    "overhead": Round("--sizes 100 --rounds 1 --calls 10 --seconds 0.01", "bars/decide/measured"),
    "question_to_context": Round("--sizes 200 --questions 3 --data TMP", "sizes/200/ctxguard/ms"),
    "loop_lag": Round("--size 200 --requests 4 --in-flight 2 --turns 1", "here/text/p99"),
    "ranker": Round(
        "--data DATA/musique DATA/noveleval --cache DATA/cache", "/musique/|mean_gain", fails=True
    ),
    "real_lists": Round(
        "--data DATA/lists --labels 20 --asking-labels 20 --splits 1", "/(20|graded_gpt4o)/bm25/"
    ),
    "redaction": Round("", ""),
    "search": Round(
        "--sizes scifact 300 --scifact DATA/scifact --peers ctxguard-none --queries 5 --repeats 1 "
        "--seconds 0.1 --data TMP",
        "300/peers/bars/recall_of_exact_top_10",
    ),
    "serve": Round("--rounds 1", "cases/rerank/share", needs="wrk"),
    "serve --hostile": Round("--hostile filters --calls 2", "attacks/filters/"),
    "signals": Round(
        "--data DATA/noveleval --queries 2", "collections/noveleval/milliseconds/none"
    ),
    "stale": Round("--repeats 1 --cache DATA/cache", ""),
    "turns": Round("--former . --turns 1 --seconds 0", "cases/search, signals full/median"),
    "verdict": Round(
        "--data DATA --collections musique --labels 20 --splits 1 --cache DATA/cache", "^splits$"
    ),
}
ELSEWHERE = {
    "index_update": "test_index_update.py",
    "live": "../monitor/test_live.py",
    "readers": "test_readers.py",
}
"""Commands of which another test runs a small round."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collections named like published ones, and lists of a retriever with a model's verdicts."""
    folder, luck = tmp_path_factory.mktemp("data"), random.Random(0)
    words = [start + end for start in ("bar", "cor", "dun", "fel", "gim") for end in STEMS]
    # The engines that search is compared with give a hundred candidates or none.
    for name in ("scifact", "musique", "noveleval", "lists"):
        n = 110 if name == "scifact" else QUERIES
        texts = [" ".join(luck.sample(words, 9)) for _ in range(n)]
        grades = [f"q{row}\tp{row}\t2\nq{row}\tp{row - 1}\t0\n" for row in range(1, QUERIES)]
        (folder / name / "qrels").mkdir(parents=True)
        (folder / name / "qrels" / "test.tsv").write_text("".join(grades), "utf-8")
        for kind, ids, given in (
            ("corpus", "p", texts),
            ("queries", "q", [" ".join(luck.sample(text.split(), 3)) for text in texts[:QUERIES]]),
        ):
            rows = [{"_id": f"{ids}{row}", "text": text} for row, text in enumerate(given)]
            lines = "".join([json.dumps(row) + "\n" for row in rows])
            (folder / name / f"{kind}.jsonl").write_text(lines, "utf-8")
    run, verdicts = [], ["query-id\tcorpus-id\tverdict\n"]
    for row in range(1, QUERIES):
        for rank in range(1, 22):
            place = (row + luck.randrange(3) if rank == 1 else row + 1 + rank) % QUERIES
            run.append(f"q{row} Q0 p{place} {rank} {22 - rank - luck.random()} bm25\n")
            verdicts.append(f"q{row}\tp{place}\t{2 * (place == row)}\n")
    for file, lines in (("runs/bm25.run", run), ("verdicts/graded_gpt4o.tsv", verdicts)):
        (folder / "lists" / file).parent.mkdir()
        (folder / "lists" / file).write_text("".join(lines), "utf-8")
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, data: Path) -> Iterator[None]:
    """Populations, streams and years that are short, and a package of two releases."""
    for module, name, value in (
        (alarms, "QUIET_REQUESTS", 1_000),
        (alarms, "RHYTHMS", alarms.RHYTHMS[:1]),
        (alarms, "DESIGNS", alarms.DESIGNS[:1]),
        (alarms, "JUDGES", ((1.0, 1.0), (0.95, 0.98))),
        (alarms, "AFTER_ALARM", (0.05,)),
        (alarms, "REQUESTS_AFTER_ALARM", 1_000),
        (certificate, "POPULATION_SIZE", 500),
        (encode, "PASSAGES", 4),
        (encode, "QUERIES", 4),
        (encode, "RUNTIMES", ("default",)),
        (stale, "RELEASES", [releases(name, data / "cache" / "stale") for name in SHOPS]),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = logging.getLogger("ctxguard")
    level = log.level
    yield
    log.setLevel(level)


def releases(package: str, folder: Path) -> tuple[stale.Release, stale.Release]:
    """Write the wheels of two releases, in which every function is documented otherwise."""
    old, new = (stale.Release(package, year, f"20{year}-01-01") for year in ("20", "24"))
    for release, change in ((old, "takes it out again later"), (new, "must pay at once")):
        lines = [
            f'def take_{stem}{n}(item):\n    """Lay item {stem}{n} into the basket of a customer '
            f'who {change}, as often as the {package} {n} has it."""\n'
            for stem in STEMS
            for n in range(3)
        ]
        write_wheel(folder, release, "basket.py", "\n".join(lines))
    return old, new


def test_every_command_has_tiny_round() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    published = set(re.findall(r"`python -m benchmarks\.(\w+)", readme))
    assert published == {name.partition(" ")[0] for name in ROUNDS} | set(ELSEWHERE)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ROUNDS)
def test_a_published_command_runs(name: str, data: Path, tmp_path: Path) -> None:
    own, (module, *variant) = ROUNDS[name], name.split(" --")
    if own.needs and shutil.which(own.needs) is None:
        pytest.skip(f"{own.needs} is not installed")
    file = tmp_path / "report.json"
    places = {"DATA": str(data), "TMP": str(tmp_path)}
    given = shlex.split(re.sub("DATA|TMP", lambda found: places[found[0]], own.arguments))
    status = import_module(f"benchmarks.{module}").main([*given, "--json", str(file)])
    assert not status or (own.fails and status == 1)
    report: Any = json.loads(file.read_text(encoding="utf-8"))
    quoted = figures_of("_".join([module, *variant]))
    taken = [(path, form) for path, form in quoted if re.search(own.figure, path)]
    for path, form in taken or [(own.figure, "")]:
        format(value_at(report, path), form)


def figures_of(report: str) -> list[tuple[str, str]]:
    """The figures of a report that pages quote, with their formats."""
    pages = "".join([page.read_text(encoding="utf-8") for page in TEMPLATES.rglob("*.md")])
    return re.findall(rf"{{{{{report} (.+?) ([^\s}}]+)}}}}", pages)
