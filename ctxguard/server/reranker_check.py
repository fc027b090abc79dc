"""Compares the serving reranker or embedder with the one that the profile was calibrated on.

Calls the scorer and the retriever, tells the guard, reads the monotonic clock, and logs.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from ctxguard._support.error_text import describe_error
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.profile.reranker_probe import FINGERPRINT_KEY, PROBES, described
from ctxguard.server.scoring import Scorer

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


async def keep_comparing(
    guard: ContextGuard,
    scorer: Scorer,
    fingerprint: Mapping[str, str],
    interval_seconds: float,
    compared: asyncio.Event,
) -> None:
    """At intervals, ask a reranker for its scores of the probe texts, and tell the guard.

    Without an answer it asks again soon; the former answer stays, or else the profile applies
    unverified. It asks only if the profile has the probe scores, sets ``compared`` after the first
    attempt, and runs until cancelled. ``fingerprint`` is the system's, without the scores.
    """
    due, is_silent, former = 0.0, False, None
    while True:
        profile = guard.profile
        is_probed = profile is not None and FINGERPRINT_KEY in profile.fingerprint
        if is_probed and time.monotonic() >= due:
            try:
                scores = [await scorer.ascore(query, texts) for query, texts in PROBES]
                is_silent, due = False, time.monotonic() + interval_seconds
                guard.use_fingerprint({**fingerprint, FINGERPRINT_KEY: described(scores)})
            except Exception as error:
                if not is_silent:
                    _log.warning(
                        "the reranker did not score the probe texts (%s), so it cannot be compared "
                        "with the profile's; asking again",
                        describe_error(error),
                    )
                is_silent = True
        if former is not None and guard.comparison.flags != former:
            log_differences(guard)
        former = guard.comparison.flags
        compared.set()
        await asyncio.sleep(min(_RETRY_SECONDS, interval_seconds))


async def keep_probing(guard: ContextGuard, interval_seconds: float) -> None:
    """Compare a retriever's model with the profile's at intervals, until cancelled."""
    while True:
        await asyncio.sleep(interval_seconds)
        former = guard.comparison.flags
        await asyncio.to_thread(guard.probe)
        if guard.comparison.flags != former:
            log_differences(guard)


def log_differences(guard: ContextGuard) -> None:
    """Log the differences between the profile's system and this one."""
    comparison = guard.comparison
    for line in comparison.mismatches:
        _log.warning("the profile was calibrated on another system: %s", line)
    for line in comparison.reservations:
        _log.warning("the profile applies, but may not be valid: %s", line)
    if not comparison.differences and guard.profile is not None:
        _log.info("the profile was calibrated on this system")
