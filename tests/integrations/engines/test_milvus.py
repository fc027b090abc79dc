"""Milvus, by its embedded file: the contracts, and what a server may answer."""

import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from engine_contract import PASSAGES, EngineContract, build, open_index, raised_in_a_child
from fault_rows import FaultRows, Row

pymilvus = pytest.importorskip("pymilvus")
lite = pytest.importorskip("milvus_lite.server_manager").server_manager_instance

from ctxguard import Passage, Route, ScoreKind, Where
from ctxguard.errors import (
    ConfigurationError,
    DataError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines import milvus
from ctxguard.integrations.engines.address import EngineAddress
from ctxguard.integrations.engines.engine import LegQuery
from ctxguard.integrations.engines.retriever import EngineRetriever

_names = count(1)


class _File:
    """One file for the module: opening one takes longer than a test."""

    path: ClassVar[Path]

    def url(self, name: str) -> str:
        return f"milvus://{self.path}#{name}"


@pytest.fixture(scope="module", autouse=True)
def _file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    _File.path = tmp_path_factory.mktemp("milvus") / "indexes.db"
    yield
    lite.release_server(str(_File.path))


def _built(passages: Sequence[Passage] = PASSAGES, server: str | None = None) -> EngineRetriever:
    url = f"{server or f'milvus://{_File.path}'}#own_{next(_names)}"
    return build(url, passages, signals="none")


@pytest.fixture(scope="module")
def retriever(_file: None) -> Iterator[EngineRetriever]:
    """An index that no test changes."""
    with _built() as built:
        yield built


class TestEngine(_File, EngineContract):
    bm25_factor = milvus.K1 + 1.0

    def unreachable_retriever(self) -> Any:
        built = _built(self.PASSAGES[:1])
        built.close()
        built._engine.address = EngineAddress.parse("milvus://127.0.0.1:1?timeout=0.2")
        return built


class TestFaultRows(FaultRows):
    """What the client may return for the dense leg."""

    @pytest.fixture(autouse=True)
    def _client(self, retriever: EngineRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index, self.monkeypatch = retriever, monkeypatch

    def retriever(self, found: Sequence[Row], score_kind: str) -> Any:
        _answer(self.monkeypatch, [list(map(_hit, found))])
        return self.index.on_route(Route.DENSE)

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_distances_are_turned_round(self, sign: float) -> None:
        """A cluster gives BM25, and a file minus BM25."""
        found = [Row(f"d{at}", "A text.", sign * size) for at, size in enumerate([9.5, 3.0, 0.0])]
        _answer(self.monkeypatch, [list(map(_hit, found))])
        ranking = self.index.on_route(Route.LEXICAL).retrieve("a text")
        assert ranking.kind is ScoreKind.RATIO
        assert dict(zip(ranking.passage_ids, ranking.scores, strict=True)) == {"d0": 9.5, "d1": 3.0}


def _answer(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    def search(self: Any, name: str, **arguments: Any) -> object:
        assert arguments["output_fields"]
        return answer

    monkeypatch.setattr(pymilvus.MilvusClient, "search", search)


def _hit(row: Row) -> dict[str, Any]:
    entity = {"passage_id": row.id, "title": "", "text": row.text, "metadata": "null"}
    return {"key": "k", "distance": row.score, "entity": entity}


def test_rising_bm25_is_an_order_only(
    retriever: EngineRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Row("d0", "A text.", 0.5), Row("d1", "A text.", 2.0)]
    _answer(monkeypatch, [list(map(_hit, found))])
    ranking = retriever.on_route(Route.LEXICAL).retrieve("a text")
    assert (ranking.passage_ids, ranking.kind) == (("d0", "d1"), ScoreKind.RANK)


@pytest.mark.parametrize("answer", [None, [], [[], []], [[None]], [["text"]], "text", [3]])
def test_unreadable_answer_is_an_outage(
    retriever: EngineRetriever, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    _answer(monkeypatch, answer)
    with pytest.raises(StageError, match="milvus"):
        retriever.retrieve("foxes")


class _Code:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        ((100, "collection not found"), ConfigurationError, "no index with that name"),
        ((8, "quota"), OverloadedError, "rate limit"),
        ((_Code("UNAUTHENTICATED"), "no"), ConfigurationError, "CTXGUARD_ENGINE_KEY"),
        ((1100, "auth check failure, please check"), ConfigurationError, "CTXGUARD_ENGINE_KEY"),
        ((_Code("DEADLINE_EXCEEDED"), "late"), StageError, "no answer in time"),
        ((65535, "the text was: secret"), StageUnavailableError, "error 65535"),
        ((_Code("UNAVAILABLE"), "secret"), StageUnavailableError, "cannot be reached"),
    ],
)
def test_server_errors_are_typed_unquoted(
    retriever: EngineRetriever,
    monkeypatch: pytest.MonkeyPatch,
    raised: tuple[Any, str],
    expected: type[Exception],
    said: str,
) -> None:
    def search(*_: Any, **__: Any) -> None:
        raise pymilvus.MilvusException(*raised)

    monkeypatch.setattr(pymilvus.MilvusClient, "search", search)
    with pytest.raises(expected, match=said) as caught:
        retriever.retrieve("foxes")
    assert "secret" not in str(caught.value)


def test_timeout_while_reading_all_is_said(
    retriever: EngineRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pages:
        asked = 0

        def next(self) -> list[dict[str, Any]]:
            self.asked += 1
            if self.asked == 2:
                raise pymilvus.MilvusException(_Code("DEADLINE_EXCEEDED"), "late")
            return [{"passage_id": "p", "revision": 1}]

        def close(self) -> None:
            self.asked = -1

    pages = Pages()
    monkeypatch.setattr(pymilvus.MilvusClient, "query_iterator", lambda *_, **__: pages)
    with pytest.raises(StageError, match="no answer in time"):
        retriever.update(PASSAGES)
    assert pages.asked == -1


def test_server_is_used_by_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milvus Lite serves its file over a port as a cluster does, without an index of arrays."""
    monkeypatch.setattr(milvus, "_INDEXES", milvus._INDEXES_OF_FILE)
    host = lite.start_and_get_uri(str(_File.path)).partition("://")[2]
    with _built(server=f"milvus://user:secret@{host}/default?timeout=20") as built:
        assert "secret" not in repr(built._engine.__dict__) + str(built.fingerprint())
        found = built.retrieve("kettles and ladders", where=Where(tenant="b"))
        assert {each.metadata["tenant"] for each in map(found.passages.__getitem__, range(3))} == {
            "b"
        }
        assert (built.delete([PASSAGES[0].passage_id]), len(built)) == (1, len(PASSAGES) - 1)


def _refused(*_: Any, **__: Any) -> None:
    raise pymilvus.MilvusException(1100, "no sparse\n\u202evectors " + "x" * 1_000)


def test_refused_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    url = _File().url("refused")
    with monkeypatch.context() as patched:
        patched.setattr(pymilvus.MilvusClient, "create_index", _refused)
        with pytest.raises(StageUnavailableError, match="error 1100: no sparse vectors x") as told:
            build(url)
    assert len(str(told.value)) < 500
    with build(url) as built:
        assert len(built) == len(PASSAGES)


def test_collection_without_indexes_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a build that was killed before it could remove what it had begun."""
    url = _File().url("begun")
    with monkeypatch.context() as patched:
        patched.setattr(pymilvus.MilvusClient, "create_index", _refused)
        patched.setattr(pymilvus.MilvusClient, "drop_collection", _refused)
        with pytest.raises(StageUnavailableError, match="error 1100"):
            build(url)
    with pytest.raises(ConfigurationError, match="bring it up to date with --update"):
        build(url)
    with open_index(url) as opened:
        opened.upsert(PASSAGES)
        assert len(opened) == len(PASSAGES)
        assert opened.retrieve("kettles").passage_ids


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("v2.3.5-lite", False), ("2.4.23", False), ("v2.5.0", True), ("v3.0", True), ("cloud", True)],
)
def test_a_version_without_bm25_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    """One that names itself otherwise, as a service may, is tried."""
    monkeypatch.setattr(milvus, "_INDEXES", milvus._INDEXES_OF_FILE)
    monkeypatch.setattr(pymilvus.MilvusClient, "get_server_version", lambda *_, **__: version)
    host = lite.start_and_get_uri(str(_File.path)).partition("://")[2]
    if is_taken:
        _built(server=f"milvus://{host}?timeout=20").close()
        return
    with pytest.raises(ConfigurationError, match=f"Milvus {version}, .* requires 2.5 or later"):
        _built(server=f"milvus://{host}?timeout=20")


def test_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StageError, match="milvus"):
            open_index(f"milvus://127.0.0.1:{port}?timeout=0.2#x")


