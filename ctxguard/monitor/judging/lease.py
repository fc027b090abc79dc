"""Samples stay with the monitor that claimed them while it is at work, and little longer.

A monitor that is killed renews nothing, so that what it had claimed soon waits for another.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctxguard._support.error_text import describe_error
from ctxguard.monitor.store import SampleStore

LEASE_SECONDS = 60.0
"""How long samples stay claimed without a word of their monitor."""
_RENEWED_SECONDS = 15.0
_LONGEST_SECONDS = 600.0
"""A judge that has hung for so long on what was claimed loses it."""

_log = logging.getLogger(__name__)


@contextmanager
def renewed(store: SampleStore, claimant: str) -> Iterator[None]:
    """Renew the leases of a claimant, on a thread, while the block runs."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(store, claimant, ended), name="ctxguard-monitor-lease", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        # No thread can be started: a batch that takes longer than a lease may be judged twice.
        _log.warning("leases are not renewed: %s", describe_error(error))
    try:
        yield
    finally:
        ended.set()


def _renew(store: SampleStore, claimant: str, ended: threading.Event) -> None:
    until = time.monotonic() + _LONGEST_SECONDS
    while not ended.wait(_RENEWED_SECONDS) and time.monotonic() < until:
        try:
            store.renew(claimant, lease_seconds=LEASE_SECONDS)
        except Exception as error:
            # The next try may come in time, and what is judged twice counts once.
            _log.info("leases could not be renewed: %s", describe_error(error))
