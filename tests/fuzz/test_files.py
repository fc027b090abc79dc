"""Whatever a file holds, its reader returns or raises an error of ctxguard's own."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.compare.saved_comparison import SavedComparison
from calibration.data.dataset import Query
from calibration.data.frozen_sets import Snapshot, changes, read_snapshot
from calibration.data.golden_sources import read_sources
from calibration.data.readers import (
    read_beir,
    read_corpus,
    read_jsonl,
    read_trec_qrels,
    read_trec_run,
)
from calibration.reader.answers import read_answers
from calibration.reader.saved_utilities import load_utilities
from calibration.replay import replay
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind
from ctxguard.errors import CtxguardError
from ctxguard.guard import ContextGuard
from ctxguard.monitor.alarms import AlarmState
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector
from ctxguard.monitor.judges.reply import read_reply
from ctxguard.monitor.labels.files import read_feedback_file, read_label_file
from ctxguard.monitor.sampling.inclusion import InclusionDesign
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import Sample
from ctxguard.profile.schema import Profile
from ctxguard.retrieval import HybridRetriever
from ctxguard.signals.ranker import FORMAT, Ranker
from ctxguard.testing import WordHashEmbedder, WordTokenEmbedder
from tests.core.test_profile import PROFILE
from tests.fuzz.mutations import EXAMPLES, damaged, fuzzed, handled

UTILITIES = (
    b'{"format": "ctxguard utilities 1", "reader": "r", "utilities": {"relevant": 1.0},'
    b' "fitted": ["distractor"], "fit": {"n_answers": 1, "n_queries": 1}}'
)
Read = Callable[[Path], object]

ALARMS = AlarmState(PROFILE)


def _ranker() -> bytes:
    ranker = Ranker.default()
    data = {"full": dict(ranker.full), "text": dict(ranker.text), "trained_on": ["a"]}
    return json.dumps({"format": FORMAT, **data}).encode()


QUERIES = b'{"_id": "q1", "text": "how?"}\n{"_id": "q2", "text": "why?", "metadata": {"a": [1]}}\n'
LABELLED = (
    b'{"query_id": "q1", "text": "how?", "relevant": {"a": 2, "b": 0}, "distractors": ["c"]}\n'
    b'{"query_id": "q2", "text": "why?", "relevant": ["b"], "keywords": ["x y"]}\n'
)
LABELS = (
    b'{"request_id": "r", "passage_id": "p", "grade": 0, "negative": "distractor"}\n'
    b'{"request_id": "r", "passage_id": "q", "grade": 2}\n'
)
CSV = b'request_id,passage_id,grade,negative\r\nr,p,0,distractor\r\n"\'1","q\nq",2,\r\n'


GOLDEN = (
    b'{"query_id": "q", "query": "how?", "passage_id": "a", "grade": 2, "annotator": "m"}\n'
    b'{"query": "why?", "count": 3, "date": "2026-01-31", "note": "n", "metadata": {"a": [1]}}\n'
    b'{"query": "why?", "passage_id": "b", "distractor": "hard", "source": "human"}\n'
)
GOLDEN_CSV = b'query,passage_id,grade,who,when\r\n"how, then?",a,2,m,2026-01-31\r\nwhy?,b,,,\r\n'


def _golden(path: Path) -> object:
    return read_sources([path], source="human")


def _alarms(path: Path) -> object:
    return ALARMS.restore(path.read_bytes().decode("utf-8", "replace"))


def _corpus(path: Path) -> object:
    return list(read_corpus(path))


def _labels(path: Path) -> object:
    return read_label_file(path, "me", 1.0, 3)


def _feedback(path: Path) -> object:
    return read_feedback_file(path, 1.0)


READERS: dict[str, tuple[str, bytes, Read]] = {
    "profile": ("p.json", PROFILE.to_json().encode(), Profile.load),
    "corpus": (
        "c.jsonl",
        b'{"_id": "a", "text": "x", "title": "t"}\n{"id": 1, "text": ""}\n',
        _corpus,
    ),
    "labelled queries": ("d.jsonl", LABELLED, read_jsonl),
    "qrels": ("q.txt", b"q1 0 a 1\nq1 0 b 0\n", read_trec_qrels),
    "run": ("r.txt", b"q1 Q0 a 1 2.5 tag\nq1 Q0 b 2 1.5 tag\n", read_trec_run),
    "labels": ("l.jsonl", LABELS, _labels),
    "labels as CSV": ("l.csv", CSV, _labels),
    "feedback": (
        "f.jsonl",
        b'{"request_id": "r", "kind": "cited", "passage_ids": ["a"], "time": 1.5}\n',
        _feedback,
    ),
    "answers": (
        "a.jsonl",
        b'{"query_id": "q", "passages": ["a"], "correct": true}\n',
        read_answers,
    ),
    "comparison": (
        "c.json",
        b'{"data": "d", "dataset_digest": "x", "utilities": {}, "query_ids": [], "candidates": []}',
        SavedComparison.load,
    ),
    "utilities": (
        "u.json",
        UTILITIES,
        load_utilities,
    ),
    "ranker": ("r.json", _ranker(), Ranker.load),
    "golden labels": ("g.jsonl", GOLDEN, _golden),
    "golden labels as CSV": ("g.csv", GOLDEN_CSV, _golden),
    "alarms": ("alarms.json", ALARMS.to_json().encode(), _alarms),
    "reply of a judge": (
        "reply.json",
        b'{"choices": [{"message": {"content": "{\\"grade\\": 2}"}}], "usage": {}}',
        lambda path: read_reply(path.read_bytes().decode("utf-8", "replace")),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_by_name(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file_name, content, read = READERS[name]
    file = tmp_path_factory.mktemp("fuzz") / file_name
    for changed in damaged(content):
        file.write_bytes(changed)
        with handled(changed):
            read(file)


SNAPSHOT = (
    Snapshot(
        digest="d", split="test", dataset_digest="x", counts={"n": 1}, rules=(), files={}, notes=()
    )
    .model_dump_json()
    .encode()
)
BEIR = {
    "queries.jsonl": QUERIES,
    "qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq1\ta\t1\nq2\tb\t0\n",
    "distractors.tsv": b"q1\tc\tdistractor\n",
    "pools.jsonl": b'{"query_id": "q1", "passage_ids": ["a", "c"]}\n',
    "snapshot.json": SNAPSHOT,
    "provenance.jsonl": GOLDEN,
}


@pytest.mark.parametrize("name", BEIR)
def test_a_folder_with_one_damaged_file_is_read_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("beir")
    (folder / "qrels").mkdir()
    for each, content in BEIR.items():
        (folder / each).write_bytes(content)
    for changed in damaged(BEIR[name]):
        (folder / name).write_bytes(changed)
        for read in (read_beir, read_snapshot, changes, _golden):
            with handled(changed):
                read(folder)


@pytest.fixture(scope="module", params=["plain", "edited"])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of words alone, or one with sentences, a passage added and one deleted."""
    folder = tmp_path_factory.mktemp("fuzzed") / "index"
    passages = [Passage(f"p{n}", f"A text about {n}. One more.", "", {"n": n}) for n in range(6)]
    retriever = HybridRetriever.build(passages[:5], embedder=EMBEDDERS[request.param])
    if request.param == "edited":
        retriever.add(passages[5:])
        retriever.delete(["p1"])
    retriever.save(folder)
    return folder


