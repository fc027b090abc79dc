"""Reloads a profile or an index while serving, when its file changes.

A file has changed if its modification time, size or inode has. If it cannot be loaded, the former
state stays in force, an alarm metric is raised, and every check tries again until it loads
(DESIGN.md §6). If it changes during loading, it is loaded again before anything is reported. Runs a
thread, reads these files, replaces the guard's or retriever's state, counts and logs; imports an
index's storage where one is watched.
"""

import json
import logging
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import ValidationError

from ctxguard._support.checks import check_positive
from ctxguard._support.fork_safety import OfProcess, reset_in_children
from ctxguard._support.regular_file import FileVersion, file_version
from ctxguard.errors import (
    ConfigurationError,
    IndexFolderError,
    ProfileFormatError,
    ProfileMismatchError,
)
from ctxguard.guard.telemetry import ReloadOutcome, ReloadTarget, Telemetry, default_telemetry
from ctxguard.profile.schema import Profile

if TYPE_CHECKING:
    from ctxguard.guard.context_guard import ContextGuard
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_SECONDS = 5.0

_MAX_TRIES = 10
"""The most loads in one check of a file that keeps changing."""

_Failure = tuple[FileVersion | None, ReloadOutcome, str]

# No file has it, so that the first check loads the file: what serves may be another version of it.
_NOT_LOADED: FileVersion = (-1, -1, -1)


