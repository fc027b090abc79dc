"""What hostile queries and documents cannot do: spill text into logs and errors, take others down
with them, hide instructions from people, grow without bound, or have code read from a file.
"""

import ast
import asyncio
import hashlib
import json
import logging
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import calibration
import ctxguard
from ctxguard._support.error_text import describe_error
from ctxguard.core.assembly import Assembly
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.render import sanitise
from ctxguard.core.types import Hit, Mode, Passage, Ranking, ScoreKind
from ctxguard.errors import (
    CtxguardError,
    IndexFolderError,
    QueryError,
    StageError,
    StageUnavailableError,
)
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.resilience.bounded_caller import RequestLimits
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.storage import manifest_file
from tests.counted import Counted
from tests.doubles import WordHashEmbedder
from tests.guard.guards import Sampled

DIAGNOSIS = "my-diagnosis-is-secret"
INJECTED = "id\n2026-01-01 ERROR all is lost\x1b[31m\r\x00"
PACKAGES = [Path(package.__path__[0]) for package in (ctxguard, calibration)]
TREES = {
    file: ast.parse(file.read_text(encoding="utf-8"))
    for package in PACKAGES
    for file in sorted(package.rglob("*.py"))
}


def guard_of(answer: object, **settings: Any) -> ContextGuard:
    def search(query: str, *, depth: int) -> object:
        return answer(query) if callable(answer) else answer

    settings.setdefault("policy", RatioPolicy(k=10))
    return ContextGuard(search, **settings)


def hits(n: int = 4) -> list[Hit]:
    return [Hit(f"p{i}", 10.0 - i, f"text number {i} about {DIAGNOSIS}") for i in range(n)]


class Unkind(Mapping[str, object]):
    """Metadata that raises whatever is asked of it, quoting what it holds."""

    def __getitem__(self, key: str) -> object:
        raise RuntimeError(DIAGNOSIS)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(DIAGNOSIS)

    def __len__(self) -> int:
        raise RuntimeError(DIAGNOSIS)


