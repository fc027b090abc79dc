"""Calibrate on labelled questions, save the profile, and serve by it.

python examples/calibrate_on_your_labels.py
"""

import tempfile
from pathlib import Path

from handbook import QUESTIONS, search

from calibration.calibrate import calibrate
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, Query
from ctxguard import ContextGuard, Hit, ProfileCheck, Ranking
from ctxguard.profile.describe import describe_policy


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
    queries=tuple(Query(f"q{n}", question) for n, question in enumerate(QUESTIONS)),
    qrels={f"q{n}": dict.fromkeys(ids, 1) for n, ids in enumerate(QUESTIONS.values())},
)

retriever = Handbook()
# So few labels can show that recall falls by 0.05 at most, and no less.
calibration = calibrate(retriever, labels, Settings(tolerance=0.05))

with tempfile.TemporaryDirectory() as folder:
    profile = Path(folder) / "profile.json"
    calibration.profile.save(profile)
    guard = ContextGuard(retriever, profile=profile, check=ProfileCheck(strict=True))

context = guard.retrieve("when is the refund paid to my card")
print(f"kept {len(context.passages)} of {context.candidates} candidates:")
for passage in context.passages:
    print(f"  {passage.passage_id}: {passage.text}")

[route] = calibration.profile.routes.values()
print(f"chosen: {describe_policy(route.policy)}")
print(f"verdict: {route.verdict.statement}")
for name in ("recall", "precision", "kept"):
    figure = route.evidence.metrics[name]
    print(f"{name} on {figure.n} questions: {figure.value:.2f}")

assert "refund" in context.kept_ids
assert not context.flags