class _Watcher(ABC):
    """Checks one file at intervals, and reloads it after a change."""

    target: ClassVar[ReloadTarget]
    malformed: ClassVar[type[Exception]]
    """The error for a file that exists and can be read, but has the wrong content."""
    _checking = OfProcess(threading.Lock)

    def __init__(self, file: Path, interval_seconds: float, telemetry: Telemetry | None) -> None:
        check_positive(interval_seconds=interval_seconds)
        self.file = file
        self._interval_seconds = interval_seconds
        self._telemetry = default_telemetry() if telemetry is None else telemetry
        self._version: FileVersion | None = _NOT_LOADED
        self._failure: _Failure | None = None
        self._thread: threading.Thread | None = None
        reset_in_children(self)

    def _resume_after_fork(self) -> None:
        """Continue watching in a forked child, on a new thread."""
        if self._thread is not None:
            with suppress(RuntimeError):  # no thread can be started: nothing watches then
                self._launch()

    def check(self) -> ReloadOutcome | None:
        """Check the file now, and reload it if it has changed; return the outcome, None if
        unchanged."""
        with self._checking:
            if self._failure is None and file_version(self.file) == self._version:
                return None
            version, result = self._load_stable()
            if isinstance(result, Exception):
                return self._failed(version, result)
            self._version = version
            if self._failure is not None:
                self._failure = None
                self._telemetry.reload_failing(self.target, False)
            elif not result:
                return None
            self._telemetry.reload_attempted(self.target, "reloaded")
            _log.info("%s %r was reloaded", self.target, str(self.file))
            return "reloaded"

    def start(self) -> Self:
        """Check on a daemon thread at every interval, also in processes forked from this one."""
        if self._thread is None:
            self._launch()
        return self

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """Stop the thread after its current check; return whether it ended in time."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._ended.set()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _load(self) -> bool:
        """Load the file and put it in force; return whether its content is new."""

    def _outcome(self, error: Exception) -> ReloadOutcome:
        """Return the outcome to report for an error of `_load`."""
        if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            return "unreadable"
        is_malformed = isinstance(error, self.malformed)
        return "malformed" if is_malformed else "mismatched"

    def _in_force(self) -> str:
        return "the previous one stays in force"

    def _load_stable(self) -> tuple[FileVersion | None, bool | Exception]:
        """Load the file; return its version, and whether its content is new, or the error."""
        tries = 0
        while True:
            version, tries = file_version(self.file), tries + 1
            try:
                return version, self._load()
            except Exception as error:
                # It may have been replaced meanwhile: the next save of an index deletes this one.
                if tries == _MAX_TRIES or file_version(self.file) == version:
                    return version, error

    def _failed(self, version: FileVersion | None, error: Exception) -> ReloadOutcome | None:
        """Count a failure, and log it if it differs from the last one."""
        outcome, reason = self._outcome(error), _reason(error)
        failure = (version, outcome, reason)
        previous, self._failure = self._failure, failure
        self._version = version
        if previous is None:
            self._telemetry.reload_failing(self.target, True)
        if previous == failure:
            return None
        self._telemetry.reload_attempted(self.target, outcome)
        _log.warning(
            "%s %r is %s (%s): %s", self.target, str(self.file), outcome, reason, self._in_force()
        )
        return outcome

    def _launch(self) -> None:
        self._ended = threading.Event()
        thread = threading.Thread(
            target=self._run,
            args=(self._ended,),
            name=f"ctxguard-{self.target}-watcher",
            daemon=True,
        )
        self._thread = thread
        thread.start()

    def _run(self, ended: threading.Event) -> None:
        while True:
            try:
                self.check()
            except Exception as error:
                _log.warning("the %s watcher failed (%s)", self.target, type(error).__name__)
            if ended.wait(self._interval_seconds):
                return


class ProfileWatcher(_Watcher):
    """Reloads a guard's profile whenever the profile's file changes.

    Args:
        guard: Uses the profile; must not have a policy set by hand.
        path: The profile's file. Replace it atomically, as ``Profile.save`` does; an incomplete
            file is refused and tried again.
        interval_seconds: Between two checks, > 0.
        telemetry: Where attempts are counted; None for that of the process's default registry.

    Raises:
        ConfigurationError: the interval is not finite and > 0.
    """

    target = "profile"
    malformed = ProfileFormatError

    def __init__(
        self,
        guard: "ContextGuard",
        path: Path | str,
        *,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._guard = guard
        super().__init__(Path(path), interval_seconds, telemetry)

    def _load(self) -> bool:
        if self.file.exists() and not self.file.is_file():
            raise OSError("not a regular file")
        profile = Profile.load(self.file)
        if profile == self._guard.profile and not self._guard.comparison.mismatches:
            return False
        self._guard.use_profile(profile)
        return True

    def _in_force(self) -> str:
        if self._guard.profile is None or self._guard.comparison.mismatches:
            return "no profile applies, and nothing is dropped below a threshold"
        return super()._in_force()


class IndexWatcher(_Watcher):
    """Reloads a retriever's index whenever a new one is saved into its folder.

    Args:
        retriever: A retriever that was loaded from a folder.
        interval_seconds: Between two checks, > 0.
        telemetry: Where attempts are counted; None for that of the process's default registry.

    Raises:
        ConfigurationError: the retriever was built in memory, or the interval is not finite and >
            0.
    """

    target = "index"
    malformed = IndexFolderError

    def __init__(
        self,
        retriever: "HybridRetriever",
        *,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        telemetry: Telemetry | None = None,
    ) -> None:
        from ctxguard.retrieval.index.storage import manifest_file

        if retriever.folder is None:
            raise ConfigurationError(
                "this retriever was built in memory; save it, load it from its "
                "folder, and watch the loaded one"
            )
        self._retriever = retriever
        super().__init__(manifest_file(retriever.folder), interval_seconds, telemetry)

    def _load(self) -> bool:
        return self._retriever.reload()

    def _outcome(self, error: Exception) -> ReloadOutcome:
        return super()._outcome(error) if self.file.is_file() else "unreadable"


def _reason(error: Exception) -> str:
    """Describe why a load failed without quoting the file, because this is logged."""
    cause = error.__cause__ if error.__cause__ is not None else error
    if isinstance(cause, json.JSONDecodeError):
        return f"not JSON (line {cause.lineno})"
    if isinstance(cause, UnicodeDecodeError):
        return f"not UTF-8 (byte {cause.start})"
    if isinstance(cause, ValidationError):
        return f"{cause.error_count()} fields do not match the schema"
    if isinstance(cause, OSError):
        return cause.strerror or "not a regular file"
    if isinstance(error, ProfileMismatchError):
        return f"{len(error.differences)} differences from this system"
    return type(cause).__name__
