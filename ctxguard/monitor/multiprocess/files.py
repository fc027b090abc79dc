"""The folder of prometheus-client's multiprocess mode: read it whole, keep it small.

Each worker process keeps its metrics in files of its own, ``counter_<pid>.db`` and so on; what
they hold is read by ``entries``.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.multiprocess.entries import (
    FILE_NAME,
    Entry,
    Labels,
    exact_parts,
    read_worker_file,
)

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger(__name__)

_PER_PROCESS_MODE = "all"
_ARCHIVE = "ctxguard-retired.json"
_LOCK = "ctxguard.lock"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """What a folder holds.

    Attributes:
        entries: Of every readable file, and of the archive.
        bad_files: Name to what is wrong, for each file that was left out whole.
    """

    entries: Sequence[Entry]
    bad_files: Mapping[str, str]


class WorkerFiles:
    """A folder of workers' metrics.

    ``read`` only reads. ``tidy`` keeps the folder from growing with every worker that ever
    lived: what dead workers counted is folded into one archive, gauges that speak of one
    process (modes ``live…`` and ``all``) go with it, and files that cannot be read are renamed
    to ``….bad``. Gauges whose mode includes the dead (``sum``, ``min``, ``max``,
    ``mostrecent``) stay, and grow by one file per worker. A kill at any moment, of a worker or
    of whoever tidies, neither loses nor repeats a count: the archive that replaces the old one
    in one rename names the files that it absorbed, and those are not read again.

    A worker is dead when no process has its id. So ``tidy`` must run where the workers'
    processes can be seen (one host or container), and the workers must be known by their
    process ids, prometheus-client's default. To catch a wrong set-up, a file is touched only
    after ``settle_seconds`` without a change, and a change in any dead worker's file starts all
    waits again. A new process with a dead one's id continues its files, so nothing is lost.

    Args:
        folder: What ``PROMETHEUS_MULTIPROC_DIR`` names.
        settle_seconds: How long a worker must have been dead, ≥ 0.

    Raises:
        ConfigurationError: there is no such folder, or a negative wait.
    """

    def __init__(self, folder: Path | str, *, settle_seconds: float = 600.0) -> None:
        self.folder = Path(folder)
        self.settle_seconds = settle_seconds
        if not self.folder.is_dir():
            raise ConfigurationError(
                f"{str(folder)!r} is not a folder; PROMETHEUS_MULTIPROC_DIR must name the "
                "folder that the workers write their metrics to, and it must exist beforehand"
            )
        if not settle_seconds >= 0:
            raise ConfigurationError(f"settle_seconds {settle_seconds!r} must not be negative")
        self._settling: dict[str, tuple[bytes, float]] = {}

    def read(self) -> Reading:
        """Everything that the workers counted, dead ones too.

        Raises:
            OSError: the folder itself cannot be read.
        """
        with self._locked(exclusive=False):
            return self._read()

    def _read(self) -> Reading:
        entries: list[Entry] = []
        bad: dict[str, str] = {}
        absorbed: frozenset[str] = frozenset()
        try:
            archived, absorbed = self._archive()
            entries += archived
        except (OSError, ValueError) as error:
            bad[_ARCHIVE] = str(error)
        for name in self._names():
            if name.endswith(".bad"):
                bad[name] = "set aside earlier as unreadable; delete it when it was looked into"
            elif name.endswith(".db") and name not in absorbed:
                try:
                    entries += read_worker_file(self.folder / name)
                except FileNotFoundError:  # A live gauge that its server removed meanwhile.
                    continue
                except (OSError, ValueError) as error:
                    bad[name] = str(error)
        return Reading(entries, bad)

    def _names(self) -> list[str]:
        return sorted([path.name for path in self.folder.iterdir()])

    def _archive(self) -> tuple[list[Entry], frozenset[str]]:
        try:
            document = json.loads((self.folder / _ARCHIVE).read_bytes())
        except FileNotFoundError:
            return [], frozenset()
        try:
            if document["format"] != _FORMAT:
                raise ValueError(f"the archive has format {document['format']!r}, not {_FORMAT}")
            entries = [
                Entry(type_, "", "", metric, name, tuple(map(tuple, labels)), help_, float(value))
                for type_, metric, name, labels, help_, values in document["entries"]
                for value in values
            ]
            return entries, frozenset(document["absorbed"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the archive is damaged ({error!r})") from error

    def tidy(self) -> None:
        """Fold and remove what dead workers left; does nothing on Windows.

        Raises:
            OSError: the folder cannot be written.
        """
        if sys.platform == "win32":
            return
        with self._locked(exclusive=True):
            try:
                archived, absorbed = self._archive()
            except ValueError as error:
                _log.error("%s is not tidied: %s", self.folder, error)
                return
            for name in absorbed:
                (self.folder / name).unlink(missing_ok=True)
            retired = [self._retire(name) for name in self._settled(frozenset(absorbed))]
            self._fold([name for name in retired if name is not None], archived)

    def _settled(self, absorbed: frozenset[str]) -> list[str]:
        """Files of workers that have long been dead, unchanged all the while."""
        now = time.monotonic()
        settling: dict[str, tuple[bytes, float]] = {}
        changed = False
        for name in self._names():
            if name in absorbed or not _is_disposable(name) or not _is_gone(name):
                continue
            digest = blake2b((self.folder / name).read_bytes()).digest()
            before, since = self._settling.get(name, (digest, now))
            changed = changed or before != digest
            settling[name] = digest, since
        if changed:
            _log.warning(
                "files in %s change though no process with their ids is seen: nothing is tidied; "
                "tidy where the workers' processes can be seen",
                self.folder,
            )
            settling = {name: (digest, now) for name, (digest, _) in settling.items()}
        self._settling = settling
        if changed:
            return []
        return [name for name, (_, since) in settling.items() if now - since >= self.settle_seconds]

    def _retire(self, name: str) -> str | None:
        """Give a file a name that no new process will open; None if one may have just done so.

        A process that was given the dead one's id and opened the file before it was renamed
        still writes to it. It is alive now, so the file is left for later, and is read as ever.
        """
        self._settling.pop(name, None)
        retired = name
        if ".retired-" not in name:
            retired = f"{name.removesuffix('.db')}.retired-{token_hex(8)}.db"
            (self.folder / name).rename(self.folder / retired)
        return retired if _is_gone(retired) else None

    def _fold(self, names: Sequence[str], archived: Sequence[Entry]) -> None:
        entries, folded = list(archived), []
        for name in names:
            path = self.folder / name
            try:
                found = read_worker_file(path)
            except ValueError as error:
                _log.error("%s is set aside: %s", path, error)
                path.rename(path.with_suffix(".bad"))
                continue
            if name.startswith("gauge_"):
                path.unlink()
                continue
            entries += found
            folded.append(name)
        if not folded:
            return
        self._write_archive(entries, folded)
        for name in folded:
            (self.folder / name).unlink()

    def _write_archive(self, entries: Sequence[Entry], absorbed: Sequence[str]) -> None:
        values: dict[tuple[str, str, str, Labels], list[float]] = {}
        help_: dict[str, str] = {}
        for entry in entries:
            key = entry.type, entry.metric, entry.name, entry.labels
            values.setdefault(key, []).append(entry.value)
            help_.setdefault(entry.metric, entry.documentation)
        document = {
            "format": _FORMAT,
            "absorbed": absorbed,
            "entries": [
                [type_, metric, name, labels, help_[metric], exact_parts(numbers)]
                for (type_, metric, name, labels), numbers in values.items()
            ],
        }
        draft = self.folder / f"{_ARCHIVE}.draft"
        with draft.open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.folder / _ARCHIVE)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _locked(self, *, exclusive: bool) -> Iterator[None]:
        """Keeps readers out while files are renamed: a listing could miss one."""
        if sys.platform == "win32":
            yield
            return
        try:
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            if exclusive:
                raise
            yield  # A folder that may only be read.
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            # Said outright, because a process forked meanwhile holds the lock open too.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _is_disposable(name: str) -> bool:
    """Whether a file is folded or removed once its worker is dead."""
    found = FILE_NAME.fullmatch(name)
    if found is None:
        return False
    mode = found["mode"] or ""
    return found["type"] != "gauge" or mode.startswith("live") or mode == _PER_PROCESS_MODE


def _is_gone(name: str) -> bool:
    """Whether no process has the id in a file's name; False where that cannot be told."""
    found = FILE_NAME.fullmatch(name)
    if found is None or not found["process"].isdecimal():
        return False
    try:
        os.kill(int(found["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
