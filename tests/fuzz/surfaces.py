"""Every surface that reads what others wrote, as a table: how it is opened, and an odd input of it.

Whatever the input, a surface returns, or raises an error of ctxguard's own.
"""

import asyncio
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import quote, urlencode

import numpy as np
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from calibration.answers import AnswerFile
from calibration.asked_questions import asked_questions
from calibration.calibrate import calibrate
from calibration.calibrate_route import Settings as Choice
from calibration.compare.saved_comparison import SavedComparison
from calibration.data.dataset import Dataset, Query
from calibration.data.golden import Snapshot, changes, read_snapshot
from calibration.data.readers import read_beir, read_corpus, read_jsonl, read_trec_run
from calibration.fit import fit_fusion, fit_relevance, fit_temperature, out_of_fold
from calibration.pool_labels import label
from calibration.replay import replay
from calibration.risk import betting_p_value, betting_upper_bound, fixed_sequence
from ctxguard.core import metrics
from ctxguard.core.assembly import Assembly, assemble
from ctxguard.core.decision import decide
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.render import Template, sanitise
from ctxguard.core.types import Hit, Leg, Passage, Ranking, Route, ScoreKind
from ctxguard.endpoints.failures import CallError
from ctxguard.endpoints.http import Answer
from ctxguard.endpoints.replies import document_of, read_reply
from ctxguard.endpoints.rerank import read_scores
from ctxguard.errors import CtxguardError
from ctxguard.guard import ContextGuard
from ctxguard.monitor.alarms import AlarmState
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.export.multiprocess import SafeMultiProcessCollector
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.prompt import messages, read_grade
from ctxguard.monitor.labels.files import read_label_file
from ctxguard.monitor.redaction import redact
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import Sample, Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.service import Monitor, WatchedProfile
from ctxguard.monitor.store import LabelRow, SampleStore, schema
from ctxguard.profile.schema import Profile, RouteProfile
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.chunks import chunked
from ctxguard.retrieval.models.window import PassageWindow
from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings
from tests.command import invoke
from tests.core.test_profile import PROFILE
from tests.doubles import WordTokenEmbedder
from tests.fuzz.inputs import altered, body, changed, number, text, value
from tests.profiles import profile_with


class Input(NamedTuple):
    """One input of a surface.

    Attributes:
        shown: What a failure shows of it.
        size: In bytes.
        run: Gives it to the surface.
    """

    shown: object
    size: int
    run: Callable[[], object]


Make = Callable[[Random], Input]
"""Makes another input."""
Open = Callable[[Path, ExitStack], Make]
"""Opens a surface, with a folder of its own; what it opens is closed with the stack."""


class Surface(NamedTuple):
    """What reads the inputs.

    Attributes:
        open: Opens it.
        is_slow: Whether an input takes tens of milliseconds: it is tried as often as it must be.
    """

    open: Open
    is_slow: bool = False


SURFACES: dict[str, Surface] = {}


def _surface(name: str, *, is_slow: bool = False) -> Callable[[Open], Open]:
    def add(opened: Open) -> Open:
        SURFACES[name] = Surface(opened, is_slow)
        return opened

    return add


def _stateless(name: str, *, is_slow: bool = False) -> Callable[[Make], Make]:
    """Adds a surface that needs neither a folder nor anything open."""

    def add(make: Make) -> Make:
        SURFACES[name] = Surface(lambda folder, closing: make, is_slow)
        return make

    return add


def _called(call: Callable[..., object], *arguments: object) -> Input:
    return Input(arguments, len(repr(arguments)), lambda: call(*arguments))


# Files that a user names.

HITS = [Hit("a", 2.0, "one"), Hit("b", 1.0, "two")]
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
    SURFACES[f"file: {_name}"] = Surface(_reader({_file: _content}, _of_file))
SURFACES["file: folder of labelled queries"] = Surface(_reader(BEIR, _folder))


# Files that ctxguard wrote.


@_surface("file: index", is_slow=True)
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


