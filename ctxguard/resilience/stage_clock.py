"""When each stage of one request ran, for traces."""

from time import perf_counter, time

from ctxguard.core.types import StageTiming


class StageClock:
    """Times stages that run one after the other, from when it is made.

    Attributes:
        timings: Of the stages that have ended, in their order.
    """

    __slots__ = ("_began", "_began_at", "timings")

    def __init__(self) -> None:
        self.timings: tuple[StageTiming, ...] = ()
        self._began_at = time()
        self._began = perf_counter()

    def ended(self, stage: str) -> None:
        """Note that a stage has ended, which began when the one before it ended."""
        taken = perf_counter() - self._began
        self.timings += (StageTiming(stage, self._began_at, taken),)
        self._began_at += taken
        self._began += taken
