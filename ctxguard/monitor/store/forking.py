"""No SQLite connection is open when a process forks.

SQLite records its file locks in the memory of the process, which a child inherits, while the locks
themselves stay with the parent. A child would wait for ever for a transaction that the parent had
open, and would lose what it wrote when the parent, as the last user it knows of, removed the log.
So a fork waits for open transactions, and closes the connections.
"""

import logging
import os
import threading
from collections.abc import Callable
from weakref import WeakSet

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0
"""How long a fork waits for transactions, which are short."""


class ClosedAtForks:
    """A context manager for transactions: any number at once, but none while the process forks.

    Args:
        close: Closes all connections that no transaction uses.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._changed = threading.Condition()
        self._n_open = 0
        self._is_shut = False
        _watched.add(self)

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut)
            self._n_open += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._n_open -= 1
            self._changed.notify_all()

    def shut(self) -> None:
        """Let no transaction begin, wait for the open ones, and close the connections."""
        with self._changed:
            self._is_shut = True
            if not self._changed.wait_for(lambda: self._n_open == 0, _PATIENCE_SECONDS):
                _log.warning("a process forks during a transaction of its sample store")
        self._close()

    def reopen(self) -> None:
        """Let transactions begin again."""
        with self._changed:
            self._is_shut = False
            self._changed.notify_all()


_watched: WeakSet[ClosedAtForks] = WeakSet()


def _shut_all() -> None:
    for one in list(_watched):
        one.shut()


def _reopen_all() -> None:
    for one in list(_watched):
        one.reopen()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_shut_all, after_in_parent=_reopen_all)