@_surface("file: sample")
def _sample(folder: Path, closing: ExitStack) -> Make:
    guard = ContextGuard(lambda query, depth: HITS, score_kind=ScoreKind.RATIO, k=1)
    record = record_of(Sample(guard.retrieve("q"), 0.5, 1.0)).to_bytes()
    content = zlib.decompress(record)

    def make(random: Random) -> Input:
        new = changed(content, random)
        payload = new if random.random() < 0.2 else zlib.compress(new)
        return Input(new, len(new), lambda: SampleRecord.from_bytes(payload).ranking())

    return make


@_surface("file: metrics of a worker")
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


class Judge:
    """Grades every passage 1."""

    name, version, max_grade, exact = "fuzz", "1", 3, False

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        return [Judgment(passage.passage_id, 1) for passage in passages]


NOW = 1_000_000.0


def filled_store(url: str) -> tuple[SampleStore, Monitor]:
    """A store in which every table holds rows, and its monitor."""
    store = SampleStore.open(url, clock=lambda: NOW)
    sampler = Sampler(1.0)
    guard = ContextGuard(lambda query, depth: HITS, score_kind=ScoreKind.RATIO, k=1)
    writer = SampleWriter(sampler, store)
    monitor = Monitor(store, Judge(), watched=WatchedProfile(WATCHED), clock=lambda: NOW)
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


@_surface("file: store", is_slow=True)
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
        lambda: store.verdicts(monitor.series, [1, 2]),
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


# Texts.


def _render(passages: list[Passage], query: str, template: str) -> None:
    rendered = Assembly().render(passages).lower()
    assert rendered.count("<passage") == rendered.count("</passage") == len(passages)
    for passage in passages:
        once = sanitise(passage.text)
        assert sanitise(once) == once
        once.encode()
    content = messages(query, passages[0].text if passages else "")[1]["content"].lower()
    for tag in ("<query", "</query", "<passage", "</passage"):
        assert content.count(tag) == 1
    Template(template).render(passages)


@_stateless("text: rendering")
def _rendering(random: Random) -> Input:
    passages = [
        Passage(text(random), text(random), text(random)) for _ in range(random.randint(0, 3))
    ]
    # Short: a template is a setting of the program, compiled once.
    template = text(random, 6)[:60] + "{text}" + text(random, 6).replace("{", "")[:60]
    return _called(_render, passages, text(random), template)


@_stateless("text: assembly")
def _assembly(random: Random) -> Input:
    hits = [
        Hit(f"p{n}", 1.0 / (n + 1), text(random), text(random)) for n in range(random.randint(0, 6))
    ]
    settings: dict[str, Any] = {
        "order": random.choice(["rank", "edges", "edges", "odd"]),
        "max_tokens": random.choice([None, None, -1, 0, 1, 20, 300, 10**30]),
        "max_passage_chars": random.choice([100_000, 100_000, 0, 10]),
        "truncate": random.random() < 0.5,
        "separator": random.choice(["\n", "", text(random, 4)]),
    }

    def run() -> None:
        ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
        assembly = Assembly(**settings)
        served = assemble(decide(ranking, RatioPolicy(k=4)), assembly)
        assembly.render(served.passages)

    return Input((hits, settings), len(repr(hits)), run)


def _redact(given: str) -> None:
    once = redact(given)
    assert redact(once) == once


@_stateless("text: redaction")
def _redaction(random: Random) -> Input:
    return _called(_redact, text(random))


@_surface("text: chunking")
def _chunking(folder: Path, closing: ExitStack) -> Make:
    letters = [chr(code) for code in range(33, 500)]
    names = ["[UNK]", *letters, *[f"##{letter}" for letter in letters]]
    tokenizer = Tokenizer(
        models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]")  # noqa: S106
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    window = PassageWindow(tokenizer.to_str(), 64)

    def make(random: Random) -> Input:
        passage = Passage(text(random, 3), text(random), text(random, 5))
        return _called(lambda given: list(chunked([given], window)), passage)

    return make


