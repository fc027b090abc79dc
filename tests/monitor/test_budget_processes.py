"""One judging budget for several monitors, each a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from contexts import make_context
from storing import OpenStore
from watching import NOW, Watching

from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import JudgingRates
from tests.timing import PATIENCE_SECONDS

LIMIT = 200
_MONITOR = f"""
import random, sys, time
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judging.budget import BudgetLimits
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore

class Counting:
    name, version, max_grade, n = "counting", "1", 1, 0
    fails = random.Random(1)
    def judge(self, query, passages):
        time.sleep(0.002)
        if self.fails.random() < 0.1:
            raise ConnectionError
        Counting.n += len(passages)
        return [Judgment(one.passage_id, 1) for one in passages]

store = SampleStore.open(sys.argv[1])
monitor = Monitor(
    store, Counting(), budget=BudgetLimits(calls_per_hour={LIMIT}), clock=lambda: {NOW!r}
)
sys.stdin.readline()
idle = 0
while idle < 5:
    idle = 0 if monitor.step(20) else idle + 1
    monitor._budget._measured = None
print(Counting.n)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_three_monitors_keep_one_limit(any_store_url: str, open_store: OpenStore) -> None:
    live = Watching(
        LabelJudge({}),
        store=open_store(any_store_url, clock=lambda: NOW),
        rates=JudgingRates(dropped_rate=0.5),
    )
    pool = [f"p{rank}" for rank in range(10)]
    live.serve(*[make_context(pool, 2, request_id=f"r{n}") for n in range(150)])
    monitors = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_MONITOR), any_store_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    live.writer.stop()
    for monitor in monitors:
        assert monitor.stdin is not None
        monitor.stdin.write("begin\n")
        monitor.stdin.flush()
    counts = []
    for monitor in monitors:
        out, err = monitor.communicate(timeout=PATIENCE_SECONDS)
        assert monitor.returncode == 0, err
        counts.append(int(out))
    assert 0 < sum(counts) <= LIMIT
    [_, calls, _] = json.loads(live.store.get_state("budget counting 1"))["hour"]
    assert sum(counts) >= calls > 0