class Unspeakable:
    """Something that cannot be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError(DIAGNOSIS)


def itself() -> dict[str, object]:
    looped: dict[str, object] = {}
    looped["again"] = looped
    return looped


BAD_DOCUMENTS = {
    "no text": {"text": None},
    "a number for a text": {"text": 7},
    "bytes for a text": {"text": b"text"},
    "a title that cannot be written": {"title": Unspeakable()},
    "ten megabytes": {"text": "x" * 10_000_000},
    "a title of ten megabytes": {"title": "x" * 10_000_000},
}
ODD_DOCUMENTS = {
    "lone surrogates": {"text": "half \ud800 a pair", "title": "\udfff"},
    "nothing but controls": {"text": "\x00\x1b\u202e"},
    "white space": {"text": " \n\t"},
    "metadata that raises": {"metadata": Unkind()},
    "metadata that holds itself": {"metadata": itself()},
    "metadata that cannot be written": {"metadata": {"a": Unspeakable(), DIAGNOSIS: object}},
    "metadata that is none": {"metadata": 7},
    "a title that is a number": {"title": 7},
    "an id of controls": {"passage_id": INJECTED},
}


class TestABadDocument:
    @pytest.mark.parametrize("change", BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
    @pytest.mark.parametrize("budget", [None, 10_000])
    def test_costs_itself_and_no_other(self, change: dict[str, Any], budget: int | None) -> None:
        good = hits()
        passages: list[Passage] = [Passage(h.passage_id, h.text) for h in good]
        passages[1] = replace(passages[1], **change)
        ranking = replace(Ranking.from_hits(good, ScoreKind.RATIO), passages=passages)
        context = guard_of(ranking, assembly=Assembly(max_tokens=budget)).retrieve("q?")
        assert [p.text for p in context.passages] == [good[i].text for i in (0, 2, 3)]
        assert sum(context.dropped_by_reason.values()) == 1
        assert all(passage.text in context.text for passage in context.passages)
        json.dumps(context.to_dict(), allow_nan=False)

    @pytest.mark.parametrize("change", ODD_DOCUMENTS.values(), ids=ODD_DOCUMENTS)
    @pytest.mark.parametrize("mode", list(Mode))
    def test_odd_document_is_served_free(self, change: dict[str, Any], mode: Mode) -> None:
        given = hits()
        given[1] = replace(given[1], **change)
        context = guard_of(Ranking.from_hits(given, ScoreKind.RATIO), mode=mode).retrieve("q?")
        assert len(context) == 4
        context.text.encode()
        json.dumps(context.to_dict(), allow_nan=False).encode()


class TestLimits:
    @pytest.mark.parametrize("awaited", [False, True])
    def test_overlong_query_is_not_searched(self, awaited: bool, counted: Counted) -> None:
        asked, sampler = list[str](), Sampled()
        guard = guard_of(asked.append, telemetry=counted.telemetry, sampler=sampler)
        ask: Callable[[str], Context] = (
            (lambda query: asyncio.run(guard.aretrieve(query))) if awaited else guard.retrieve
        )
        with pytest.raises(
            QueryError, match=r"1,000,000 characters, but the limit is 10,000"
        ) as told:
            ask(DIAGNOSIS * 100 + "x" * (1_000_000 - 100 * len(DIAGNOSIS)))
        assert DIAGNOSIS not in str(told.value)
        assert asked == sampler.contexts == []
        assert counted["received_requests"] == counted.failed["invalid_request"] == 1

    def test_the_limit_is_a_setting(self) -> None:
        answer = Ranking.from_hits(hits(), ScoreKind.RATIO)
        for limit, query in ((4, "four"), (200_000, "x" * 150_000)):
            guard = guard_of(answer, limits=RequestLimits(max_query_chars=limit))
            assert len(guard.retrieve(query)) == len(guard.filter(query, answer)) == 4
        with pytest.raises(QueryError, match="max_query_chars"):
            guard_of(None, limits=RequestLimits(max_query_chars=3)).filter("four", answer)

    def test_retrievers_limit_differs_from_guards(self) -> None:
        corpus = [Passage("p", "a text")]
        retriever = HybridRetriever.build(corpus, embedder=WordHashEmbedder())
        telemetry = Telemetry(CollectorRegistry())
        guard = ContextGuard(retriever.with_max_query_chars(10), telemetry=telemetry)
        with pytest.raises(QueryError, match=r"10 \(max_query_chars of the retriever\)"):
            guard.retrieve("x" * 20)
        with pytest.raises(QueryError, match=r"10,000 \(max_query_chars of the guard\)"):
            guard.retrieve("x" * 20_000)

    def test_guards_limit_reaches_the_retriever(self, tmp_path: Path) -> None:
        HybridRetriever.build([Passage("p", "a text")], embedder=WordHashEmbedder()).save(tmp_path)
        loaded = HybridRetriever.load(tmp_path, embedder=WordHashEmbedder())
        telemetry = Telemetry(CollectorRegistry())
        guard = ContextGuard(
            loaded, limits=RequestLimits(max_query_chars=50_000), telemetry=telemetry
        )
        assert guard.retrieve("text " * 9_000).kept_ids == ("p",)

    @pytest.mark.parametrize("query", [None, 7, b"q?", ["q?"]])
    def test_only_text_is_a_query(self, query: Any) -> None:
        with pytest.raises(QueryError, match="must be a string"):
            guard_of(Ranking.from_hits(hits(), ScoreKind.RATIO)).retrieve(query)

    def test_shadow_serves_it_as_given(self) -> None:
        ranking = Ranking.from_hits([Hit("p", 1.0, "x" * 50)], ScoreKind.RATIO)
        assembly = Assembly(max_passage_chars=9)
        assert len(guard_of(ranking, mode="shadow", assembly=assembly).retrieve("q?")) == 1


class Raising:
    """A retriever that fails and quotes what it was asked."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def retrieve(self, query: str, *, depth: int) -> Ranking:
        raise self.kind(f"the backend refused {query!r} and {DIAGNOSIS}")


class QuotingEmbedder(WordHashEmbedder):
    """Encodes passages, and fails on the query, quoting it."""

    def encode_query(self, text: str) -> np.ndarray:
        if text == DIAGNOSIS:
            raise ValueError(f"cannot encode {text!r}")
        return super().encode_query(text)


class QuotingReranker:
    fingerprint = "quoting"

    def score(self, query: str, texts: Sequence[str]) -> np.ndarray:
        raise RuntimeError(f"too long: {texts!r}")


