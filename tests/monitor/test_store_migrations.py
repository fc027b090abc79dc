"""A store of an older release opens under this one with all that it holds."""

import json
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from storing import NOW, OpenStore, entry

from ctxguard.errors import StoreSchemaError
from ctxguard.monitor.estimation.terms import table_of
from ctxguard.monitor.store import SampleStore, State, WorkerCounts
from ctxguard.monitor.store.schema import SCHEMA_VERSION, metadata

SCHEMAS = Path(__file__).parent / "schemas"


def engine_for(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))


def former_row(reciprocal_rank: float, audit_probability: float, session: int) -> bytes:
    """A row of estimates as version 1 wrote it: 16 numbers and a session."""
    numbers = [float(place) for place in range(16)]
    numbers[2], numbers[14] = reciprocal_rank, audit_probability
    return struct.pack("<16dq", *numbers, session)


def rows_of_version_1() -> dict[str, list[dict[str, Any]]]:
    """Five samples, of which four are judged, three were picked for labels and one has one.

    Their ids are those that the database gives, from 1.
    """
    sample = {"probability": 0.5, "payload_bytes": 7, "attempts": 0}
    judged = {1: (1.0, 0.0), 2: (0.5, 0.02), 3: (0.0, 0.0), 4: (1.0, 0.0)}
    hour = [int(NOW // 3600), 30.0, 0.25]
    return {
        "schema": [{"version": 1}],
        "samples": [
            {
                **sample,
                "request_id": f"r{n}",
                "time_seconds": NOW + n,
                "label_order": n / 10,
                "state": "judged" if n in judged else "pending",
            }
            for n in range(1, 6)
        ],
        "payloads": [{"sample_id": n, "payload": b"payload"} for n in range(1, 6)],
        "series": [
            {"name": "judge 1", "summary_bytes": 136},
            {"name": "other 1", "summary_bytes": 8},
        ],
        "judged": [
            {
                "series_id": 1,
                "time_seconds": NOW + n,
                "sample_id": n,
                "label_order": n / 10,
                "summary": former_row(*terms, session=-n),
            }
            for n, terms in judged.items()
        ]
        + [
            {
                "series_id": 2,
                "time_seconds": NOW,
                "sample_id": 9,
                "label_order": 0.5,
                "summary": b"summary.",
            }
        ],
        "verdicts": [{"sample_id": 1, "series_id": 1, "verdicts": '{"p": [1, null]}'}],
        "labels": [
            {
                "request_id": "r1",
                "passage_id": "p",
                "grade": 2,
                "annotator": "ann",
                "time_seconds": NOW,
                "source": "human",
            }
        ],
        "label_queue": [
            {"sample_id": 1, "reason": "random"},
            {"sample_id": 2, "reason": "random"},
            {"sample_id": 3, "reason": "weighted"},
            {"sample_id": 4, "reason": "recall_loss"},
        ],
        "workers": [
            {
                "worker_id": name,
                "host": "host",
                "pid": 7,
                "started_seconds": NOW,
                "seen_seconds": NOW,
                "sampled": 9,
                "stored": 5,
                "lost": '{"queue_full": 1}',
                "closed": closed,
            }
            for name, closed in (("lives", False), ("ended", True))
        ],
        "state": [
            {"key": "budget judge 1", "value": json.dumps({"hour": hour, "day": [7, 40, 0]})},
            {"key": "budget other", "value": "no JSON"},
            {"key": "alarms", "value": "kept"},
        ],
    }


@pytest.fixture
def former_url(shared_store_url: str) -> str:
    """A store that version 1 made and filled."""
    engine = engine_for(shared_store_url)
    ddl = (SCHEMAS / f"version_1.{engine.dialect.name}.sql").read_text()
    statements = "\n".join(line for line in ddl.splitlines() if not line.startswith("--"))
    with engine.begin() as connection:
        for statement in filter(str.strip, statements.split(";")):
            connection.exec_driver_sql(statement)
        former = sa.MetaData()
        former.reflect(connection)
        for name, rows in rows_of_version_1().items():
            for row in rows:
                connection.execute(sa.insert(former.tables[f"ctxguard_{name}"]).values(row))
    engine.dispose()
    return shared_store_url


def rows(url: str, table: str) -> list[dict[str, Any]]:
    engine = engine_for(url)
    with engine.connect() as connection:
        found = connection.execute(sa.select(metadata.tables[f"ctxguard_{table}"])).mappings().all()
    engine.dispose()
    return [dict(row) for row in found]


class TestMigration:
    def test_samples_judgments_and_labels_of_version_1_are_read(
        self, former_url: str, open_store: OpenStore
    ) -> None:
        store = open_store(former_url)
        assert store.states()[State.JUDGED] == 4
        assert store.payloads([5]) == {5: b"payload"}
        assert store.verdicts("judge 1", [1]) == {1: '{"p": [1, null]}'}
        assert [(found, row.grade) for found, row in store.labels()] == [(1, 2)]
        table = table_of(store.judged("judge 1").summaries)
        assert table["session"].tolist() == [-1, -2, -3, -4]
        assert table["reciprocal_rank"].tolist() == [1.0, 0.5, 0.0, 1.0]
        assert table["partial_pool_relevant"].tolist() == [15.0] * 4
        assert table["audited_share"].tolist() == [0.0, 0.05, 0.0, 0.0]
        assert store.judged("other 1").summaries == b"summary."
        assert store.get_state("alarms") == "kept"

    def test_a_migrated_store_is_written_to_like_a_new_one(
        self, former_url: str, open_store: OpenStore
    ) -> None:
        store = open_store(former_url)
        store.append("new", [entry(7)], WorkerCounts(1))
        [sample_id] = store.find("r7")
        assert sample_id > 5
        store.append("lives", [entry(8)], WorkerCounts(10, {"queue_full": 1}))
        assert store.stored_count("lives") == 6
        claimed = store.claim("m", 9, lease_seconds=1.0)
        assert [one.sample_id for one in claimed] == [5, sample_id, sample_id + 1]

    def test_picks_for_labels_become_picks_with_a_probability(
        self, former_url: str, open_store: OpenStore
    ) -> None:
        store = open_store(former_url)
        assert store.label_queue() == [(4, "recall_loss")]
        picks = {row["pick_id"]: row for row in rows(former_url, "label_picks")}
        assert sorted((row["is_weighted"], row["threshold"]) for row in picks.values()) == [
            (False, 0.2),
            (True, 0.15),
        ]
        found = {row["sample_id"]: row for row in rows(former_url, "picked")}
        # What was told by its first passage weighs 1, the others weigh 2 in the weighted pick.
        assert {n: row["probability"] for n, row in found.items()} == {1: 0.2, 2: 0.3, 3: 0.3}
        assert {n: picks[row["pick_id"]]["is_weighted"] for n, row in found.items()} == {
            1: False,
            2: True,
            3: True,
        }
        assert {row["depth"] for row in found.values()} == {"pool"}

    def test_spending_and_what_was_pending_are_carried_over(
        self, former_url: str, open_store: OpenStore
    ) -> None:
        open_store(former_url)
        assert rows(former_url, "budgets") == [
            {"name": "judge 1", "period": "hour 500000", "calls": 30.0, "cost": 0.25},
            {"name": "judge 1", "period": "day 7", "calls": 40.0, "cost": 0.0},
        ]
        pending = {row["worker_id"]: row["pending"] for row in rows(former_url, "workers")}
        assert pending == {"lives": 3, "ended": 0}

    def test_a_migrated_schema_is_that_of_a_new_store(
        self, former_url: str, open_store: OpenStore
    ) -> None:
        open_store(former_url).close()
        migrated = shape(former_url)
        engine = engine_for(former_url)
        with engine.begin() as connection:
            metadata.drop_all(connection)
            metadata.create_all(connection)
        engine.dispose()
        assert migrated == shape(former_url)

    def test_it_is_brought_up_to_date_once(self, former_url: str, open_store: OpenStore) -> None:
        open_store(former_url).close()
        assert [row["version"] for row in rows(former_url, "schema")] == [1, SCHEMA_VERSION]
        open_store(former_url)
        assert len(rows(former_url, "schema")) == 2
        assert len(rows(former_url, "picked")) == 3

    def test_what_migrates_is_loaded_by_an_older_store_alone(self, tmp_path: Path) -> None:
        program = (
            "import sys; from ctxguard.monitor.store import SampleStore; "
            "SampleStore.open(sys.argv[1]); assert 'alembic' not in sys.modules"
        )
        url = f"sqlite:///{tmp_path / 'samples.db'}"
        subprocess.run([sys.executable, "-c", program, url], check=True)

    def test_alembic_finds_nothing_to_do_in_a_new_store(
        self, shared_store_url: str, open_store: OpenStore
    ) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        open_store(shared_store_url)
        engine = engine_for(shared_store_url)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_server_default": True})
            assert compare_metadata(context, metadata) == []
        engine.dispose()


def shape(url: str) -> dict[str, Any]:
    """Every table's columns, keys and indexes, in no order."""
    engine = engine_for(url)
    inspector = sa.inspect(engine)
    found = {
        table: (
            {
                column["name"]: (str(column["type"]), column["nullable"], column["default"])
                for column in inspector.get_columns(table)
            },
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (str(index["name"]), index["column_names"], bool(index["unique"]))
                for index in inspector.get_indexes(table)
            ),
        )
        for table in inspector.get_table_names()
    }
    engine.dispose()
    return found


def content(file: Path) -> list[str]:
    """All tables and rows of a SQLite file."""
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())


