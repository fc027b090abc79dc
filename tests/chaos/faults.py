"""The list of faults: the effect that each should have, and the function that causes it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import fleet_faults as fleet
import leg_faults as legs
import process_faults as processes
import reload_faults as reloading
import reranker_faults as rerankers
import sample_faults as samples
from serving import Report, Size

from ctxguard.core.types import FailureKind, Route

_HANGS = partial(legs.lost, fault=legs.hangs, kind=FailureKind.TIMEOUT)
_WITHOUT_DENSE = "the lexical route by its own policy, flagged; hybrid again when it is back"
_WITHOUT_RERANKER = "the hybrid route by its own policy, flagged; reranked again when it is back"

FAULTS: dict[str, tuple[str, Callable[[Path, Size], Report]]] = {
    "dense leg raises": (
        _WITHOUT_DENSE,
        partial(legs.lost, fault=legs.raises, kind=FailureKind.ERROR),
    ),
    "dense leg hangs": (_WITHOUT_DENSE + "; by the deadline", _HANGS),
    "lexical leg hangs": (
        "the dense route by its own policy, flagged; by the deadline",
        partial(_HANGS, leg="lexical", left=Route.DENSE),
    ),
    "lexical index missing": (
        "loading refuses it, reloading keeps the last good one; without it the dense route answers",
        legs.lexical_index_is_missing,
    ),
    "all legs dead": ("a typed outage each time, never an empty answer", legs.all_legs_are_dead),
    "reranker out of memory": (_WITHOUT_RERANKER, rerankers.out_of_memory),
    "reranker stopped": (_WITHOUT_RERANKER + "; by the deadline", rerankers.stopped),
    "profile swapped under load": (
        "each request under one profile, from retrieval to decision",
        reloading.profile_swapped,
    ),
    "index swapped every 10 ms": (
        "each answer from one generation, flagged where the profile is not for it",
        reloading.index_swapped,
    ),
    "disk full": (
        "samples wait, are stored once there is room, or lost as store_failed at the end",
        samples.disk_full,
    ),
    "store locked by another process": (
        "samples wait, are stored once it is free, or lost as store_failed at the end",
        samples.store_locked,
    ),
    "writers of a fleet killed": (
        "sampled = stored + lost + pending while they live; then what they held is unaccounted for",
        fleet.writers_killed,
    ),
    "judge down during load": ("samples wait, and are judged when it is back", samples.judge_down),
    "forked after warm-up": (
        "children answer in full, with samples of their own",
        processes.forked_after_warm_up,
    ),
    "clock stepped by a day": (
        "nothing is deleted or left unjudged; circuits close again",
        processes.clock_stepped,
    ),
    "burst of requests, asyncio": (
        "answered, or refused with a typed error; memory bounded",
        processes.burst_of_tasks,
    ),
    "burst of requests, threads": (
        "answered, or refused with a typed error; memory bounded",
        processes.burst_of_threads,
    ),
}
"""By name, the effect that a fault should have, and the function that causes it in this process."""
