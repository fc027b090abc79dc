"""What a forked child must not inherit: pending samples, counts, held locks, lost threads."""

import os
from typing import Protocol
from weakref import WeakSet


class StartsAfresh(Protocol):
    """Something whose state belongs to one process."""

    def start_afresh(self) -> None:
        """Forget everything that was gathered so far, and take new locks."""
        ...


_watched: WeakSet[StartsAfresh] = WeakSet()


def start_afresh_in_children(thing: StartsAfresh) -> None:
    """Have ``thing`` start afresh in every process that is forked from this one."""
    _watched.add(thing)


def _start_all_afresh() -> None:
    for thing in list(_watched):
        thing.start_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_all_afresh)
