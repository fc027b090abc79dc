"""Files that a user names, and files that ctxguard wrote."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from calibration.answers import AnswerFile
from calibration.asked_questions import asked_questions
from calibration.compare.saved_comparison import SavedComparison
from calibration.data.golden import Snapshot, changes, read_snapshot
from calibration.data.readers import read_beir, read_corpus, read_jsonl, read_trec_run
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route, ScoreKind
from ctxguard.errors import CtxguardError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.alarms import AlarmState
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.labels.files import read_label_file
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import LabelRow, SampleStore, schema
from ctxguard.monitor.store.writer import SampleWriter
from ctxguard.profile.schema import Profile, RouteProfile
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.core.test_profile import PROFILE
from tests.doubles import WordTokenEmbedder
from tests.fuzz.inputs import changed
from tests.fuzz.surface import HITS, SURFACES, Input, Make, Open, surface
from tests.profiles import profile_with

WATCHED = profile_with(
    {Route.EXTERNAL: RouteProfile(policy=RatioPolicy(k=1), score_kind=ScoreKind.RATIO)}
)

ALARMS = AlarmState(WATCHED)

QUESTIONS = (
    b'{"query_id": "q", "query": "how?", "passage_id": "a", "grade": 2, "annotator": "m"}\n'
    b'{"query": "why?", "count": 3, "date": "2026-01-31", "note": "n", "metadata": {"a": [1]}}\n'
    b'{"query": "why?", "passage_id": "b", "distractor": "hard_negative", "source": "human"}\n'
)

READERS: Mapping[str, tuple[str, bytes, Callable[[Path], object]]] = {
    "profile": ("p.json", PROFILE.to_json().encode(), Profile.load),
    "corpus": (
        "c.jsonl",
        b'{"_id": "a", "text": "x", "title": "t"}\n{"id": 1, "text": ""}\n',
        lambda file: list(read_corpus(file)),
    ),
    "labelled queries": (
        "d.jsonl",
        (
            b'{"query_id": "q1", "text": "how?", "relevant": {"a": 2}, "distractors": ["c"]}\n'
            b'{"query_id": "q2", "text": "why?", "relevant": ["b"], "keywords": ["x y"]}\n'
        ),
        read_jsonl,
    ),
    "run": ("r.txt", b"q1 Q0 a 1 2.5 tag\nq1 Q0 b 2 1.5 tag\n", read_trec_run),
    "label file": (
        "l.jsonl",
        (
            b'{"request_id": "r", "passage_id": "p", "grade": 0, "negative": "distractor"}\n'
            b'{"request_id": "r", "passage_id": "q", "grade": 2}\n'
        ),
        lambda file: read_label_file(file, "me", 1.0, 3),
    ),
    "label file as CSV": (
        "l.csv",
        b'request_id,passage_id,grade,negative\r\nr,p,0,distractor\r\n"\'1","q\nq",2,\r\n',
        lambda file: read_label_file(file, "me", 1.0, 3),
    ),
    "answers": (
        "a.jsonl",
        b'{"query_id": "q", "pipeline": "today", "reader": "r", "context_digest": "0"}\n',
        lambda file: AnswerFile(file, "r"),
    ),
    "comparison": (
        "c.json",
        b'{"data": "d", "dataset_digest": "x", "utilities": {}, "query_ids": [], "candidates": []}',
        SavedComparison.load,
    ),
    "questions": ("g.jsonl", QUESTIONS, asked_questions),
    "questions as CSV": (
        "g.csv",
        b'query,passage_id,grade\r\n"how, then?",a,2\r\nwhy?,b,\r\n',
        asked_questions,
    ),
    "alarms": (
        "alarms.json",
        ALARMS.to_json().encode(),
        lambda file: ALARMS.restore(file.read_bytes().decode("utf-8", "replace")),
    ),
}

BEIR = {
    "queries.jsonl": b'{"_id": "q1", "text": "how?"}\n{"_id": "q2", "text": "why?"}\n',
    "qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq1\ta\t1\nq2\tb\t0\n",
    "distractors.tsv": b"q1\tc\tdistractor\n",
    "snapshot.json": Snapshot(digest="d", split="test", files={}).model_dump_json().encode(),
}


def _folder(folder: Path) -> None:
    for reader in (read_beir, read_snapshot, changes):
        with suppress(CtxguardError):
            reader(folder)


def _reader(files: Mapping[str, bytes], read: Callable[[Path], object]) -> Open:
    """Reads files of a folder, one of which is changed."""

    def opened(folder: Path, closing: ExitStack) -> Make:
        (folder / "qrels").mkdir()

        def make(random: Random) -> Input:
            name = random.choice(list(files))
            new = changed(files[name], random)
            for each, content in {**files, name: new}.items():
                (folder / each).write_bytes(content)
            return Input((name, new), len(new), lambda: read(folder))

        return make

    return opened


for _name, (_file, _content, _read) in READERS.items():
    _of_file = partial(lambda read, file, folder: read(folder / file), _read, _file)
    SURFACES[f"file: {_name}"] = _reader({_file: _content}, _of_file)

SURFACES["file: folder of labelled queries"] = _reader(BEIR, _folder)


@surface("file: index", is_slow=True)
def _index(folder: Path, closing: ExitStack) -> Make:
    """Damaged under its digests."""
    embedder = WordTokenEmbedder()
    passages = [Passage(f"p{n}", f"A text about {n}. One more.", "", {"n": n}) for n in range(6)]
    retriever = HybridRetriever.build(passages[:5], embedder=embedder)
    retriever.update(passages[2:])
    retriever.save(folder / "index")
    original = (folder / "index" / "manifest.json").read_bytes()
    manifest = json.loads(original)
    files = {name: folder / "index" / manifest["generation"] / name for name in manifest["files"]}
    files["manifest.json"] = folder / "index" / "manifest.json"
    contents = {name: file.read_bytes() for name, file in files.items()}

    def answer() -> None:
        loaded = HybridRetriever.load(folder / "index", embedder=embedder)
        guard = ContextGuard(loaded, policy=RatioPolicy(k=3))
        guard.retrieve("a text about 3").to_dict()
        guard.retrieve("a text about 3", where=Where(n=3)).to_dict()

    answer()
    damaged = ["manifest.json"]

    def make(random: Random) -> Input:
        files[damaged[0]].write_bytes(contents[damaged[0]])
        damaged[0] = name = random.choice(list(files))
        files["manifest.json"].write_bytes(original)
        new = changed(contents[name], random)
        files[name].write_bytes(new)
        if name != "manifest.json":
            about = {"bytes": len(new), "sha256": hashlib.sha256(new).hexdigest()}
            described = {**manifest["files"], name: about}
            files["manifest.json"].write_text(json.dumps({**manifest, "files": described}))
        # What the others take to be read is not a fault of this one.
        return Input((name, new), len(new) + sum(map(len, contents.values())), answer)

    return make


@surface("file: sample")
def _sample(folder: Path, closing: ExitStack) -> Make:
    guard = ContextGuard(lambda query, depth: HITS, score_kind=ScoreKind.RATIO, k=1)
    record = record_of(guard.retrieve("q"), 0.5, 1.0).to_bytes()
    content = zlib.decompress(record)

    def make(random: Random) -> Input:
        new = changed(content, random)
        payload = new if random.random() < 0.2 else zlib.compress(new)
        return Input(new, len(new), lambda: SampleRecord.from_bytes(payload).ranking())

    return make


@surface("file: metrics of a worker")
def _worker(folder: Path, closing: ExitStack) -> Make:
    key = json.dumps(["jobs", "jobs_total", {"kind": "a"}, "Jobs."]).encode()
    padded = key + b" " * (8 - (len(key) + 4) % 8)
    entry = struct.pack(f"i{len(padded)}sdd", len(key), padded, 5.0, 0.0)
    content = (struct.pack("ii", len(entry) + 8, 0) + entry).ljust(512, b"\0")

    def make(random: Random) -> Input:
        new = changed(content, random)
        name = random.choice(["counter_1.db", "gauge_all_1.db", "x.db"])
        (folder / name).write_bytes(new)
        return Input(
            (name, new), 3 * len(new), lambda: list(SafeMultiProcessCollector(folder).collect())
        )

    return make


NOW = 1_000_000.0


def filled_store(url: str) -> tuple[SampleStore, Monitor]:
    """A store in which every table holds rows, and its monitor."""
    store = SampleStore.open(url, clock=lambda: NOW)
    sampler = Sampler(1.0)
    guard = ContextGuard(lambda query, depth: HITS, score_kind=ScoreKind.RATIO, k=1)
    writer = SampleWriter(sampler, store)
    monitor = Monitor(
        store, LabelJudge({"q": {"a": 1, "b": 1}}), profile=WATCHED, clock=lambda: NOW
    )
    for n in range(4):
        sampler.offer(guard.retrieve("q", request_id=f"r{n}"), 0.5, NOW)
    writer.flush()
    monitor.step()
    to_label(store, monitor.series, 20)
    store.add_labels(
        [LabelRow(f"r{n}", name, 1, None, "me", NOW) for n in range(4) for name in "ab"]
    )
    for n in range(4, 6):
        sampler.offer(guard.retrieve("q", request_id=f"r{n}"), 0.5, NOW)
    writer.flush()
    monitor.maintain()
    return store, monitor


@surface("file: store", is_slow=True)
def _store(folder: Path, closing: ExitStack) -> Make:
    store, monitor = filled_store("sqlite://")
    closing.callback(store.close)
    connection: Any = store._current().raw_connection().driver_connection
    whole = connection.serialize()
    columns = [
        (table.name, column.name)
        for table in schema.metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, schema.StorableText | sa.Text | sa.LargeBinary)
        and not column.primary_key
    ]
    calls: list[Callable[[], object]] = [
        *(monitor.step, monitor.maintain, monitor.own),
        *(store.accounts, store.states, store.fold_accounts),
        lambda: store.labels([1, 2]),
        lambda: store.samples_of("r0"),
        lambda: store.grades(monitor.series, [1, 2]),
        lambda: store.graded(monitor.series),
        lambda: to_label(store, monitor.series, 30, dry_run=True),
    ]

    def read() -> None:
        for call in calls:
            with suppress(CtxguardError):
                call()

    def make(random: Random) -> Input:
        connection.deserialize(whole)
        table, column = random.choice(columns)
        found = connection.execute(f"SELECT {column} FROM {table}").fetchone()  # noqa: S608
        (old,) = found or ("",)
        is_bytes = isinstance(old, bytes)
        new = changed(old if isinstance(old, bytes) else str(old).encode(), random)
        given = new if is_bytes else new.decode("utf-8", "replace")
        connection.execute(f"UPDATE {table} SET {column} = ?", [given])  # noqa: S608
        connection.commit()
        return Input((table, column, new), 10 * len(new), read)

    return make