class TestErrorsQuoteNobody:
    @pytest.mark.parametrize(
        "kind", [ValueError, RuntimeError, KeyError, UnicodeError, TimeoutError]
    )
    @pytest.mark.parametrize("awaited", [False, True])
    def test_outage_names_place_and_keeps_cause(self, kind: type[Exception], awaited: bool) -> None:
        guard = ContextGuard(Raising(kind))

        def ask() -> Context:
            return asyncio.run(guard.aretrieve(DIAGNOSIS)) if awaited else guard.retrieve(DIAGNOSIS)

        with pytest.raises(StageUnavailableError, match=kind.__name__) as told:
            ask()
        assert DIAGNOSIS not in str(told.value)
        assert "test_hygiene.py:" in str(told.value)
        assert told.value.stage == "retriever"
        assert isinstance(told.value.__cause__, kind)

    def test_left_out_stage_quotes_no_text(self) -> None:
        """A stage that was left out is told without the query or a passage."""
        corpus = [Passage(f"p{n}", f"a text about {DIAGNOSIS} {n}") for n in range(4)]
        retriever = HybridRetriever.build(corpus, embedder=QuotingEmbedder())
        guard = ContextGuard(retriever.with_reranker(QuotingReranker()))
        context = guard.retrieve(DIAGNOSIS)
        assert [failure.stage for failure in context.failures] == ["dense", "rerank"]
        assert DIAGNOSIS not in str(context.failures)
        assert "diagnosis" not in json.dumps(context.to_dict()["failures"])

    def test_own_errors_keep_their_words(self) -> None:
        assert describe_error(StageError("dense", "gave NaN")) == "StageError: dense: gave NaN"

    @given(st.text(min_size=1))
    def test_a_foreign_message_is_never_repeated(self, text: str) -> None:
        assert describe_error(ValueError(text)) == "ValueError"
        assert describe_error(OSError(text)) == "OSError"
        assert describe_error(FileNotFoundError(2, text)) == (
            "FileNotFoundError (No such file or directory)"
        )


def logging_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, list[ast.ExceptHandler]]]:
    """Every call of a logger's method or of `warnings.warn`, and the handlers around it."""

    def visit(
        node: ast.AST, handlers: list[ast.ExceptHandler]
    ) -> Iterator[tuple[ast.Call, list[ast.ExceptHandler]]]:
        if isinstance(node, ast.ExceptHandler):
            handlers = [*handlers, node]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            named = isinstance(owner, ast.Name | ast.Attribute)
            last = ast.unparse(owner).lower().rsplit(".", 1)[-1] if named else ""
            if "log" in last and node.func.attr in LEVELS:
                yield node, handlers
        for child in ast.iter_child_nodes(node):
            yield from visit(child, handlers)

    yield from visit(tree, [])


LEVELS = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log"}
TEXTS = {"query", "text", "texts", "title", "passage", "passages", "context", "metadata", "prompt"}
BROAD = {"Exception", "BaseException"}


def spilled(call: ast.Call, handlers: list[ast.ExceptHandler]) -> list[str]:
    """What a logging call may write that it must not."""
    found = []
    if call.func.attr == "exception" or any(  # type: ignore[attr-defined]
        keyword.arg in {"exc_info", "stack_info"} for keyword in call.keywords
    ):
        found.append("a traceback, and with it the error's message")
    if not (isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)):
        found.append("a message that is not a literal")
    for argument in call.args[1:]:
        if isinstance(argument, ast.Name | ast.Attribute):
            name = argument.id if isinstance(argument, ast.Name) else argument.attr
            if name in TEXTS:
                found.append(f"a text: {name}")
            for handler in handlers:
                caught = "" if handler.type is None else ast.unparse(handler.type)
                if name == handler.name and (not caught or BROAD & set(caught.split())):
                    found.append("any error's message")
    return found


