"""Calibrate a search function of your own, see what the choice achieves on its labels, serve by it.

python examples/calibrate_a_callable.py
"""

from handbook import QUESTIONS, search

from calibration.calibrate import Settings, calibrate
from calibration.data.dataset import Dataset, Query
from ctxguard import ContextGuard, Hit, ProfileCheck


def retrieve(query: str, *, depth: int) -> list[Hit]:
    return [Hit(*found) for found in search(query, depth)]  # id, score, text


system = {"engine": "sqlite fts5", "corpus": "shop handbook"}
grades = {question: dict.fromkeys(ids, 1) for question, ids in QUESTIONS.items()}
labels = Dataset("handbook", tuple(Query(each, each) for each in QUESTIONS), grades)
few = Settings(tolerance=0.07)  # of recall: 30 labels can show no less; the default needs 107
profile = calibrate(retrieve, labels, few, score_kind="ratio", fingerprint=system).profile
print(profile.routes["external"].verdict.statement)  # with its evidence
guard = ContextGuard(retrieve, score_kind="ratio", check=ProfileCheck(system), profile=profile)
print(guard.retrieve("how often do I descale the machine").text)
