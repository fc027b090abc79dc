"""Tries a stage again while its circuit is open and nobody asks, to notice that it recovers."""

import weakref
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from ctxguard.resilience.breaker import Breaker


class Probed(Protocol):
    """A stage, as far as it is probed."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def breaker(self) -> Breaker:
        """Its circuit."""
        ...

    def probe_again(self) -> None:
        """Make a probe that is due."""
        ...


class IdleProbes:
    """Asks a stage for a probe whenever one is due that no request has made.

    There is one thread, while the circuit is open. It only keeps the time: the stage makes the call
    where it makes its calls. It ends when the circuit closes or the stage is collected; a forked
    child has none.
    """

    def __init__(self) -> None:
        # Unlike an event, it can be used in a callback of the garbage collector.
        self._ended: SimpleQueue[None] = SimpleQueue()

    def begin(self, stage: Probed) -> None:
        """Start the thread; the circuit has opened."""
        ended = self._ended = SimpleQueue()
        # The thread must not keep the stage.
        stage_of = weakref.ref(stage, partial(_end, ended))
        Thread(
            target=_keep_probing,
            args=(stage_of, ended),
            name=f"ctxguard-{stage.name}-probes",
            daemon=True,
        ).start()

    def end(self) -> None:
        """Let the thread end; the circuit has closed."""
        _end(self._ended)


def _keep_probing(stage_of: "weakref.ref[Probed]", ended: "SimpleQueue[None]") -> None:
    while (stage := stage_of()) is not None:
        pause = stage.breaker.seconds_to_idle_probe
        del stage
        try:
            ended.get(timeout=pause)
        except Empty:
            if (stage := stage_of()) is not None:
                stage.probe_again()
                del stage
        else:
            return


def _end(ended: "SimpleQueue[None]", _: object = None) -> None:
    ended.put(None)