class TestLogs:
    def test_no_log_call_carries_text(self) -> None:
        """No logging call can carry text or the message of any error."""
        calls = 0
        for source, tree in TREES.items():
            for call, handlers in logging_calls(tree):
                calls += 1
                assert spilled(call, handlers) == [], f"{source}:{call.lineno}"
        assert calls > 5

    @pytest.mark.parametrize(
        ("line", "is_fine"),
        [
            ("_log.warning('failed: %s', type(error).__name__)", True),
            ("_log.warning('failed', exc_info=True)", False),
            ("_log.exception('failed')", False),
            ("_log.warning('failed: %s', error)", False),
            ("_log.warning(message)", False),
            ("self._logger.info('asked %s', request.query)", False),
        ],
    )
    def test_log_check_finds_its_targets(self, line: str, is_fine: bool) -> None:
        source = f"try:\n    work()\nexcept Exception as error:\n    {line}\n"
        ((call, handlers),) = logging_calls(ast.parse(source))
        assert (spilled(call, handlers) == []) == is_fine

    def test_nothing_a_request_brings_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Sampled):
            def offer(self, context: Context, probability: float, seconds: float, /) -> bool:
                raise RuntimeError(f"{context.query} {context.request_id}")

        class BrokenTelemetry(Telemetry):
            def answered(self, *_: object) -> None:
                raise RuntimeError(DIAGNOSIS)

        corpus = [Passage(f"{INJECTED}{n}", f"about {DIAGNOSIS} {n}") for n in range(4)]
        embedded = HybridRetriever.build(corpus, embedder=QuotingEmbedder())
        with caplog.at_level(logging.DEBUG):
            for retriever in (
                embedded.with_reranker(QuotingReranker()),
                Raising(ValueError),
                lambda query, depth: Ranking.from_hits(hits(), ScoreKind.RATIO),
                lambda query, depth: query,
            ):
                for telemetry in (Telemetry, BrokenTelemetry):
                    guard = ContextGuard(
                        retriever, sampler=Broken(), telemetry=telemetry(CollectorRegistry())
                    )
                    try:
                        guard.retrieve(DIAGNOSIS, request_id=INJECTED, session_id=INJECTED)
                    except CtxguardError:
                        continue
        for record in caplog.records:
            message = record.getMessage()
            assert DIAGNOSIS not in message
            assert "all is lost" not in message
            assert message.isprintable()

    def test_unencodable_request_id_fails_nothing(self) -> None:
        context = guard_of(Ranking.from_hits(hits(), ScoreKind.RATIO)).retrieve(
            "half \ud800", request_id="\udfff\n", session_id="\ud800"
        )
        assert len(context) == 4
        json.dumps(context.to_dict()).encode()


# Signs with a glyph of their own, and those without which a script is written differently.
WRITTEN = (
    *range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x180E, 0x200C, 0x200D,
    0x110BD, 0x110CD, *range(0x13430, 0x13440),
)  # fmt: skip


def test_no_hidden_character_is_served() -> None:
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in ("Cc", "Cf") and code not in WRITTEN:
            seen = sanitise(f"a{character}b")
            assert seen in ("ab", "a\nb") or character in "\n\t", f"U+{code:04X}"


SAFE = {"allow_pickle": "False", "weights_only": "True", "trust_remote_code": "False"}
"""Options of those who read files, and the value with which none of these files runs code."""


class TestNoFileRunsCode:
    """Besides: what ruff's ``banned-api`` in pyproject.toml and its S rules find."""

    def test_no_call_runs_a_files_code(self) -> None:
        for source, tree in TREES.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg in SAFE:
                    assert ast.unparse(node.value) == SAFE[node.arg], f"{source}:{node.lineno}"
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in ("compile", "__import__"), f"{source}:{node.lineno}"

    def test_pickled_arrays_are_refused(self, tmp_path: Path) -> None:
        """Even by someone who wrote the manifest to match."""
        folder = tmp_path / "index"
        HybridRetriever.build([Passage("p", "text")], embedder=WordHashEmbedder()).save(folder)
        manifest = json.loads(manifest_file(folder).read_text())
        for name in [name for name in manifest["files"] if name.endswith(".npy")]:
            file = folder / manifest["generation"] / name
            good = file.read_bytes()
            np.save(file, np.array([{"not": "numbers"}], dtype=object), allow_pickle=True)
            changed = json.loads(json.dumps(manifest))
            changed["files"][name] = {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            manifest_file(folder).write_text(json.dumps(changed))
            with pytest.raises(IndexFolderError, match=r"allow_pickle|Python objects"):
                HybridRetriever.load(folder, embedder=WordHashEmbedder())
            file.write_bytes(good)
