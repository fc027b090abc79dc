"""Calibrate a search function of your own, see what the choice achieves on its labels, serve by it.

python examples/calibrate_a_callable.py
"""

from handbook import QUESTIONS, search

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from ctxguard import ContextGuard, Hit, ProfileCheck


def retrieve(query: str, *, depth: int) -> list[Hit]:
    return [Hit(*found) for found in search(query, depth)]  # id, score, text


grades = {question: dict.fromkeys(ids, 1) for question, ids in QUESTIONS.items()}
labels = Dataset("handbook", tuple(Query(question, question) for question in QUESTIONS), grades)
system = {"engine": "sqlite fts5", "corpus": "shop handbook"}
profile = calibrate(retrieve, labels, score_kind="ratio", fingerprint=system).profile
for name in ("recall", "precision", "kept"):
    print(name, profile.routes["external"].evidence.metrics[name])
guard = ContextGuard(retrieve, score_kind="ratio", check=ProfileCheck(system), profile=profile)
print(guard.retrieve("how often do I descale the machine").text)
