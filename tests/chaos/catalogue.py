"""Every fault by its name: what should come of it, and what brings it about."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faults_of_legs as legs
import faults_of_processes as processes
import faults_of_reloading as reloading
import faults_of_rerankers as rerankers
import faults_of_samples as samples
from hostile_documents import hostile
from killed_writers import writer_killed
from scene import Seen, Size


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes:
        expected: What should come of it, in words.
        run: Brings it about in this process, whose folder is its own.
    """

    expected: str
    run: Callable[[Path, Size], Seen]


_WITHOUT_DENSE = "the lexical route by its own policy, flagged; hybrid again when it is back"
_WITHOUT_RERANKER = "the hybrid route by its own policy, flagged; reranked again when it is back"

ROWS = {
    "dense leg raises": Row(_WITHOUT_DENSE, legs.dense_raises),
    "dense leg hangs": Row(_WITHOUT_DENSE + "; by the deadline", legs.dense_hangs),
    "dense leg gives NaN": Row(_WITHOUT_DENSE, legs.dense_is_nan),
    "dense leg of another dimension": Row(_WITHOUT_DENSE, legs.dense_is_of_another_dimension),
    "lexical leg hangs": Row(
        "the dense route by its own policy, flagged; by the deadline", legs.lexical_hangs
    ),
    "lexical index missing": Row(
        "loading refuses it, reloading keeps the last good one; a leg without it leaves the "
        "dense route",
        legs.lexical_index_is_missing,
    ),
    "all legs dead": Row("a typed outage each time, never an empty answer", legs.all_legs_are_dead),
    "reranker out of memory": Row(_WITHOUT_RERANKER, rerankers.out_of_memory),
    "reranker stopped": Row(_WITHOUT_RERANKER + "; by the deadline", rerankers.stopped),
    "profile malformed or foreign": Row(
        "the last good one stays in force, with an alarm", reloading.bad_profiles
    ),
    "profile swapped under load": Row(
        "each request under one profile, from retrieval to decision", reloading.profile_swapped
    ),
    "index swapped every 10 ms": Row(
        "each answer from one generation, flagged where the profile is not for it",
        reloading.index_swapped,
    ),
    "queue full": Row("samples lost as queue_full; requests as ever", samples.queue_full),
    "disk full": Row(
        "samples wait, are stored once there is room, or lost as store_failed at the end",
        samples.disk_full,
    ),
    "store locked by another process": Row(
        "samples wait, are stored once it is free, or lost as store_failed at the end",
        samples.store_locked,
    ),
    "redactor raises": Row(
        "those samples lost as redaction_failed, never written", samples.redactor_raises
    ),
    "writer killed": Row(
        "all but what was in hand is stored; that is counted as killed", writer_killed
    ),
    "judge down during load": Row(
        "samples wait, and are judged when it is back", samples.judge_down
    ),
    "forked after warm-up": Row(
        "children answer in full, with samples of their own", processes.forked_after_warm_up
    ),
    "clock stepped by a day": Row(
        "nothing is deleted or left unjudged; circuits close again", processes.clock_stepped
    ),
    "burst of requests, asyncio": Row(
        "answered, or refused with a typed error; memory bounded", processes.burst_of_tasks
    ),
    "burst of requests, threads": Row(
        "answered, or refused with a typed error; memory bounded", processes.burst_of_threads
    ),
    "hostile documents": Row(
        "each inside its block, without hidden characters; a bad one costs itself alone", hostile
    ),
}
