"""What a forked child must not inherit: pending samples, counts, held locks, lost threads."""

import logging
import os
from typing import Protocol
from weakref import WeakSet


class StartsAfresh(Protocol):
    """Something whose state belongs to one process."""

    def start_afresh(self) -> None:
        """Forget everything that was gathered so far, and take new locks."""
        ...


_log = logging.getLogger(__name__)
_watched: WeakSet[StartsAfresh] = WeakSet()


def start_afresh_in_children(thing: StartsAfresh) -> None:
    """Have ``thing`` start afresh in every process that is forked from this one."""
    _watched.add(thing)


def _start_all_afresh() -> None:
    for thing in list(_watched):
        try:
            thing.start_afresh()
        except Exception as error:
            # The others must not be left with locks that nobody lets go of here.
            _log.error(
                "a forked process keeps its parent's %s (%s)",
                type(thing).__name__,
                type(error).__name__,
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_all_afresh)
