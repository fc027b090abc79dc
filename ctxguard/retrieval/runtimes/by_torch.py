"""Models that torch itself serves: one thread at a time, and in forked children too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ctxguard._extras import require
from ctxguard.forks import start_afresh_in_children


class TorchModel:
    """A model in torch, loaded on first use.

    Args:
        load: Loads it, by way of `torch`.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._model: Any = None
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take a new lock: another thread may have held it when this process was forked."""
        self._lock = Lock()

    @contextmanager
    def held(self) -> Iterator[Any]:
        """The model, for this thread alone.

        Its tokenizer raises "Already borrowed" when two threads use it at once.
        """
        with self._lock:
            if self._model is None:
                self._model = self._load()
            yield self._model


def torch() -> Any:
    """The library, about to compute: in processes forked from now on it has one thread.

    The threads of its pool stay behind in the parent, and a child that shared its work with them
    would wait for them for ever. What a program computes in torch by itself, before anything here
    did, is its own to mend: by ``torch.set_num_threads(1)`` in the child.

    Raises:
        MissingExtraError: it is not installed.
    """
    library = require("torch", "embedded")
    _threads.library = library
    return library


class _Threads:
    """Those of torch, once it was used here."""

    library: Any = None

    def start_afresh(self) -> None:
        """In a forked child: compute on the thread that asks, the only one there is."""
        if self.library is not None:
            self.library.set_num_threads(1)


_threads = _Threads()
start_afresh_in_children(_threads)