@_stateless("text: reply of a judge")
def _reply(random: Random) -> Input:
    content = b'{"choices": [{"message": {"content": "{\\"grade\\": 2}"}}], "usage": {}}'
    return _called(_answered, changed(content, random), lambda each: read_reply(each, read_grade))


def _answered(body: bytes, read: Callable[[object], object]) -> object:
    try:
        return read(document_of(Answer(200, {}, body), "host"))
    except CallError as error:
        return error.failure


# Functions of a program.


def _run_where(conditions: Any, metadata: object) -> None:
    where = Where(conditions)
    where.allows(metadata)
    assert where.digest
    assert repr(where)


@_stateless("call: Where")
def _where(random: Random) -> Input:
    known = {"tenant": "a", "groups": ["staff", 1, True], text(random, 2): value(random, 1)}
    conditions = value(random) if random.random() < 0.2 else altered(known, random)
    return _called(_run_where, conditions, altered(known, random))


def _numbers(random: Random, most: int = 6) -> list[float]:
    n = random.randint(0, most) if random.random() < 0.95 else random.randint(500, 3000)
    return [number(random) for _ in range(n)]


def _grades(random: Random) -> list[int]:
    n = random.randint(0, 8) if random.random() < 0.95 else random.randint(500, 3000)
    return [random.choice([0, 0, 1, 2, 3, -1, 10**6, True]) for _ in range(n)]


def _worth(given: Mapping[str, float], graded: list[int], judged: list[bool]) -> None:
    utilities = metrics.Utilities(**given)  # type: ignore[arg-type]
    worths = metrics.worths(graded, top_grade=3, judged=judged, utilities=utilities)
    metrics.udcg(worths)


@_stateless("call: metrics")
def _metrics(random: Random) -> Input:
    graded = _grades(random)
    worth = {"relevant": number(random), "distractor": -number(random)}
    call, *arguments = random.choice(
        [
            (metrics.keyword_first_ranks, [text(random, 5)], [text(random), text(random)]),
            (_worth, worth, graded, [random.random() < 0.5 for _ in graded]),
        ]
    )
    return _called(call, *arguments)


def _run_decision(hits: list[Hit], kind: Any, policy: Mapping[str, Any]) -> None:
    ranking = Ranking.from_hits(hits, kind)
    decision = decide(ranking, RatioPolicy(**policy))
    assert (decision.kept_ids, decision.verdicts, repr(decision)) is not None


@_stateless("call: decision")
def _decision(random: Random) -> Input:
    policy = {
        "k": random.choice([1, 3, 10**9, 0, -1]),
        "min_ratio": random.choice([0.0, 0.5, 1.0, number(random)]),
        "temperature": random.choice([1.0, 0.0, number(random)]),
        "min_keep": random.choice([0, 1, 5, -1]),
    }
    hits = [
        Hit(f"p{n // random.choice([1, 1, 2])}", random.choice([score, score, None]))
        for n, score in enumerate(_numbers(random))
    ]
    return _called(_run_decision, hits, random.choice(list(ScoreKind)), policy)


def _guarded(returned: Callable[[], object]) -> None:
    guard = ContextGuard(lambda query, depth: returned(), score_kind=ScoreKind.RATIO, k=3)
    context = guard.retrieve("q")
    json.dumps(context.to_dict(), allow_nan=False)
    assert isinstance(context.text, str)


@_stateless("call: hits and rankings of a retriever")
def _hits(random: Random) -> Input:
    def odd() -> Any:
        return value(random, 1) if random.random() < 0.3 else text(random, 4)

    hits: Any = [
        (odd(), random.choice([1.0, value(random, 0)]), odd(), odd())
        for _ in range(random.randint(0, 6))
    ]
    if random.random() < 0.5:
        made = lambda: [Hit(*each) for each in hits]  # noqa: E731
        return Input(hits, len(repr(hits)), lambda: _guarded(made))
    ids: Any = tuple(odd() for _ in range(random.randint(0, 4)))
    scores: Any = random.choice([np.array(_numbers(random)), _numbers(random), value(random)])
    kind: Any = random.choice([*ScoreKind, odd()])
    legs: Any = random.choice([None, value(random)])
    passages = [Passage("p", "text") for _ in ids]
    return Input(
        (ids, scores, kind, legs),
        len(repr((ids, scores, legs))),
        lambda: _guarded(lambda: Ranking(ids, scores, kind, passages, legs=legs)),
    )


