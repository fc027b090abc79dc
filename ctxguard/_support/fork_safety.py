"""Gives a forked child locks, threads and connections of its own.

The rule: a class that has any declares each as an attribute `OfProcess`. State that needs more is
reset by its method ``_reset_after_fork``, which forgets the parent's state and makes new locks.
Threads that a child needs too are started by ``_resume_after_fork``, which is called once all
objects are reset, and must not raise. Hooks into the system's forks, and logs.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

_T = TypeVar("_T")


_log = logging.getLogger(__name__)
_registered: WeakSet[Any] = WeakSet()


def reset_in_children(thing: Any) -> None:
    """Reset an object in every process forked from this one."""
    _registered.add(thing)


class OfProcess(Generic[_T]):
    """An attribute that belongs to one process: made on first use, and again in a forked child.

    Args:
        make: Makes the value.
        leave: Called in a child with the parent's value before dropping it; None to do nothing.

    >>> class Counter:
    ...     lock = OfProcess(threading.Lock)
    >>> counter = Counter()
    >>> counter.lock is counter.lock
    True
    """

    def __init__(self, make: Callable[[], _T], leave: Callable[[_T], object] | None = None) -> None:
        self._make, self._leave = make, leave

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, thing: None, owner: type) -> "OfProcess[_T]": ...
    @overload
    def __get__(self, thing: object, owner: type) -> _T: ...
    def __get__(self, thing: object | None, owner: type) -> "OfProcess[_T] | _T":
        if thing is None:
            return self
        held = vars(thing)
        if self._name not in held:
            _registered.add(thing)
            # One step, so that threads that are first at once have the same.
            held.setdefault(self._name, self._make())
        value: _T = held[self._name]
        return value

    def __set__(self, thing: object, value: _T) -> None:
        held = vars(thing)
        if self._name not in held:
            _registered.add(thing)
        held[self._name] = value

    def forget(self, thing: object) -> None:
        """Drop an object's value in the child, if it has one, and leave it to the parent."""
        if self._name in vars(thing):
            value = vars(thing).pop(self._name)
            if self._leave is not None:
                self._leave(value)


def _begin_anew(thing: Any) -> None:
    for owner in type(thing).__mro__:
        for each in vars(owner).values():
            if isinstance(each, OfProcess):
                each.forget(thing)
    if hasattr(thing, "_reset_after_fork"):
        thing._reset_after_fork()


def _reset_all() -> None:
    things = list(_registered)
    for thing in things:
        try:
            _begin_anew(thing)
        except Exception as error:
            # The others must be reset too: nobody releases their locks here.
            _log.error(
                "a forked process keeps its parent's %s (%s)",
                type(thing).__name__,
                type(error).__name__,
            )
    # A thread may use any of them, so none is started before all are reset.
    for thing in things:
        if hasattr(thing, "_resume_after_fork"):
            thing._resume_after_fork()


_PATIENCE_SECONDS = 10.0
"""How long a fork waits for open transactions, which are short."""


class ClosedAtForks:
    """A context manager for transactions: any number at once, but none while the process forks.

    For SQLite, which records its file locks in the memory of the process, which a child inherits,
    while the locks themselves stay with the parent. A child would wait forever for a transaction
    that the parent had open, and would lose its writes when the parent, as the last user it knows
    of, removed the log. So a fork waits for open transactions, and closes the connections.

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
                _log.warning("a process was forked during a transaction of its sample store")
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
