"""What the clients are tested against: the service's own answer is the decision on the scores."""

from cases import CASES, MIN_RATIO, QUERY, Case, each_case, relevance, truth

from ctxguard.core.scores import relative_scores
from ctxguard.core.types import ScoreKind


@each_case
def test_exactly_the_dropped_documents_have_zero(guarded: str, case: Case) -> None:
    ratios = relative_scores(ScoreKind.PROBABILITY, relevance(QUERY, case.documents))
    kept = [at for at, ratio in enumerate(ratios) if ratio >= MIN_RATIO]
    scores = truth(guarded, case.documents)
    assert [at for at, score in enumerate(scores) if score > 0.0] == kept
    assert all(0.0 <= score <= 1.0 for score in scores)


def test_the_cases_drop_some_and_keep_some(guarded: str) -> None:
    found = [truth(guarded, case.documents) for case in CASES]
    assert sum(0.0 in scores and any(scores) for scores in found) > len(CASES) / 2