@_stateless("call: risk")
def _risk(random: Random) -> Input:
    losses = [random.choice([0.0, 1.0, random.random()]) for _ in range(random.randint(0, 50))]
    if random.random() < 0.3:
        losses += _numbers(random)
    level = random.choice([0.1, 0.5, number(random)])
    call, *arguments = random.choice(
        [
            (betting_p_value, losses, level),
            (betting_upper_bound, losses, level),
            (fixed_sequence, losses, level),
        ]
    )
    return _called(call, *arguments)


def _pool(random: Random) -> tuple[Any, Dataset]:
    """A retriever that answers a few queries, mostly with the scores of two legs, and labels."""
    rankings, queries, qrels = {}, [], {}
    for at in range(random.randint(1, 14)):
        n = random.randint(0, 8)
        scores = sorted((random.random() for _ in range(n)), reverse=True)
        if random.random() < 0.1:
            scores = [number(random) for _ in range(n)]
        ranking = Ranking.from_hits(
            [Hit(f"p{at}-{i}", score) for i, score in enumerate(scores)], ScoreKind.RATIO
        )
        legs = {}
        if random.random() < 0.9:
            legs = {
                "dense": Leg(np.array([random.random() for _ in range(n)]), ScoreKind.COSINE),
                "lexical": Leg(np.array([random.random() for _ in range(n)]), ScoreKind.RATIO),
            }
        object.__setattr__(ranking, "legs", legs)
        query = Query(f"q{at}", f"question {at}")
        rankings[query.text] = ranking
        queries.append(query)
        qrels[query.query_id] = {f"p{at}-{i}": random.choice([0, 0, 1, 2]) for i in range(n)}

    class Recorded:
        def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
            return rankings[query]

    return Recorded(), Dataset("fuzzed", tuple(queries), qrels)


def _run_fit(retriever: Any, dataset: Dataset) -> None:
    pools = replay(retriever, dataset.queries, depth=8)
    labels = label(pools, dataset)
    for call in (
        lambda: fit_fusion(pools, labels) if pools.legs else None,
        lambda: fit_temperature(pools),
        lambda: fit_relevance(pools, labels),
        lambda: out_of_fold(pools, labels),
    ):
        with suppress(CtxguardError):
            call()


@_stateless("call: fit on a tiny pool", is_slow=True)
def _fit(random: Random) -> Input:
    retriever, dataset = _pool(random)
    return Input(dataset, len(repr(dataset)), lambda: _run_fit(retriever, dataset))


@_stateless("call: calibrate on a tiny pool", is_slow=True)
def _calibrate(random: Random) -> Input:
    retriever, dataset = _pool(random)
    settings: dict[str, Any] = {
        "policy": random.choice(["auto", "ratio", "expected_utility", "odd"]),
        "serving_k": random.choice([1, 3, 0, 10**6]),
        "held_out": random.choice([None, 0.0, 0.5, 1.0]),
        "depth": random.choice([1, 8, 0]),
        "seed": random.choice([0, 1, -1]),
    }
    return Input(
        (dataset, settings),
        len(repr(dataset)),
        lambda: calibrate(retriever, dataset, Choice(**settings), score_kind=ScoreKind.RATIO),
    )


# The rerank protocol and the service.


forms: Any = {
    "cohere": {"results": [{"index": 1, "relevance_score": 0.5}, {"index": 0}]},
    "tei": [{"index": 1, "score": 2.5}, {"index": 0, "score": -1.0}],
}


@_stateless("rerank: answer of a server")
def _answers(random: Random) -> Input:
    form = random.choice(list(forms))
    read = partial(read_scores, n_documents=3, protocol=form)
    return _called(_answered, body(forms[form], random), read)