EMBEDDERS = {"plain": WordHashEmbedder(), "edited": WordTokenEmbedder()}


def _answer(folder: Path, embedder: WordHashEmbedder) -> object:
    retriever = HybridRetriever.load(folder, embedder=embedder)
    return ContextGuard(retriever, policy=RatioPolicy(k=3)).retrieve("a text about 3").to_dict()


def test_an_index_with_a_damaged_file_under_its_digest_is_searched_or_refused(index: Path) -> None:
    original = (index / "manifest.json").read_bytes()
    manifest = json.loads(original)
    embedder = EMBEDDERS["edited" if "tail" in manifest["parts"] else "plain"]
    _answer(index, embedder)  # compiles the loops
    files = {name: index / manifest["generation"] / name for name in manifest["files"]}
    files["manifest.json"] = index / "manifest.json"
    contents = {name: file.read_bytes() for name, file in files.items()}
    inputs = cycle([(name, damaged(content)) for name, content in contents.items()])
    for name, changes_of in islice(inputs, EXAMPLES):
        changed = next(changes_of)
        try:
            files[name].write_bytes(changed)
            if name != "manifest.json":
                digest = hashlib.sha256(changed).hexdigest()
                described = {**manifest["files"], name: {"bytes": len(changed), "sha256": digest}}
                files["manifest.json"].write_text(json.dumps({**manifest, "files": described}))
            with handled(changed):
                _answer(index, embedder)
        finally:
            files[name].write_bytes(contents[name])
            files["manifest.json"].write_bytes(original)


