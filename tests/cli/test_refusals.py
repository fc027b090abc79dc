"""What cannot work is refused before the work, in words that name it: all commands, one table."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from household import write_jsonl
from live_traffic import profile_of
from running import Run

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route

STORE = "sqlite:///smaples.db"
CALIBRATE = "calibrate --index INDEX --data DATA --out OUT"
EVALUATE = "evaluate --index INDEX --data DATA"
COMPARE = "evaluate --index i --data d"
MONITOR = f"monitor --once --store {STORE} --judge"
LLM = f"{MONITOR} llm --model m"
NO_STORE = "there is no sample store"
UPSTREAM = {"rerank-upstream": "http://h", "candidates": "c.jsonl"}
OWN = "evaluate --data DATA"

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (f"{CALIBRATE} --alpha 1.5", "alpha 1.5", {}),
    (CALIBRATE, "serving-k 0", {"calibrate": {"serving-k": 0}}),
    (CALIBRATE, "tolerance 1.0", {"calibrate": {"tolerance": 1.0}}),
    (CALIBRATE, "held-out 1", {"calibrate": {"held-out": 1}}),
    (CALIBRATE, "false-alarms 1: should be", {"calibrate": {"false-alarms": 1}}),
    (CALIBRATE, "magic", {"calibrate": {"policy": "magic"}}),
    (CALIBRATE, "has no key 'polcy'; did you mean policy?", {"calibrate": {"polcy": "ratio"}}),
    (CALIBRATE, "no/such-model", {"reranker": "no/such-model"}),
    (f"{CALIBRATE} --context wide", "--context", {}),
    (f"{CALIBRATE} --report /", "--report", {}),
    ("calibrate --index INDEX --data DATA --out FOLDER", "is a directory", {}),
    ("calibrate --index INDEX --out OUT", "`ctxguard judge` creates them from a log", {}),
    (f"calibrate --index i --out OUT --store {STORE}", "give --data", {"assessor": "chat"}),
    (f"{EVALUATE} --k 0", "--k", {}),
    (EVALUATE, "sideways", {"evaluate": {"route": "sideways"}}),
    (EVALUATE, "no reranker was given", {"evaluate": {"route": "hybrid+rerank"}}),
    (EVALUATE, "should be a valid number", {"utility": {"unjudged": "little"}}),
    (EVALUATE, "and 0: it is a penalty", {"utility": {"unjudged": 0.2}}),
    (EVALUATE, "should be 'unjudged', 'irrelevant'", {"utility": {"relevant": 2}}),
    (EVALUATE, "rank_limit 1.5 must be a whole number", {"utility": {"rank_limit": 1.5}}),
    ("evaluate --index HALF --data DATA", "vectors.npy is missing", {}),
    ("evaluate --index INDEX --data OTHER", "only 0 of the 1 labelled passages", {}),
    (
        f"{EVALUATE} --profile ONE_ROUTE",
        "no policy for the route 'lexical'",
        {"evaluate": {"route": "lexical"}},
    ),
    (OWN, "nothing says where candidates come from", {}),
    (OWN, "--index and --retriever says where", {"index": "i", "retriever": "a:b"}),
    (OWN, "score-kind has no effect with --index", {"index": "i", "score-kind": "rank"}),
    (OWN, "reranker has no effect with --retriever", {"retriever": "a:b", "reranker": "m"}),
    (OWN, "should be a valid dict", {"retriever": "a:b", "fingerprint": "x"}),
    (OWN, "name it as candidates", {"rerank-upstream": "http://h"}),
    (OWN, "nothing says where candidates come from", {"candidates": "c.jsonl"}),
    (OWN, "the rerank URL is not", UPSTREAM | {"rerank-upstream": "h"}),
    (OWN, "there is no such file", UPSTREAM),
    (OWN, "--index and rerank-upstream says where", UPSTREAM | {"index": "i"}),
    (OWN, "fingerprint has no effect with", UPSTREAM | {"fingerprint": {"a": "b"}}),
    (OWN, "reranker has no effect with rerank-upstream", UPSTREAM | {"reranker": "m"}),
    (OWN, "has none of the 13 labelled queries", UPSTREAM | {"candidates": "LISTS"}),
    (COMPARE, "not a metric that can get worse", {"evaluate": {"regression-metrics": ["kept"]}}),
    (COMPARE, "'nobody' is not a candidate", {"evaluate": {"baseline": "nobody"}}),
    (
        COMPARE,
        "[evaluate] has no key 'basline'; did you mean baseline?",
        {"evaluate": {"basline": "x"}},
    ),
    ("evaluate", "give --data PATH, or data in the --system file", {}),
    ("evaluate --data d", "nothing says where candidates come from", {}),
    (f"{COMPARE} --run r -k 1 -k 2", "--index and --run says where", {}),
    ("index x --out OUT --lexical x", "write it into the --system file", {}),
    (f"{COMPARE} --candidate x=lexicla", "'lexicla' in the", {}),
    (f"{COMPARE} --against none.json", "No such file", {}),
    (f"{COMPARE} --against FILE", "is not the JSON of a comparison of `ctxguard evaluate`", {}),
    (f"{COMPARE} -k 5 -k 200", "more than the depth 100", {}),
    (f"{COMPARE} --profile none.json", "cannot be read as a profile", {}),
    (f"{EVALUATE} --profile TORN", "torn: ", {}),
    (
        "query q --index INDEX --profile LATER",
        "later.jsonl: schema_version is 99, but this release reads 1",
        {},
    ),
    (
        "evaluate --index INDEX --data DATA --candidate x=hybrid+rerank",
        "x reranks, and no reranker was given",
        {},
    ),
    ("query q --index INDEX --text --json", "not both", {}),
    ("query q --index GONE", "gone", {}),
    ("query q --index FOLDER", "folder", {}),
    ("query q --index FOREIGN", "foreign", {}),
    ("query q --engine mysql://h/db", "mysql", {}),
    (
        "index DATA --engine qdrant:///tmp/x ",
        "lexical has no effect",
        {"index": {"lexical": "bm25s"}},
    ),
    ("index DATA", "give either --out FOLDER or --engine URL", {}),
    ("index GONE --out OUT", "gone", {}),
    ("index FOLDER --out OUT", "folder", {}),
    ("index GONE --out OUT --language xx", "no analyser for the language 'xx'", {}),
    ("index GONE --out FOREIGN", "manifest.json", {}),
    ("index TWICE --out OUT", "twice.jsonl, line 2: passage id 'a' is already on line 1", {}),
    ("evaluate --index INDEX --data GRADED", "graded.jsonl, line 1: grade 'high'", {}),
    ("golden check FOLDER", "ctxguard golden freeze", {}),
    ("mcp --index none", "none", {}),
    ("mcp --index .", "'tenant' is not FIELD=VALUE", {"mcp": {"where": ["tenant"]}}),
    ("mcp --index . --http sse", "--http", {}),
    ("mcp --index . --http 0", "--http", {}),
    ("mcp --index . --profile none.json", "none.json", {}),
    (f"{MONITOR} labels", "--labels", {}),
    (f"{MONITOR} llm", "--model", {}),
    (f"{MONITOR} cross-encoder", "--model", {}),
    (f"{MONITOR} oracle", "oracle", {}),
    (f"{MONITOR} labels --labels gone.jsonl", "gone.jsonl", {}),
    (f"{MONITOR} labels --profile gone.json", "gone.json", {}),
    (LLM, "set the key prices", {"monitor": {"cost-per-day": 1}}),
    (LLM, "prices.0 -1: should", {"monitor": {"base-url": "x", "prices": [-1, 0]}}),
    (LLM, "calls-per-hour 0", {"monitor": {"calls-per-hour": 0}}),
    (LLM, "calls-per-day 0", {"monitor": {"calls-per-day": 0}}),
    ("label export --store nonsense", "URL cannot be read", {}),
    ("label export --store mysql://host/samples", "mysql", {}),
    ("label export --store sqlite://", "in memory", {}),
    ("label export --store sqlite:////no/such/s.db", f"{NO_STORE} /no/such/s.db", {}),
    (f"label export --store {STORE} --out FOLDER", "is a directory", {}),
    (
        "calibrate --profile HANDMADE --out OUT --store sqlite:///handmade.json",
        "move it away",
        {},
    ),
    # A name that no store has is most likely mistyped.
    (f"{MONITOR} labels --labels TRUTH", NO_STORE, {}),
    (f"monitor --store {STORE} --judge labels --labels TRUTH", NO_STORE, {}),
    (f"label export --store {STORE} --out OUT", NO_STORE, {}),
    (f"label import ROWS --annotator ann --store {STORE}", NO_STORE, {}),
    (f"calibrate --profile HANDMADE --out OUT --store {STORE}", NO_STORE, {}),
    (f"calibrate --data TRUTH --out OUT --store {STORE}", "give either --data", {}),
    (
        "calibrate --data TRUTH --out OUT --profile HANDMADE",
        "--profile works only with --store",
        {},
    ),
    (f"calibrate --out OUT --store {STORE} --alpha 0.1", "certifies nothing", {}),
    (f"calibrate --out OUT --store {STORE} --run FILE", "--run has no effect", {}),
    (f"judge --store {STORE} --index INDEX", "give either --queries", {}),
    (f"judge --store {STORE} --index INDEX --questions 9", "--questions needs --judge llm", {}),
    (f"explain some-request --store {STORE}", f"{NO_STORE}", {}),
    ("doctor nothing-here", "'nothing-here' is not an index folder", {}),
    ("label", "give --questions FILE, one question per line", {}),
    ("label --out OUT", "give --questions FILE, one question per line", {}),
    ("label --questions WHY", "give --out FILE, such as labels.jsonl", {}),
    ("label --questions GONE --out OUT", "there is no such file", {}),
    ("label --questions BLANK --out OUT", "write one per line", {}),
    ("label --questions WHY --out FOLDER", "is a directory", {}),
    ("label --questions WHY --out FILE", "file.jsonl, line 1", {}),
    ("label --questions WHY --out OUT", "says where candidates come from", {}),
    ("label --list csv --questions WHY", "--list", {}),
]

FINDINGS = [
    ("evaluate --index INDEX --data NOTHING", "none of the 1 queries has a relevant passage"),
    ("evaluate --index INDEX --data NOTHING --candidate all", "no passage is labelled relevant"),
    ("golden hard-negatives --index INDEX --data ONE --out OUT", "no hard negative was found"),
]


ROWS: dict[str, list[dict[str, object]]] = {
    "FILE": [{"name": "a file of another kind"}],
    "LISTS": [{"query": "another question", "documents": []}],
    "ROWS": [],
    "LATER": [{"schema_version": 99}],
    "TRUTH": [{"query_id": "q", "query": "q", "relevant": ["d"]}],
    "NOTHING": [{"query_id": "1", "text": "kettle", "relevant": []}],
    "OTHER": [{"query_id": "1", "text": "a", "relevant": ["gone"]}],
    "TWICE": [{"_id": "a", "text": "x"}, {"_id": "a", "text": "y"}],
    "GRADED": [{"query_id": "1", "text": "a", "relevant": {"a": "high"}}],
    "ONE": [{"_id": "q", "text": "clean a violin", "relevant": ["clean-violin"]}],
}
TEXTS = {"WHY": "Why?", "BLANK": "\n", "TORN": "{"}

Place = Callable[[Any], Any]


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """What the words in capitals stand for, made where a command names it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: placed(each) for name, each in value.items()}
        file = tmp_path / str(value).lower()
        match value:
            case "INDEX" | "DATA":
                return str(request.getfixturevalue({"INDEX": "index", "DATA": "collection"}[value]))
            case "OUT" | "GONE":
                pass
            case "FOLDER":
                file.mkdir(exist_ok=True)
            case "FOREIGN":
                file.mkdir()
                (file / "manifest.json").write_text('{"name": "a web application"}')
            case "HALF":
                shutil.copytree(request.getfixturevalue("index"), file)
                next(file.rglob("vectors.npy")).unlink()
            case "HANDMADE":
                file = file.with_suffix(".json")
                profile_of(RatioPolicy(k=1)).save(file)
            case "ONE_ROUTE":
                content = json.loads(request.getfixturevalue("profile").read_text())
                del content["routes"][Route.LEXICAL.value]
                write_jsonl(file, [content])
            case str() if value in TEXTS:
                file.write_text(TEXTS[value])
            case str() if value in ROWS:
                file = write_jsonl(file.with_suffix(".jsonl"), ROWS[value])
            case _:
                return value
        return str(file)

    return placed


