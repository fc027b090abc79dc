"""Stores that are full, locked, read-only, damaged, of another release, or not there at all."""

import random
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from storing import OpenStore

from ctxguard.errors import (
    ConfigurationError,
    StoreCorruptError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreSchemaError,
    StoreUnavailableError,
)
from ctxguard.monitor.store import Batch, SampleStore, State
from ctxguard.monitor.store import engine as engine_module
from ctxguard.monitor.store.schema import SCHEMA_VERSION
from tests.stored import written

MIB = 2**20


def append(store: SampleStore, n: int = 1, *, size: int = 100) -> None:
    chance = random.Random(n)
    entries = [written(f"r{i}", payload=chance.randbytes(size)) for i in range(n)]
    store.append("w", Batch(entries, n))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "samples.db"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None:
        pytest.skip("this system has no mount command")
    options = ["-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run([mount, *options], check=False, capture_output=True).returncode:
        pytest.skip("only the administrator may make a small disk")
    try:
        yield folder
    finally:
        subprocess.run([unmount, "--lazy", str(folder)], check=True)


def test_full_disk_says_mend_losing_nothing(disk: Path, open_store: OpenStore) -> None:
    """A full disk is an error that says what to do; freed space is used again."""
    filler = disk / "another program's"
    filler.write_bytes(bytes(16 * MIB))
    store, stored = open_store(f"sqlite:///{disk / 'samples.db'}"), 0
    with suppress(StoreFullError):
        for _ in range(1_000):
            append(store, 5, size=20_000)
            stored += 5
    assert stored > 100
    with pytest.raises(StoreFullError, match="free some space"):
        append(store, 200, size=20_000)
    assert store.accounts().stored == store.states()[State.PENDING] == stored
    filler.unlink()
    append(store, 3)
    assert store.accounts().stored == store.states()[State.PENDING] == stored + 3


class TestLocked:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_module, "BUSY_SECONDS", 0.1)

    def test_writer_waits_only_so_long(self, file: Path, open_store: OpenStore) -> None:
        store = open_store(f"sqlite:///{file}")
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreLockedError, match="use fewer writers"):
                append(store)
            assert store.states()[State.PENDING] == 0  # reading needs no lock
            other.execute("ROLLBACK")
        append(store)

    def test_postgresql_waits_only_so_long(
        self, postgresql_url: str, open_store: OpenStore
    ) -> None:
        import psycopg

        store = open_store(postgresql_url)
        with psycopg.connect(postgresql_url) as other:
            other.execute("LOCK TABLE ctxguard_samples")
            with pytest.raises(StoreLockedError, match="55P03"):
                append(store)
            other.rollback()
        append(store)


