"""A process owns what it opened: forks reset what a child must not inherit.

That is counts, samples, held locks, lost threads and connections, which the child makes anew.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable
from weakref import WeakSet


class ForkAware(Protocol):
    """An object with state that belongs to one process."""

    def _reset_after_fork(self) -> None:
        """Forget what belongs to the parent process, and make new locks."""
        ...


@runtime_checkable
class Resumed(Protocol):
    """An object that starts threads in a forked child."""

    def _resume_after_fork(self) -> None:
        """Start them; called once all objects are reset. Must not raise."""
        ...


_log = logging.getLogger(__name__)
_registered: WeakSet[ForkAware] = WeakSet()


def reset_in_children(thing: ForkAware) -> None:
    """Call ``thing._reset_after_fork()`` in every process that is forked from this one."""
    _registered.add(thing)


def _reset_all() -> None:
    things = list(_registered)
    for thing in things:
        try:
            thing._reset_after_fork()
        except Exception as error:
            # The others must be reset too: nobody releases their locks here.
            _log.error(
                "a forked process keeps its parent's %s (%s)",
                type(thing).__name__,
                type(error).__name__,
            )
    # A thread may use any of them, so none is started before all are reset.
    for thing in things:
        if isinstance(thing, Resumed):
            thing._resume_after_fork()


_PATIENCE_SECONDS = 10.0
"""How long a fork waits for transactions, which are short."""


class ClosedAtForks:
    """A context manager for transactions: any number at once, but none while the process forks.

    For SQLite, which records its file locks in the memory of the process, which a child inherits,
    while the locks themselves stay with the parent. A child would wait for ever for a transaction
    that the parent had open, and would lose what it wrote when the parent, as the last user it
    knows of, removed the log. So a fork waits for open transactions, and closes the connections.

    Args:
        close: Closes all connections that no transaction uses.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._changed = threading.Condition()
        self._n_open = 0
        self._is_shut = False
        _closed_at_forks.add(self)

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


_closed_at_forks: WeakSet[ClosedAtForks] = WeakSet()


def _shut_all() -> None:
    for one in list(_closed_at_forks):
        one.shut()


def _reopen_all() -> None:
    for one in list(_closed_at_forks):
        one.reopen()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_shut_all, after_in_parent=_reopen_all, after_in_child=_reset_all)