def cases(*rows: tuple[Any, ...]) -> list[Any]:
    """The rows as parameters; those with an index run the model."""
    model = [pytest.mark.model]
    return [pytest.param(*row, marks=model if "INDEX" in str(row) else []) for row in rows]


@pytest.mark.parametrize(("words", "said", "system"), cases(*REFUSED))
def test_unworkable_is_refused_writing_nothing(
    run: Run, place: Place, words: str, said: str, system: dict[str, Any]
) -> None:
    arguments, keys = map(place, words.split()), place(system) or None
    result = run.refused(*arguments, columns="1000", system=keys, says=said)
    assert "encoding passages" not in result.stderr
    assert not {"out", "smaples.db"} & {file.name for file in Path().iterdir()}


@pytest.mark.parametrize(("words", "said"), cases(*FINDINGS))
def test_empty_labels_are_a_finding(run: Run, place: Place, words: str, said: str) -> None:
    run.finding(*map(place, words.split()), says=said)
    assert not Path("out").exists()


@pytest.mark.model
@pytest.mark.parametrize("question", ["", " \n\t", "a" * 2**20])
def test_unsearchable_query_is_refused(run: Run, index: Path, question: str) -> None:
    says = "1,048,576 characters" if len(question) > 3 else "is empty"
    assert len(run.refused("query", "--index", index, question, says=says).stderr) < 1000


@pytest.mark.parametrize("url", ["127.0.0.1:1/db#a", "h/db#No Name"])
def test_unopenable_engine_hides_its_password(run: Run, url: str) -> None:
    result = run.refused("query", "a kettle", "--engine", f"postgresql://u:secret@{url}")
    assert "secret" not in result.stderr