class TestHalfMade:
    """What no release leaves behind is refused, and nothing in it is changed."""

    def made(self, file: Path, *statements: str) -> list[str]:
        SampleStore.open(f"sqlite:///{file}").close()
        with closing(sqlite3.connect(file)) as connection, connection:
            for statement in statements:
                connection.execute(statement)
        return content(file)

    @pytest.mark.parametrize(
        ("statements", "problem"),
        [
            (["DELETE FROM ctxguard_schema"], "schema version is None"),
            (["UPDATE ctxguard_schema SET version = 0"], "schema version is 0"),
            (["DROP TABLE ctxguard_judged"], "no table ctxguard_judged"),
            (
                ["UPDATE ctxguard_schema SET version = 1", "DROP TABLE ctxguard_workers"],
                "schema version 1 cannot be brought to 2",
            ),
        ],
        ids=["no version", "an unknown version", "a table is missing", "not what it says"],
    )
    def test_it_is_refused_and_not_touched(
        self, tmp_path: Path, statements: list[str], problem: str
    ) -> None:
        file = tmp_path / "samples.db"
        before = self.made(file, *statements)
        with pytest.raises(StoreSchemaError, match=problem):
            SampleStore.open(f"sqlite:///{file}")
        assert content(file) == before
        assert not list(tmp_path.glob("*.corrupt-*"))

    def test_so_it_is_on_postgresql(self, postgresql_url: str, open_store: OpenStore) -> None:
        import psycopg

        open_store(postgresql_url)
        with psycopg.connect(postgresql_url) as connection:
            connection.execute("DROP TABLE ctxguard_schema")
        with pytest.raises(StoreSchemaError, match="no table ctxguard_schema"):
            SampleStore.open(postgresql_url)