def test_a_damaged_cache_of_rankings_is_read_or_made_anew(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("cached")
    queries = [Query("q1", "a text")]
    retriever = HybridRetriever.build(
        [Passage(f"p{n}", f"a text about {n}") for n in range(5)], embedder=EMBEDDERS["plain"]
    )
    expected = replay(retriever, queries, depth=3, cache=folder)
    (file,) = (each for each in folder.rglob("*") if each.is_file())
    for changed in damaged(file.read_bytes()):
        file.write_bytes(changed)
        with handled(changed):
            pools = replay(retriever, queries, depth=3, cache=folder)
            assert pools.query_ids == expected.query_ids


def _sample() -> bytes:
    guard = ContextGuard(lambda query, depth: HITS, score_kind=ScoreKind.RATIO, k=1)
    sample = Sample(guard.retrieve("q"), 0.5, 1.0)
    return zlib.decompress(record_of(sample, InclusionDesign()).to_bytes())


HITS = [Hit("a", 2.0, "one"), Hit("b", 1.0, "two")]


def test_a_damaged_sample_is_read_or_refused() -> None:
    for changed in damaged(_sample()):
        for payload in (changed, zlib.compress(changed)):
            with handled(changed):
                SampleRecord.from_bytes(payload).ranking()


def _counter_file() -> bytes:
    key = json.dumps(["jobs", "jobs_total", {"kind": "a"}, "Jobs."]).encode()
    padded = key + b" " * (8 - (len(key) + 4) % 8)
    body = struct.pack(f"i{len(padded)}sdd", len(key), padded, 5.0, 0.0)
    return (struct.pack("ii", len(body) + 8, 0) + body).ljust(512, b"\0")


@pytest.mark.parametrize("name", ["counter_1.db", "gauge_all_1.db", "x.db"])
def test_a_damaged_file_of_a_worker_never_stops_a_scrape(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("workers")
    for changed in damaged(_counter_file()):
        (folder / name).write_bytes(changed)
        with handled(changed):
            assert list(SafeMultiProcessCollector(folder).collect())


NUMBERS = st.floats() | st.integers(-(10**400), 10**400) | st.none() | st.just("1") | st.booleans()


@fuzzed
@given(st.lists(st.builds(Hit, st.text(), NUMBERS, st.text(), st.text()), max_size=6))
def test_odd_hits_are_answered_or_refused(hits: list[Hit]) -> None:
    guard = ContextGuard(lambda query, depth: hits, score_kind=ScoreKind.RATIO, k=3)
    with suppress(CtxguardError):
        json.dumps(guard.retrieve("q").to_dict(), allow_nan=False)


@fuzzed
@given(
    st.lists(st.text(), max_size=4),
    st.lists(NUMBERS, max_size=4) | st.lists(st.floats(), max_size=4).map(np.array),
    st.sampled_from(list(ScoreKind)) | st.text(max_size=5),
    st.none() | st.lists(st.integers(), max_size=3) | st.dictionaries(st.text(), st.integers()),
)
def test_odd_rankings_are_answered_or_refused(
    ids: list[str], scores: object, kind: object, legs: object
) -> None:
    passages = [Passage(each, "text") for each in ids]
    with suppress(CtxguardError):
        ranking = Ranking(tuple(ids), scores, kind, passages, legs=legs)  # type: ignore[arg-type]
        guard = ContextGuard(lambda query, depth: ranking, policy=RatioPolicy(k=3))
        context = guard.retrieve("q")
        json.dumps(context.to_dict(), allow_nan=False)
        assert all(isinstance(each, str) for each in (repr(ranking), context.text))
