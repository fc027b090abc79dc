"""Compares the reranker that serves with the one that the profile was calibrated on."""

import asyncio
import logging
import time
from collections.abc import Mapping

from ctxguard._support.error_text import describe_error
from ctxguard.guard import ContextGuard
from ctxguard.profile.reranker_probe import FINGERPRINT_KEY, PROBES, described
from ctxguard.server.scoring import Scorer

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


class RerankerCheck:
    """Asks the reranker for its scores of the probe texts, and tells the guard.

    Without an answer the former one stays; without any the profile applies unverified.

    Args:
        guard: Has the profile.
        scorer: Scores.
        fingerprint: The system's, without the scores.
        interval_seconds: Between two questions.
    """

    def __init__(
        self,
        guard: ContextGuard,
        scorer: Scorer,
        fingerprint: Mapping[str, str],
        interval_seconds: float,
    ) -> None:
        self._guard = guard
        self._scorer = scorer
        self._fingerprint = fingerprint
        self._interval_seconds = interval_seconds
        self._due = 0.0
        self._is_silent = False

    async def ask(self) -> None:
        """Ask now if it is time, and the profile says what the reranker's scores were."""
        profile = self._guard.profile
        if profile is None or FINGERPRINT_KEY not in profile.fingerprint:
            return
        if time.monotonic() < self._due:
            return
        try:
            scores = [await self._scorer.ascore(query, texts) for query, texts in PROBES]
        except Exception as error:
            if not self._is_silent:
                _log.warning(
                    "the reranker gave no scores of the probe texts (%s), so that it cannot be "
                    "compared with the profile's; it is asked again",
                    describe_error(error),
                )
            self._is_silent = True
            return
        self._is_silent, self._due = False, time.monotonic() + self._interval_seconds
        self._guard.use_fingerprint({**self._fingerprint, FINGERPRINT_KEY: described(scores)})

    async def run(self) -> None:
        """Ask now and then until cancelled; soon again where no answer came."""
        while True:
            before = self._guard.comparison.flags
            await asyncio.sleep(min(_RETRY_SECONDS, self._interval_seconds))
            await self.ask()
            if self._guard.comparison.flags != before:
                log_differences(self._guard)


def log_differences(guard: ContextGuard) -> None:
    """Log what differs between the profile's system and this one."""
    comparison = guard.comparison
    for line in comparison.mismatches:
        _log.warning("the profile was calibrated on another system: %s", line)
    for line in comparison.reservations:
        _log.warning("the profile applies, but may not hold: %s", line)
    if not comparison.differences and guard.profile is not None:
        _log.info("the profile was calibrated on this system")
