"""Resets in a forked child what it must not inherit: counts, samples, held locks, lost threads."""

import logging
import os
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
