"""The list of faults: the effect that each should have, and the function that causes it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fleet_faults as fleet
import leg_faults as legs
import process_faults as processes
import reload_faults as reloading
import reranker_faults as rerankers
import sample_faults as samples
from kill_faults import writer_killed
from serving import Result, Size


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        expected: The effect that it should have, in words.
        run: Causes it in this process, given a folder for its files, and returns its effect.
    """

    expected: str
    run: Callable[[Path, Size], Result]


_WITHOUT_DENSE = "the lexical route by its own policy, flagged; hybrid again when it is back"
_WITHOUT_RERANKER = "the hybrid route by its own policy, flagged; reranked again when it is back"

FAULTS = {
    "dense leg raises": Fault(_WITHOUT_DENSE, legs.dense_raises),
    "dense leg hangs": Fault(_WITHOUT_DENSE + "; by the deadline", legs.dense_hangs),
    "lexical leg hangs": Fault(
        "the dense route by its own policy, flagged; by the deadline", legs.lexical_hangs
    ),
    "lexical index missing": Fault(
        "loading refuses it, reloading keeps the last good one; a leg without it leaves the "
        "dense route",
        legs.lexical_index_is_missing,
    ),
    "all legs dead": Fault(
        "a typed outage each time, never an empty answer", legs.all_legs_are_dead
    ),
    "reranker out of memory": Fault(_WITHOUT_RERANKER, rerankers.out_of_memory),
    "reranker stopped": Fault(_WITHOUT_RERANKER + "; by the deadline", rerankers.stopped),
    "profile swapped under load": Fault(
        "each request under one profile, from retrieval to decision", reloading.profile_swapped
    ),
    "index swapped every 10 ms": Fault(
        "each answer from one generation, flagged where the profile is not for it",
        reloading.index_swapped,
    ),
    "disk full": Fault(
        "samples wait, are stored once there is room, or lost as store_failed at the end",
        samples.disk_full,
    ),
    "store locked by another process": Fault(
        "samples wait, are stored once it is free, or lost as store_failed at the end",
        samples.store_locked,
    ),
    "writer killed": Fault("what was in hand and is not stored is unaccounted for", writer_killed),
    "writers of a fleet killed": Fault(
        "sampled = stored + lost + pending while they live; then what they held is unaccounted for",
        fleet.writers_killed,
    ),
    "judge down during load": Fault(
        "samples wait, and are judged when it is back", samples.judge_down
    ),
    "forked after warm-up": Fault(
        "children answer in full, with samples of their own", processes.forked_after_warm_up
    ),
    "clock stepped by a day": Fault(
        "nothing is deleted or left unjudged; circuits close again", processes.clock_stepped
    ),
    "burst of requests, asyncio": Fault(
        "answered, or refused with a typed error; memory bounded", processes.burst_of_tasks
    ),
    "burst of requests, threads": Fault(
        "answered, or refused with a typed error; memory bounded", processes.burst_of_threads
    ),
}
