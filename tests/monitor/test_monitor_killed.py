"""A monitor that is killed: its counts are those of what it stored, and another goes on at once.

And a fleet on PostgreSQL whose writers are killed; on SQLite see tests/chaos.
"""

import os
import random
import subprocess
import sys
import time

import pytest
from contexts import make_context
from fleet_faults import writers_killed
from storing import OpenStore
from watching import Watching

from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import State
from tests.timing import PATIENCE_SECONDS, until

_MONITOR = """
import sys, time
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judging.budget import BudgetLimits
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import Limits, SampleStore

class Slow:
    name, version, max_grade = "slow", "1", 1
    def judge(self, query, passages):
        time.sleep(0.002)
        return [Judgment(one.passage_id, 1) for one in passages]

# The samples are of long ago.
store = SampleStore.open(sys.argv[1], limits=Limits(None, None))
monitor = Monitor(store, Slow(), budget=BudgetLimits(calls_per_day=1e6))
monitor.start(interval_seconds=0.01, refresh_seconds=0.05)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("seed", range(3))
def test_counts_equal_the_rows(any_store_url: str, open_store: OpenStore, seed: int) -> None:
    store = open_store(any_store_url)
    live = Watching(LabelJudge({}), store=store, rates=JudgingRates(0, 0, 0, 0))
    pool = [f"p{rank}" for rank in range(4)]
    live.serve(*[make_context(pool, 2, request_id=f"r{n}") for n in range(400)])
    live.writer.stop()
    process = subprocess.Popen(
        [sys.executable, "-c", _MONITOR, any_store_url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    until(lambda: store.states()[State.JUDGED] > 0)
    time.sleep(random.Random(seed).uniform(0.0, 0.2))
    assert not store.own()
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)
    n_judged = store.states()[State.JUDGED]
    counts = store.counts("slow 1")
    assert counts["judged_samples", "external", "judged"] == n_judged
    assert counts["grades", "external"] == 2 * n_judged
    other = Monitor(store, LabelJudge({"q": {"p0": 1}}))
    until(other.own)
    while other.step():
        pass
    assert store.states()[State.PENDING] == 0
    assert store.states()[State.JUDGED] == 400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("n", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_killed_fleets_samples_add_up(postgresql_url: str, n: int) -> None:
    assert writers_killed(postgresql_url, n).wrong == ()
