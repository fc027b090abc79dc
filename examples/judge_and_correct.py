"""Judge sampled traffic with a judge that errs, and correct it by what people say.

    python examples/judge_and_correct.py

The judge's own mean is biased. Human grades on a random part of the samples measure its error, and
the published estimate takes that into account, with an interval (prediction-powered inference).
"""

import csv
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from handbook import QUESTIONS, search

from ctxguard import ContextGuard, Hit, Passage, RatioPolicy, sample_to
from ctxguard.monitor.estimation.live import Metric, Window
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.monitor.service import Monitor

REQUESTS, LABELLED = 600, 80


class CarelessJudge:
    """Stands for a language model: calls one relevant passage in five irrelevant."""

    name, version, max_grade = "careless", "1", 1

    def __init__(self) -> None:
        self._random = random.Random(0)

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        return [
            Judgment(
                p.passage_id, int(p.passage_id in QUESTIONS[query] and self._random.random() > 0.2)
            )
            for p in passages
        ]


def label(command: str, *arguments: object) -> None:
    """Run ``ctxguard label``."""
    words = [sys.executable, "-m", "ctxguard", "label", command, *map(str, arguments)]
    subprocess.run(words, check=True)


with tempfile.TemporaryDirectory() as folder:
    url, todo = f"sqlite:///{folder}/samples.db", Path(folder) / "todo.csv"

    # Serve: every request is sampled here; in production a few in a hundred are.
    samples = sample_to(url, rate=1.0)
    guard = ContextGuard(
        lambda query, depth: [Hit(*row) for row in search(query, depth)],
        score_kind="ratio",
        policy=RatioPolicy(k=3),
        sampler=samples.sampler,
        depth=8,
    )
    traffic = random.Random(1).choices(list(QUESTIONS), k=REQUESTS)
    served = [guard.retrieve(question) for question in traffic]
    samples.flush()

    # Judge: what was served, and a random part of what was dropped.
    monitor = Monitor(samples.store, CarelessJudge())
    while monitor.step():
        pass

    # Label: people fill the column "grade" of a file of requests picked at random.
    label("export", "--store", url, "--out", todo, "-n", LABELLED)
    with todo.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["grade"] = str(int(row["passage_id"] in QUESTIONS[row["query"]]))
    with todo.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    label("import", todo, "--store", url, "--annotator", "ann", "--max-grade", 1)

    report = monitor.report()
    estimate = report.estimates[Window.ALL_RETAINED][Metric.PRECISION]
    samples.stop()

relevant = [sum(i in QUESTIONS[c.query] for i in c.kept_ids) / len(c.kept_ids) for c in served]
print(f"precision of {REQUESTS} requests, from {LABELLED} labelled ones and the judge:")
print(f"  estimate  {estimate.value:.3f} [{estimate.lower:.3f}, {estimate.upper:.3f}]")
print(f"  truth     {sum(relevant) / len(relevant):.3f}")

# Not that the interval holds the truth: one in twenty does not.
assert abs(estimate.value - sum(relevant) / len(relevant)) < 0.1