class _Scores:
    """A scorer that needs no model."""

    fingerprint = "lengths"

    async def ascore(self, query: str, documents: Sequence[str], **options: object) -> Any:
        return np.array([1.0 / (1.0 + len(document)) for document in documents])

    async def aclose(self) -> None:
        pass


class Service:
    """An application of the service in this process, with an index, a scorer and a console."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        passages = [
            Passage(f"p{n}", f"A red fox number {n}. It runs.", "", {"n": n, "kind": "ab"[n % 2]})
            for n in range(30)
        ]
        index = HybridRetriever.build(passages, embedder=WordTokenEmbedder())
        store = f"sqlite:///{folder / 'samples.db'}"
        filled_store(store)[0].close()
        self._loop = asyncio.new_event_loop()
        closing.callback(self._loop.close)
        self._apps = [
            create_app(
                ServiceSettings(store=store, sample_rate=0.0),
                scorer=scorer,  # type: ignore[arg-type]
                retriever=retriever,
                registry=CollectorRegistry(),
            )
            for scorer, retriever in ((_Scores(), None), (None, index))
        ]
        for app in self._apps:
            lifespan = app.app.lifespan_context(app)
            self._loop.run_until_complete(lifespan.__aenter__())
            closing.callback(self._ended, lifespan)

    def _ended(self, lifespan: Any) -> None:
        self._loop.run_until_complete(lifespan.__aexit__(None, None, None))

    def ask(self, method: str, path: str, query: bytes, headers: Any, content: bytes) -> None:
        """Send a request to each application; no answer may be 500."""
        for app in self._apps:
            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "raw_path": quote(path, errors="replace").encode(),
                "query_string": query,
                "headers": headers,
                "client": ("127.0.0.1", 9),
            }
            status = self._loop.run_until_complete(_status(app, scope, content))
            assert 200 <= status < 500 or status in (502, 503), f"status {status}"


async def _status(app: Any, scope: Any, content: bytes) -> int:
    received = iter([{"type": "http.request", "body": content, "more_body": False}])
    status: list[int] = []

    async def receive() -> Any:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    await app(scope, receive, send)
    return status[0]


_DOCUMENTS = ["a red fox", {"text": "it runs"}, "nothing"]
_CANDIDATES = [
    {"id": "a", "score": 0.9, "text": "x", "rank": 1, "signals": {"s": 0.5}, "legs": {"dense": 1}},
    {"id": "b", "score": 0.5, "title": "t", "metadata": {"n": 1}},
]
_KINDS = {"score_kind": "probability", "leg_kinds": {"dense": "cosine"}}
ENDPOINTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "/rerank in Cohere's form": (
        "/v2/rerank",
        {"documents": _DOCUMENTS, "top_n": 2, "model": "m", "k": 1},
    ),
    "/rerank in TEI's form": (
        "/rerank",
        {"texts": ["a", "b"], "raw_scores": True, "return_text": True},
    ),
    "/rerank in Voyage's form": (
        "/v1/rerank",
        {"documents": ["a", "b"], "top_k": 1, "truncation": True},
    ),
    "/v1/score": ("/v1/score", {"model": "m", "text_1": "red fox", "text_2": ["a", "b"]}),
    "/v1/filter": ("/v1/filter", {"candidates": _CANDIDATES, **_KINDS}),
    "/v1/context": ("/v1/context", {"where": {"n": [1, 2], "kind": "a"}, "session_id": "s"}),
}


def _headers(random: Random, content: bytes, kind: bytes = b"application/json") -> Any:
    headers = [
        (b"host", b"127.0.0.1:8765"),
        (b"content-length", str(len(content)).encode()),
        (b"content-type", kind),
    ]
    if random.random() < 0.3:
        name = random.choice([b"x-request-id", b"authorization", b"accept", b"cookie", b"origin"])
        headers.append((name, random.randbytes(random.randint(0, 200)).replace(b"\n", b"")))
    if random.random() < 0.05:
        headers[random.randrange(3)] = (b"content-type", b"text/plain; charset=odd")
    return headers


def _endpoint(name: str) -> Open:
    def opened(folder: Path, closing: ExitStack) -> Make:
        service = Service(folder, closing)
        path, content = ENDPOINTS[name]

        def make(random: Random) -> Input:
            new = body({"query": "red fox", **content}, random)
            headers = _headers(random, new)
            return Input(new, len(new), lambda: service.ask("POST", path, b"", headers, new))

        make(Random(0)).run()
        return make

    return opened


for _name in ENDPOINTS:
    SURFACES[f"http: {_name}"] = Surface(_endpoint(_name), is_slow=True)

_PAGES = ("", "decisions", "request", "label", "label/guide", "static/console.js")
_FORMS = ("sign-in", "sign-out", "label/pick", "label/grade", "absent")
_FIELDS = ("token", "next", "request", "request_id", "sample", "annotator", "grade", "passage", "n")


@_surface("http: pages, forms and odd paths", is_slow=True)
def _pages(folder: Path, closing: ExitStack) -> Make:
    service = Service(folder, closing)

    def make(random: Random) -> Input:
        def fields() -> bytes:
            pairs = [
                (random.choice(_FIELDS), random.choice(["r0", "1", "ann", "a", text(random, 8)]))
                for _ in range(random.randint(0, 5))
            ]
            return urlencode(pairs, errors="replace").encode()

        if random.random() < 0.4:
            method, path = "POST", "/console/" + random.choice(_FORMS)
            content = fields() if random.random() < 0.8 else random.randbytes(300)
            headers = _headers(random, content, b"application/x-www-form-urlencoded")
            headers.append((b"sec-fetch-site", b"same-origin"))
        else:
            own = ["/console/" + page for page in _PAGES]
            other = ["/metrics", "/healthz", "/readyz", "/openapi.json", "/v1/models", "/info"]
            path = random.choice([*own, *other, "/" + text(random, 6), "/console/" + text(random)])
            method, content = random.choice(["GET", "GET", "HEAD", "PUT", "\u00e9"]), b""
            headers = _headers(random, content)
        query = fields()
        return Input(
            (method, path, query, headers, content),
            len(path) + len(query) + len(content),
            lambda: service.ask(method, path, query, headers, content),
        )

    make(Random(0)).run()
    return make


# The command line.

_COMMANDS = (
    "index {corpus.jsonl} --out {new}",
    "index {corpus.jsonl} --out {index} --update",
    "query red --index {index} --profile {profile.json}",
    "query red --index {index} --json",
    "query red --system {system.toml}",
    "evaluate --index {index} --data {data.jsonl} --json",
    "evaluate --run {run.txt} --data {data.jsonl} --system {run.toml}",
    "calibrate --index {index} --data {data.jsonl} --out {new.json}",
    "calibrate --run {run.txt} --data {data.jsonl} --system {run.toml} --out {new.json}",
    "evaluate --index {index} --data {data.jsonl} --candidate all",
    "evaluate --index {index} --data {data.jsonl} --against {comparison.json}",
    "explain r0 --store {store}",
    "explain r0 --store {store} --profile {profile.json} --json",
    "label export --store {store} --out {new.csv}",
    "label import {labels.jsonl} --store {store} --annotator me",
    "label import {labels.csv} --store {store} --annotator me",
    "monitor --store {store} --judge labels --labels {data.jsonl} --once --json",
    "calibrate --store {store} --profile {profile.json} --out {new.json}",
    "golden check {new}",
    "golden freeze {data.jsonl} --out {new}",
    "judge --index {index} --queries {questions.jsonl} --store {store}",
    "golden hard-negatives --index {index} --data {data.jsonl} --out {new.jsonl}",
    "metrics rules",
    "serve --index {index} --port 99999",
    "serve --profile {profile.json} --index {absent}",
)
_CONTENTS = {
    "corpus.jsonl": b"".join(
        b'{"_id": "p%d", "title": "t", "text": "a red fox %d"}\n' % (n, n) for n in range(8)
    ),
    "data.jsonl": b'{"query_id": "q1", "text": "red fox", "relevant": {"p1": 2, "p2": 1}}\n'
    b'{"query_id": "q2", "text": "fox", "relevant": ["p3"], "distractors": ["p4"]}\n',
    "run.txt": b"q1 Q0 p1 1 2.5 tag\nq1 Q0 p2 2 1.5 tag\nq2 Q0 p3 1 1 tag\n",
    "profile.json": PROFILE.to_json().encode(),
    "comparison.json": READERS["comparison"][1],
    "system.toml": b'index = "index"\n[query]\nk = 3\n',
    "run.toml": b'score-kind = "ratio"\n[fingerprint]\nmodel = "m"\n',
    "labels.jsonl": READERS["label file"][1],
    "labels.csv": READERS["label file as CSV"][1],
    "questions.jsonl": QUESTIONS,
}
_OPTIONS = (
    *("--k", "-k", "--depth", "--seed", "--json", "--route", "--split", "--n", "--tenant", "--all"),
    *("--utility", "--held-out", "--fingerprint", "--score-kind", "--policy", "--judge", "--help"),
    *("--profile", "--index", "--data", "--store", "--out", "--report-json", "--odd", "--", "-"),
)


@dataclass
class _Paths:
    """The files that a command names; new ones have a name that no other has."""

    folder: Path
    numbers: Any

    def __call__(self, word: str) -> str:
        if not word.startswith("{"):
            return word
        name = word[1:-1]
        if name == "store":
            return f"sqlite:///{self.folder / 'samples.db'}"
        stem, _, suffix = name.partition(".")
        if stem == "new":
            name = f"new{next(self.numbers)}.{suffix}".rstrip(".")
        return str(self.folder / name)


class _CommandsEmbedder(WordTokenEmbedder):
    """In place of the model that commands open."""

    passage_window = None


@_surface("command line", is_slow=True)
def _command_line(folder: Path, closing: ExitStack) -> Make:
    # A file that an odd argument names is written here.
    closing.enter_context(chdir(folder))
    embedder = _CommandsEmbedder()
    made = mock.Mock(return_value=embedder)

    @contextmanager
    def without_a_model() -> Iterator[None]:
        names = {"SentenceTransformerEmbedder": made}
        with (
            mock.patch.multiple("ctxguard.retrieval.hybrid.retriever", **names),
            mock.patch.multiple("ctxguard.retrieval.models.embedder", **names),
        ):
            yield

    passages = [Passage(f"p{n}", f"a red fox {n}", "t") for n in range(8)]
    HybridRetriever.build(passages, embedder=embedder).save(folder / "index")
    filled_store(f"sqlite:///{folder / 'samples.db'}")[0].close()
    paths = _Paths(folder, count())

    def run(arguments: list[str]) -> None:
        with without_a_model():
            result = invoke(arguments)
        if result.exception is not None:
            raise result.exception
        assert "Traceback" not in result.output
        assert result.exit_code in (0, 1, 2)

    def make(random: Random) -> Input:
        words = random.choice(_COMMANDS).split()
        size = 0
        touched = [word[1:-1] for word in words if word[1:-1] in _CONTENTS]
        for name, content in _CONTENTS.items():
            is_odd = name in touched and random.random() < 0.6
            new = changed(content, random) if is_odd else content
            size += len(new)
            (folder / name).write_bytes(new)
        arguments = [paths(word) for word in words]
        for _ in range(random.choice((0, 0, 0, 0, 1, 2))):
            odd = random.choice(_OPTIONS), random.choice(("0", "-1", "1e999", "x", text(random, 5)))
            arguments[1:1] = odd[: random.randint(1, 2)]
        if random.random() < 0.1:
            del arguments[random.randrange(len(arguments))]
        # Arguments of a process hold no NUL and no lone surrogate that is not a byte.
        arguments = [
            each.replace("\0", "").encode("utf-8", "ignore").decode() for each in arguments
        ]
        return Input(arguments, size + len(repr(arguments)), lambda: run(arguments))

    for name, content in _CONTENTS.items():
        (folder / name).write_bytes(content)
    for words in _COMMANDS:
        run([paths(word) for word in words.split()])
    return make