class TestReadOnly:
    @pytest.mark.parametrize("is_new", [True, False])
    def test_read_only_disk_says_mend(
        self, disk: Path, open_store: OpenStore, is_new: bool
    ) -> None:
        """A read only disk is an error that says what to do."""
        url = f"sqlite:///{disk / 'samples.db'}"
        if not is_new:
            open_store(url).close()
        subprocess.run([str(shutil.which("mount")), "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StoreReadOnlyError, match="writable for user"):
            append(open_store(url))

    def test_read_only_role_is_told(self, postgresql_url: str, open_store: OpenStore) -> None:
        url = postgresql_url.replace(
            "csearch_path", "cdefault_transaction_read_only%3Don%20-csearch_path"
        )
        open_store(postgresql_url)
        with pytest.raises(StoreReadOnlyError, match="25006"):
            append(open_store(url))


class TestCorrupt:
    @pytest.mark.parametrize(
        "content", [b"not a database at all" * 500, b"SQLite format 3\0" * 500]
    )
    def test_foreign_file_stays_untouched(self, file: Path, content: bytes) -> None:
        """A file that is not a database is an error and stays as it is."""
        file.write_bytes(content)
        with pytest.raises(StoreCorruptError, match="move it away with its -wal and -shm files"):
            SampleStore.open(f"sqlite:///{file}")
        assert file.read_bytes() == content
        assert [part.name for part in file.parent.iterdir()] == [file.name]

    def test_damage_errors_until_moved_away(self, file: Path, open_store: OpenStore) -> None:
        """Damage that shows in use is an error until the file is moved away."""
        store = open_store(f"sqlite:///{file}")
        append(store, 50, size=5_000)
        store.close()
        first_page = file.read_bytes()[:4_096]
        file.write_bytes(first_page + random.Random(0).randbytes(file.stat().st_size - 4_096))
        for _ in range(2):
            with pytest.raises(StoreCorruptError):
                append(store, 3)
        for part in list(file.parent.iterdir()):
            part.rename(part.with_name(f"kept {part.name}"))
        append(store, 3)
        assert store.states()[State.PENDING] == store.accounts().stored == 3

    @pytest.mark.parametrize("is_closed", [False, True])
    def test_deleted_store_begins_anew_once(
        self, file: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture, is_closed: bool
    ) -> None:
        """A store that was deleted is begun anew and that is said once."""
        store = open_store(f"sqlite:///{file}")
        append(store, 5)
        if is_closed:
            store.close()
        for part in file.parent.iterdir():
            part.unlink()
        append(store, 2)
        assert store.states()[State.PENDING] == 2
        assert file.exists()
        (said,) = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert said.startswith(f"{file} was deleted or replaced while it was in use")


VERSION = "UPDATE ctxguard_schema SET version = "
READS = f", but this release reads {SCHEMA_VERSION}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (f"{VERSION} 1", f"version 1{READS}"),
        (f"{VERSION} 99", f"version 99{READS}"),
        ("DROP TABLE ctxguard_labels", "it has no table ctxguard_labels"),
        ("CREATE TABLE theirs (id)", "it has no table ctxguard_"),
    ],
    ids=["a former release", "a later release", "half a copy", "another program"],
)
def test_other_schema_is_refused_untouched(file: Path, change: str, says: str) -> None:
    """Also by a process that has used the store before."""
    store = SampleStore(f"sqlite:///{file}")
    if "theirs" not in change:
        append(store)
        store.close()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(change)
    before = file.read_bytes()
    for use in (store.check, lambda: append(store)):
        with pytest.raises(StoreSchemaError, match=says) as caught:
            use()
    assert caught.value.known == SCHEMA_VERSION
    assert VERSION not in change or caught.value.found == int(change.removeprefix(VERSION))
    assert file.read_bytes() == before
    assert [part.name for part in file.parent.iterdir()] == [file.name]


class TestUnavailable:
    @pytest.mark.parametrize(
        ("place", "said"),
        [("nowhere/samples.db", "in a folder that exists"), ("", "name a file")],
    )
    def test_missing_folder_is_named(self, tmp_path: Path, place: str, said: str) -> None:
        """A folder that is missing or in place of a file is named."""
        with pytest.raises(StoreUnavailableError, match=said):
            SampleStore.open(f"sqlite:///{tmp_path / place}")

    def test_silent_server_hides_its_password(self) -> None:
        with pytest.raises(StoreUnavailableError, match="cannot be reached") as caught:
            SampleStore.open("postgresql://me:secret@127.0.0.1:1/samples")
        assert "secret" not in str(caught.value)

    def test_a_connection_that_broke_is_replaced(
        self, postgresql_url: str, open_store: OpenStore
    ) -> None:
        import psycopg

        store = open_store(postgresql_url)
        append(store)
        with psycopg.connect(postgresql_url, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                "pg_backend_pid() AND query LIKE '%ctxguard%'"
            )
        append(store)
        assert store.accounts().stored == 2


class TestPermissions:
    def test_new_store_is_private(self, file: Path, open_store: OpenStore) -> None:
        """Only its user may read a new store and what lies beside it."""
        append(open_store(f"sqlite:///{file}"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
        assert set(modes) == {f"{file.name}{end}" for end in ("", "-wal", "-shm")}
        assert set(modes.values()) == {0o600}

    def test_shared_store_stays_shared(self, file: Path, open_store: OpenStore) -> None:
        file.touch(0o600)
        file.chmod(0o660)
        append(open_store(f"sqlite:///{file}"))
        assert stat.S_IMODE(file.stat().st_mode) == 0o660

    def test_dangling_link_makes_private_store(self, file: Path, open_store: OpenStore) -> None:
        link = file.with_name("link.db")
        link.symlink_to(file)
        append(open_store(f"sqlite:///{link}"))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


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

    @pytest.mark.parametrize(
        "url", ["", "samples.db", "mysql://host/x", "sqlite:///file:x.db?mode=ro"]
    )
    def test_foreign_url_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"sqlite:///path/to/samples\.db"):
            SampleStore.open(url)
