"""Records when each stage of one request ran, for traces."""

from time import perf_counter, time

from ctxguard.core.types import StageTiming


class StageClock:
    """Times stages that run one after another, starting when it is created.

    Attributes:
        timings: The timings of the finished stages, in order.
    """

    __slots__ = ("_began", "_began_at", "timings")

    def __init__(self) -> None:
        self.timings: tuple[StageTiming, ...] = ()
        self._began_at = time()
        self._began = perf_counter()

    def ended(self, stage: str) -> None:
        """Note that a stage has ended; it began when the previous one ended."""
        taken = perf_counter() - self._began
        self.timings += (StageTiming(stage, self._began_at, taken),)
        self._began_at += taken
        self._began += taken