def test_file_without_suffix_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\.db"):
        build("milvus:///tmp/index")


def test_absent_file_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no index with that name"):
        open_index(f"milvus://{tmp_path}/a.db")
    assert not list(tmp_path.iterdir())


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("no database")
    with pytest.raises(StageUnavailableError, match="not a file of Milvus Lite"):
        open_index(f"milvus://{tmp_path}/a.db")


def test_foreign_collection_is_refused() -> None:
    client = pymilvus.MilvusClient(str(_File.path))
    client.create_collection("foreign", dimension=4)
    client.close()
    with pytest.raises(DataError, match="not made by ctxguard"):
        open_index(_File().url("foreign"))


def test_unholdable_is_refused_and_named() -> None:
    long = "é" * (milvus.MAX_BYTES // 2 + 1)
    for passage in (
        Passage("a", long),
        Passage("a", "text", long),
        Passage("a", "text", metadata={"tenant": long}),
        Passage("a", "wait_for " * 6_000),  # its terms take longer than the text
        Passage("a", "text", metadata={"groups": list(range(5_000))}),
    ):
        with pytest.raises(DataError, match="passage 'a'"):
            _built([passage])


def test_longest_text_is_found() -> None:
    text = "violin " + "x" * (milvus.MAX_BYTES - 7)
    with _built([Passage("a", text), *PASSAGES]) as built:
        assert built.passage("a").text == text


def test_quotes_and_brackets_reach_no_filter() -> None:
    odd = ['a" or key != "', "'] or [", "\\", "\n", "%", "$meta"]
    passages = [Passage(each, f"text{n}", metadata={"t": each}) for n, each in enumerate(odd)]
    with _built([*passages, *PASSAGES]) as built:
        for each in odd:
            assert built.passage(each).passage_id == each
            assert built.retrieve("text", where=Where(t=each)).passage_ids == (each,)
        assert (built.delete(odd[:2]), built.known_ids(odd)) == (2, set(odd[2:]))


def test_split_terms_are_matched_whole() -> None:
    passages = [Passage("a", "asyncio.wait_for timeout"), Passage("b", "wait, for a timeout")]
    with _built(passages) as built:
        found = built.on_route(Route.LEXICAL).retrieve("wait_for")
        assert found.passage_ids[0] == "a"
        assert found.scores[0] > (found.scores[1] if len(found) > 1 else 0.0)
        assert len(built.on_route(Route.LEXICAL).retrieve("for")) == 0


def test_child_learns_file_is_its_parents(retriever: EngineRetriever) -> None:
    engine = retriever._engine
    assert "forked" in raised_in_a_child(engine.count)
    assert engine.count() == len(PASSAGES)
    vector = np.ones(engine.settings.dimension, np.float32)
    assert len(engine.search(LegQuery(None, vector, 3))["dense"]) == 3


# The package leaves sockets open with which it looks for free ports.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
class TestOldServer:
    """Milvus 2.3.5, a real server that is too old for an index."""

    @pytest.fixture
    def url(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """The URL of an index on a server that this class starts; it unpacks 450 MB."""
        old = pytest.importorskip("milvus", reason="the package milvus 2.3.5 is the server")
        folder = tmp_path_factory.mktemp("milvus_server")
        running = old.MilvusServer(old.MilvusServerConfig(data_dir=str(folder)))
        try:
            running.start()
            yield f"milvus://127.0.0.1:{running.listen_port}#index"
        finally:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def test_refused_build_leaves_nothing(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """By its version, and as a server would whose version says less than it cannot do."""
        told = r"Milvus v2\.3\.5.* requires 2\.5 or later"
        for error, said in (
            (ConfigurationError, told),
            *[(StageUnavailableError, r"error 1100: create index on .* field")] * 2,
        ):
            with pytest.raises(error, match=said):
                build(url)
            host = url.partition("://")[2].partition("#")[0]
            with closing(pymilvus.MilvusClient(f"http://{host}", dedicated=True)) as client:
                assert list(client.list_collections()) == []
            monkeypatch.setattr(milvus, "_LEAST_VERSION", (2, 0))
