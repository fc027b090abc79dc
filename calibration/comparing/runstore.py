"""Runs of ``compare``, kept in one SQLite file so that later ones can be compared with them.

A run is one candidate's figures, query by query, with the settings, the commit and the labels
that they came from. Its id is a digest of all that: the same run kept twice is kept once.
"""

import hashlib
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from calibration.comparing.differences import Difference, differences
from calibration.evaluate import QueryMetrics
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.metrics import Utilities

DEFAULT_STORE = Path(".ctxguard") / "runs.sqlite"
NO_COMMIT = "none"

_APPLICATION_ID = 0x63747867
_SCHEMA_VERSION = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS runs (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL UNIQUE,
    candidate TEXT NOT NULL,
    profile TEXT NOT NULL,
    commit_id TEXT NOT NULL,
    dirty INTEGER NOT NULL,
    data TEXT NOT NULL,
    data_digest TEXT NOT NULL,
    utilities TEXT NOT NULL,
    settings TEXT NOT NULL,
    kept_at TEXT NOT NULL,
    latency_ms REAL NOT NULL,
    regressed INTEGER NOT NULL,
    query_ids TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS runs_of_candidate ON runs (candidate, data_digest, sequence);
CREATE TABLE IF NOT EXISTS metric_values (
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    metric TEXT NOT NULL,
    packed BLOB NOT NULL,
    PRIMARY KEY (run_id, metric)
) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_PACKED = np.dtype("<f8")
_SHORTEST_PREFIX = 4
_LOCK_SECONDS = 10.0
_GIT_SECONDS = 10.0


@dataclass(frozen=True)
class Commit:
    """Where a working directory stands.

    Attributes:
        commit_id: Hexadecimal; ``none`` outside a repository.
        dirty: Whether tracked files differ from the commit.
    """

    commit_id: str = NO_COMMIT
    dirty: bool = False


@dataclass(frozen=True)
class Run:
    """One candidate's figures on one data set.

    Attributes:
        candidate: Its name.
        profile: A digest of its settings and of the system they ran on.
        commit: Of the working directory.
        data: The data set's name.
        data_digest: Of its queries and labels.
        utilities: What a passage was worth.
        settings: All settings of the candidate, and the depth, as JSON.
        latency_ms: Median time of a retrieval.
        metrics: Query by query.
        regressed: Kept although it was found worse than the run before: later runs are not
            measured against it.
        kept_at: When it was last kept, ISO 8601 in UTC; empty before it is.
    """

    candidate: str
    profile: str
    commit: Commit
    data: str
    data_digest: str
    utilities: Utilities
    settings: Mapping[str, Any]
    latency_ms: float
    metrics: QueryMetrics
    regressed: bool = False
    kept_at: str = ""

    @property
    def run_id(self) -> str:
        """12 hex digits of the digest of everything but when it was kept and how fast it was."""
        about = [
            self.candidate,
            self.profile,
            asdict(self.commit),
            self.data_digest,
            _canonical(asdict(self.utilities)),
            self.settings,
            self.metrics.query_ids,
        ]
        digest = hashlib.sha256(_canonical(about).encode())
        for metric in sorted(self.metrics.values):
            # Rounded, so that another machine's last digit does not make it another run.
            rounded = np.round(self.metrics.values[metric], 12) + 0.0
            digest.update(metric.encode() + rounded.astype(_PACKED).tobytes())
        return digest.hexdigest()[:12]


def diff_runs(newer: Run, older: Run, *, seed: int = 0) -> dict[str, Difference]:
    """Every metric of one run less that of another, paired by query.

    Raises:
        ConfigurationError: the runs were made on other labels, or with other utilities.
    """
    if newer.data_digest != older.data_digest:
        raise ConfigurationError(
            f"run {newer.run_id} was made on {newer.data} (digest {newer.data_digest[:12]}) and "
            f"run {older.run_id} on {older.data} (digest {older.data_digest[:12]}); only runs on "
            "the same queries and labels can be paired"
        )
    if newer.utilities != older.utilities:
        raise ConfigurationError(
            f"runs {newer.run_id} and {older.run_id} take a passage to be worth different "
            "utilities, so their figures have no common unit; evaluate both with the same ones"
        )
    return differences(newer.metrics, older.metrics, seed=seed)


class RunStore:
    """The runs of one SQLite file, which is made when the first run is kept.

    Args:
        path: A file, or a folder in which ``runs.sqlite`` lies.
    """

    def __init__(self, path: Path | str = DEFAULT_STORE) -> None:
        path = Path(path)
        self.path = path / DEFAULT_STORE.name if path.is_dir() or not path.suffix else path

    def keep(self, runs: Sequence[Run]) -> None:
        """Add runs, all or none; one that is there already becomes the last of its candidate.

        Raises:
            DataError: the file cannot be written, or is no store.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the folder cannot be made ({error})", path=self.path) from error
        with self._connected() as connection, connection:
            for run in runs:
                run_id = run.run_id
                connection.execute("DELETE FROM metric_values WHERE run_id = ?", (run_id,))
                connection.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
                connection.execute(
                    "INSERT INTO runs (run_id, candidate, profile, commit_id, dirty, data,"
                    " data_digest, utilities, settings, kept_at, latency_ms, regressed, query_ids)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        run_id,
                        run.candidate,
                        run.profile,
                        run.commit.commit_id,
                        run.commit.dirty,
                        run.data,
                        run.data_digest,
                        _canonical(asdict(run.utilities)),
                        _canonical(run.settings),
                        now,
                        run.latency_ms,
                        run.regressed,
                        json.dumps(run.metrics.query_ids),
                    ),
                )
                connection.executemany(
                    "INSERT INTO metric_values VALUES (?, ?, ?)",
                    [
                        (run_id, metric, values.astype(_PACKED).tobytes())
                        for metric, values in run.metrics.values.items()
                    ],
                )

    def runs(self) -> tuple[Run, ...]:
        """Every run, the last kept first; none where there is no file yet.

        Raises:
            DataError: the file cannot be read, is damaged, or is no store.
        """
        return tuple(self._read("1 = 1", ()))

    def find(self, reference: str) -> tuple[Run, ...]:
        """The runs whose id or commit begins with ``reference``, the last kept first.

        Raises:
            ConfigurationError: fewer than four characters, or no such run.
            DataError: as ``runs``.
        """
        if len(reference) < _SHORTEST_PREFIX:
            raise ConfigurationError(
                f"the run {reference!r} is given by fewer than {_SHORTEST_PREFIX} characters of "
                "its id or its commit"
            )
        prefix = reference.lower()
        found = tuple(
            self._read(
                "substr(run_id, 1, length(?1)) = ?1 OR substr(commit_id, 1, length(?1)) = ?1",
                (prefix,),
            )
        )
        if not found:
            raise ConfigurationError(
                f"{self.path} has no run {reference!r}; `ctxguard compare --list` shows those "
                "that it has"
            )
        return found

    def one(self, reference: str) -> Run:
        """The one run whose id or commit begins with ``reference``.

        Raises:
            ConfigurationError: no such run, or several.
            DataError: as ``runs``.
        """
        found = self.find(reference)
        if len(found) > 1:
            known = ", ".join(f"{run.run_id} ({run.candidate})" for run in found[:4])
            raise ConfigurationError(
                f"{reference!r} names {len(found)} runs: {known}{', …' * (len(found) > 4)}; give "
                "one run's id"
            )
        return found[0]

    def last(self, run: Run) -> Run | None:
        """The last run that this one can be measured against; None where there is none.

        Of the same candidate, on the same labels, with the same utilities, and not itself found
        to be a regression.

        Raises:
            DataError: as ``runs``.
        """
        return next(
            self._read(
                "candidate = ? AND data_digest = ? AND utilities = ? AND NOT regressed",
                (run.candidate, run.data_digest, _canonical(asdict(run.utilities))),
                limit=1,
            ),
            None,
        )

    def _read(self, where: str, values: Sequence[object], limit: int = -1) -> Iterator[Run]:
        if not self.path.exists():
            return iter(())
        with self._connected() as connection:
            # A run and its values are read as they stood at one time.
            connection.execute("BEGIN")
            rows = connection.execute(
                f"SELECT * FROM runs WHERE {where} ORDER BY sequence DESC LIMIT {limit}",  # noqa: S608  no input of the user's
                values,
            ).fetchall()
            return iter([self._run(connection, row) for row in rows])

    def _run(self, connection: sqlite3.Connection, row: sqlite3.Row) -> Run:
        try:
            query_ids = tuple(json.loads(row["query_ids"]))
            packed = connection.execute(
                "SELECT metric, packed FROM metric_values WHERE run_id = ?", (row["run_id"],)
            ).fetchall()
            values = {
                metric: np.frombuffer(blob, _PACKED).astype(np.float64) for metric, blob in packed
            }
            run = Run(
                candidate=row["candidate"],
                profile=row["profile"],
                commit=Commit(row["commit_id"], bool(row["dirty"])),
                data=row["data"],
                data_digest=row["data_digest"],
                utilities=_utilities(row["utilities"]),
                settings=json.loads(row["settings"]),
                latency_ms=row["latency_ms"],
                metrics=QueryMetrics(query_ids, values),
                regressed=bool(row["regressed"]),
                kept_at=row["kept_at"],
            )
        except (TypeError, ValueError, IndexError) as error:
            raise self._damaged(f"run {row['run_id']}: {error}") from error
        if not values or any(len(column) != len(query_ids) for column in values.values()):
            raise self._damaged(f"run {row['run_id']} lacks values")
        return run

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"this is no store of runs, or a damaged one ({what}); name another with --store, or "
            "move it away to begin anew",
            path=self.path,
        )

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_LOCK_SECONDS)) as connection:
                connection.row_factory = sqlite3.Row
                self._check_schema(connection)
                yield connection
        except sqlite3.OperationalError as error:
            raise DataError(f"the store cannot be used ({error})", path=self.path) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Make the tables of a new file; refuse one that is something else."""
        # One transaction, lest another process make the tables between two of these reads.
        connection.execute("BEGIN")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        connection.rollback()
        if not application and not objects:
            connection.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
        elif application != _APPLICATION_ID:
            raise DataError(
                "this SQLite file is no store of runs; name another with --store", path=self.path
            )
        elif version != _SCHEMA_VERSION:
            raise DataError(
                f"the store has schema version {version}, this release reads {_SCHEMA_VERSION}; "
                "name another with --store",
                path=self.path,
            )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _utilities(text: str) -> Utilities:
    found = Utilities(**json.loads(text))
    if found.by_grade is None:
        return found
    return replace(found, by_grade={int(grade): worth for grade, worth in found.by_grade.items()})


def commit_of(folder: Path) -> Commit:
    """The commit that a folder stands at; files that git does not track are not looked at.

    ``none`` outside a repository, before its first commit, and where git is not installed.
    """
    git = shutil.which("git")
    if git is None:
        return Commit()

    def asked(*arguments: str) -> str:
        return subprocess.run(  # noqa: S603  fixed arguments, no shell
            [git, "-C", str(folder), *arguments],
            capture_output=True,
            check=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_SECONDS,
        ).stdout.strip()

    try:
        return Commit(
            asked("rev-parse", "--verify", "HEAD"),
            bool(asked("status", "--porcelain", "--untracked-files=no")),
        )
    except (OSError, subprocess.SubprocessError):
        return Commit()
