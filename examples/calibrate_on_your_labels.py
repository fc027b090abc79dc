"""Calibrate on labelled questions, save the profile, and compare what is served with today's.

python examples/calibrate_on_your_labels.py
"""

import tempfile
from pathlib import Path

from handbook import QUESTIONS, search

from calibration.calibrate import Settings, calibrate
from calibration.data.dataset import Dataset, Query
from ctxguard import ContextGuard, Hit, ProfileCheck, Ranking
from ctxguard.profile.describe import describe_policy

TODAY = 5
QUESTION = "when is the refund paid to my card"


class Handbook:
    """The engine as a retriever: an object with ``retrieve(query, *, depth)``."""

    def retrieve(self, query: str, *, depth: int) -> Ranking:
        hits = [Hit(passage_id, score, text) for passage_id, score, text in search(query, depth)]
        return Ranking.from_hits(hits, "ratio")

    def fingerprint(self) -> dict[str, str]:
        """What the scores depend on: a profile holds for equal fingerprints only."""
        return {"engine": "sqlite fts5", "corpus": "shop handbook"}


# Grade 1 for each passage that answers the question; what is not named is not relevant.
labels = Dataset(
    name="handbook",
    queries=tuple(Query(query_id=question, text=question) for question in QUESTIONS),
    qrels={question: dict.fromkeys(ids, 1) for question, ids in QUESTIONS.items()},
)

retriever = Handbook()
# 30 labels can show that mean recall falls by 0.07 at most; the default, 0.01, needs 107 of them.
calibration = calibrate(retriever, labels, Settings(serving_k=TODAY, tolerance=0.07))

with tempfile.TemporaryDirectory() as folder:
    profile = Path(folder) / "profile.json"
    calibration.profile.save(profile)
    guard = ContextGuard(retriever, profile=profile, check=ProfileCheck(strict=True))

[route], [outcome] = calibration.profile.routes.values(), calibration.outcomes.values()
print(f"chosen:  {describe_policy(route.policy)}")
print(f"verdict: {route.verdict.statement}\n")

print(f"{len(QUESTIONS)} questions     today  guarded")
for name in ("recall", "precision", "kept"):
    today, guarded = (each.metrics[name].mean() for each in (outcome.today, outcome.chosen))
    print(f"{name:14} {today:6.2f} {guarded:8.2f}")

context = guard.retrieve(QUESTION)
print(f"\n{QUESTION}?")
for passage_id, _, text in search(QUESTION, TODAY):
    print("  kept   " if passage_id in context.kept_ids else "  dropped", text)

assert route.verdict.decision == "enforce"
assert "refund" in context.kept_ids
assert len(context.passages) < TODAY
assert not context.flags
