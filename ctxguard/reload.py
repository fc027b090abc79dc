"""Profiles and indexes that are taken up while serving, when their file changes or on a signal.

The file is looked at by time, size and inode. One that cannot be used leaves what serves in
force, raises an alarm metric, and is tried again at every look until it can be (DESIGN.md §6). One
that was replaced while it was looked at is looked at again before anything is said of it.
"""

import json
import logging
import signal
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import ValidationError

from ctxguard.errors import (
    ConfigurationError,
    IndexFolderError,
    ProfileFormatError,
    ProfileMismatchError,
)
from ctxguard.forks import start_afresh_in_children
from ctxguard.profile import Profile
from ctxguard.stamps import Stamp, file_stamp
from ctxguard.telemetry import Reloaded, ReloadOutcome, Telemetry, default_telemetry

if TYPE_CHECKING:
    from ctxguard.guard import ContextGuard
    from ctxguard.retrieval import HybridRetriever

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_SECONDS = 5.0

_AFTER_FORK_SECONDS = 0.1
"""Before a child's first look: until then other objects may still hold the parent's locks."""

_MOST_TRIES = 10
"""In one look, while the file changes faster than it can be taken up."""

_Failure = tuple[Stamp | None, ReloadOutcome, str]


class _Watcher(ABC):
    """Looks at one file now and then, and has it taken up when it changed."""

    what: ClassVar[Reloaded]

    def __init__(
        self, file: Path, interval_seconds: float, telemetry: Telemetry | None, seen: Stamp | None
    ) -> None:
        if not 0.0 < interval_seconds < float("inf"):
            raise ConfigurationError(f"interval_seconds {interval_seconds!r} must be > 0, finite")
        self.file = file
        self._interval_seconds = interval_seconds
        self._telemetry = default_telemetry() if telemetry is None else telemetry
        self._stamp = seen
        self._failure: _Failure | None = None
        self._last_error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take a new lock, and in a forked child go on watching on a thread of its own."""
        self._checking = threading.Lock()
        self._wake: SimpleQueue[bool | None] = SimpleQueue()
        was_watching, self._thread = self._thread is not None, None
        if was_watching:
            with suppress(RuntimeError):  # no thread can be started: nothing watches then
                self._launch(_AFTER_FORK_SECONDS)

    @property
    def last_error(self) -> Exception | None:
        """Why the file could not be taken up at the last attempt; None where it could.

        It may quote the file, which the log and the metrics never do.
        """
        return self._last_error

    def check(self, *, again: bool = False) -> ReloadOutcome | None:
        """Look at the file now, and take it up if it changed.

        Args:
            again: Take it up even if it did not change.

        Returns:
            What became of it; None where there was nothing new.
        """
        with self._checking:
            if not again and self._failure is None and file_stamp(self.file) == self._stamp:
                return None
            stamp, found = self._take_up_as_it_stands()
            if isinstance(found, Exception):
                return self._failed(stamp, found, again=again)
            self._stamp = stamp
            self._last_error = None
            if self._failure is not None:
                self._failure = None
                self._telemetry.reload_failing(self.what, False)
            elif not found:
                return None
            self._telemetry.reload_attempted(self.what, ReloadOutcome.RELOADED)
            _log.info("%s %r was taken up", self.what.value, str(self.file))
            return ReloadOutcome.RELOADED

    def start(self) -> Self:
        """Watch on a daemon thread, in every process forked from this one too.

        A second call does nothing.
        """
        if self._thread is None:
            self._launch(0.0)
        return self

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the thread after the look in hand.

        Returns:
            Whether it ended in time.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._wake.put(None)
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def reload_on_signal(self, number: int) -> None:
        """Take the file up whenever this signal comes, changed or not; starts watching.

        A handler that a program had set before is called as well.

        Raises:
            ConfigurationError: called outside the main thread, where Python takes no handlers,
                or for a signal that cannot be handled.
        """
        previous: object = None

        def handle(number: int, frame: FrameType | None) -> None:
            # Nothing but this queue may be used here: the main thread may hold any lock.
            self._wake.put(True)
            if callable(previous):
                previous(number, frame)

        try:
            previous = signal.getsignal(number)
            signal.signal(number, handle)
        except (ValueError, OSError, TypeError) as error:
            raise ConfigurationError(
                f"signal {number!r} cannot be handled ({error}); call reload_on_signal from the "
                "main thread, with a signal such as signal.SIGHUP"
            ) from error
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @abstractmethod
    def _take_up(self) -> bool:
        """Serve by the file; whether it held anything new."""

    @abstractmethod
    def _outcome(self, error: Exception) -> ReloadOutcome:
        """What an error says of the file."""

    def _take_up_as_it_stands(self) -> tuple[Stamp | None, bool | Exception]:
        """Whether it held anything new, or why it cannot be served by, and the stamp of which.

        A file that changed meanwhile is tried again: what failed is no longer there, and may have
        been whole, as a generation is that the next one cleared away while it was being read.
        """
        tries = 0
        while True:
            stamp, tries = file_stamp(self.file), tries + 1
            try:
                return stamp, self._take_up()
            except Exception as error:
                if tries == _MOST_TRIES or file_stamp(self.file) == stamp:
                    return stamp, error

    def _failed(
        self, stamp: Stamp | None, error: Exception, *, again: bool
    ) -> ReloadOutcome | None:
        outcome, reason = self._outcome(error), _reason(error)
        failure = (stamp, outcome, reason)
        before, self._failure = self._failure, failure
        self._stamp, self._last_error = stamp, error
        if before is None:
            self._telemetry.reload_failing(self.what, True)
        if before == failure and not again:
            return None
        self._telemetry.reload_attempted(self.what, outcome)
        if before != failure:
            _log.warning(
                "%s %r is %s (%s): the one before stays in force",
                self.what.value,
                str(self.file),
                outcome.value,
                reason,
            )
        return outcome

    def _launch(self, delay_seconds: float) -> None:
        thread = threading.Thread(
            target=self._run,
            args=(self._wake, delay_seconds),
            name=f"ctxguard-{self.what}-watcher",
            daemon=True,
        )
        self._thread = thread
        thread.start()

    def _run(self, wake: "SimpleQueue[bool | None]", delay_seconds: float) -> None:
        wait_seconds = delay_seconds
        while True:
            again: bool | None = False
            with suppress(Empty):
                again = wake.get(timeout=wait_seconds)
            if again is None:
                return
            try:
                self.check(again=again)
            except Exception as error:
                _log.warning("the %s watcher failed (%s)", self.what.value, type(error).__name__)
            wait_seconds = self._interval_seconds


class ProfileWatcher(_Watcher):
    """Has a guard serve by a profile's file as it is now.

    Args:
        guard: Serves by the profile; must not have a policy set by hand.
        path: The profile. Replace it in one step, as ``Profile.save`` does; half of a file is
            refused and looked at again.
        interval_seconds: Between two looks, > 0.
        telemetry: Where attempts are counted; the process's default registry unless given.

    Raises:
        ConfigurationError: an interval that is not > 0 and finite.
    """

    what = Reloaded.PROFILE

    def __init__(
        self,
        guard: "ContextGuard",
        path: Path | str,
        *,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._guard = guard
        # The first look compares contents: the guard may have read another version of the file.
        super().__init__(Path(path), interval_seconds, telemetry, (-1, -1, -1))

    def _take_up(self) -> bool:
        if self.file.exists() and not self.file.is_file():
            raise OSError("not a regular file")
        profile = Profile.load(self.file)
        if profile == self._guard.profile and not self._guard.differences:
            return False
        self._guard.use_profile(profile)
        return True

    def _outcome(self, error: Exception) -> ReloadOutcome:
        if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            return ReloadOutcome.UNREADABLE
        if isinstance(error, ProfileFormatError):
            return ReloadOutcome.MALFORMED
        return ReloadOutcome.MISMATCHED


class IndexWatcher(_Watcher):
    """Has a retriever answer from the generation of the index that its folder holds now.

    Args:
        retriever: Loaded from a folder.
        interval_seconds: Between two looks, > 0.
        telemetry: Where attempts are counted; the process's default registry unless given.

    Raises:
        ConfigurationError: a retriever that was built in memory, or an interval that is not > 0
            and finite.
    """

    what = Reloaded.INDEX

    def __init__(
        self,
        retriever: "HybridRetriever",
        *,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        telemetry: Telemetry | None = None,
    ) -> None:
        from ctxguard.retrieval.storage import manifest_file

        if retriever.folder is None:
            raise ConfigurationError(
                "this retriever was built in memory: save it, and watch one loaded from the folder"
            )
        self._retriever = retriever
        super().__init__(manifest_file(retriever.folder), interval_seconds, telemetry, (-1, -1, -1))

    def _take_up(self) -> bool:
        return self._retriever.reload()

    def _outcome(self, error: Exception) -> ReloadOutcome:
        if not self.file.is_file():
            return ReloadOutcome.UNREADABLE
        if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            return ReloadOutcome.UNREADABLE
        if isinstance(error, IndexFolderError):
            return ReloadOutcome.MALFORMED
        return ReloadOutcome.MISMATCHED


def _reason(error: Exception) -> str:
    """Why, in words of ours alone: what a file holds must not get into the log."""
    cause = error.__cause__ if error.__cause__ is not None else error
    if isinstance(cause, json.JSONDecodeError):
        return f"not JSON, line {cause.lineno}"
    if isinstance(cause, UnicodeDecodeError):
        return f"not UTF-8, byte {cause.start}"
    if isinstance(cause, ValidationError):
        return f"{cause.error_count()} fields are not as the schema has them"
    if isinstance(cause, OSError):
        return cause.strerror or "not a regular file"
    if isinstance(error, ProfileMismatchError):
        return f"{len(error.differences)} differences from this system"
    return type(cause).__name__
