"""A store behind PgBouncer in transaction pooling, which lends the server's connections."""

import subprocess
import sys

import pytest
import sqlalchemy as sa
from storing import OpenStore

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.store import Batch, SampleStore, State
from tests.stored import written
from tests.timing import PATIENCE_SECONDS

_WORK = """
import sys
from ctxguard.monitor.store import Batch, LabelRow, SampleStore
from tests.stored import written
url, worker = sys.argv[1:]
with SampleStore.open(url) as store:
    for n in range(40):
        request = f"{worker}-{n}"
        store.append(worker, Batch([written(request)], 1))
        store.add_labels([LabelRow(request, "p", 1, None, worker, float(n))], 3)
        assert store.find([request]), request
        assert len(store.labels(store.find([request]))) == 1
        store.states(), store.series(), store.top_grade()
"""


def test_processes_share_connections(pgbouncer_url: str, open_store: OpenStore) -> None:
    """Of three processes none meets what another has prepared, and all begin the store together."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _WORK, pgbouncer_url, f"w{n}"], stderr=subprocess.PIPE
        )
        for n in range(3)
    ]
    for process in running:
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, err.decode()
    assert open_store(pgbouncer_url).states()[State.PENDING] == 120


def test_writer_waits_as_elsewhere(pgbouncer_url: str, open_store: OpenStore) -> None:
    """And what bounds it stays with no connection of the server."""
    store = open_store(pgbouncer_url)
    for _ in range(8):
        store.states()
    engine = sa.create_engine(
        sa.make_url(pgbouncer_url).set(drivername="postgresql+psycopg"),
        connect_args={"prepare_threshold": None},
    )
    with engine.connect() as one, engine.connect() as two:
        found = {each.execute(sa.text("SHOW lock_timeout")).scalar() for each in (one, two)}
    engine.dispose()
    assert found == {"0"}
    with store.transaction(writes=True) as connection:
        assert connection.execute(sa.text("SHOW lock_timeout")).scalar() == "5s"


class TestUrls:
    @pytest.mark.parametrize(
        "change",
        [
            "postgres://",
            "?pgbouncer=true",
            "?schema=public",
            "?statement_cache_size=0&sslmode=prefer",
        ],
    )
    def test_of_other_clients_are_taken(
        self, postgresql_url: str, open_store: OpenStore, change: str
    ) -> None:
        url = postgresql_url
        url = url.replace("postgresql://", change) if "://" in change else f"{url}&{change[1:]}"
        store = open_store(url)
        store.append("w", Batch([written()], 1))
        assert store.states()[State.PENDING] == 1

    @pytest.mark.parametrize(
        ("option", "says"),
        [
            ("schema=mine", "ALTER ROLE … SET search_path = mine"),
            ("connection_limit=5", "does not accept the URL's option 'connection_limit'"),
            ("sslaccept=strict", "leave it out"),
        ],
    )
    def test_unsupported_options_name_the_mend(self, option: str, says: str) -> None:
        with pytest.raises(ConfigurationError, match=says) as refusal:
            SampleStore(f"postgres://someone:secret@127.0.0.1/db?{option}")
        assert "secret" not in str(refusal.value)
