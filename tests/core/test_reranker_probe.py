"""Scores of fixed texts tell a reranker from another, and not from itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Flag, FloatArray, Route, ScoreKind
from ctxguard.profile.comparison import SystemComparison, compare_systems
from ctxguard.profile.reranker_probe import (
    FINGERPRINT_KEY,
    MOST_DIFFERENCE,
    PROBES,
    described,
    difference,
    probe_scores,
)
from ctxguard.profile.schema import RouteProfile
from tests.profiles import profile_with

RNG = np.random.default_rng(3)
SCORES: list[FloatArray] = [RNG.normal(size=len(documents)) for _, documents in PROBES]


def compared(
    then: str | None, now: str | None, corpus: CorpusSketch | None = None
) -> SystemComparison:
    def fingerprint(scores: str | None) -> dict[str, str]:
        return {"reranker": "m"} | ({} if scores is None else {FINGERPRINT_KEY: scores})

    route = RouteProfile(policy=RatioPolicy(), score_kind=ScoreKind.LOGIT)
    profile = profile_with({Route.EXTERNAL: route}, fingerprint=fingerprint(then))
    return compare_systems(profile.model_copy(update={"corpus": corpus}), fingerprint(now), corpus)


@given(st.floats(-0.9, 0.9), st.floats(0.1, 100.0), st.floats(-100.0, 100.0))
def test_rounding_is_the_same_reranker(share: float, scale: float, shift: float) -> None:
    scores = [each * scale + shift for each in SCORES]
    spread = np.concatenate(scores).std()
    noise = share * MOST_DIFFERENCE * spread
    then, now = described(scores), described([each + noise for each in scores])
    assert difference(then, now) == pytest.approx(abs(share) * MOST_DIFFERENCE, abs=5e-3)
    assert compared(then, now) == SystemComparison()


def test_one_changed_score_is_another_reranker() -> None:
    now = [each.copy() for each in SCORES]
    now[0][-1] += 0.2
    comparison = compared(described(SCORES), described(now))
    assert comparison.flags == (Flag.PROFILE_MISMATCH,)
    assert "its scores of the probe texts differ by 0.1" in comparison.mismatches[0]


def test_changed_equal_scores_are_another_reranker() -> None:
    flat = [np.zeros(len(each)) for each in SCORES]
    assert compared(described(flat), described(flat)) == SystemComparison()
    assert compared(described(flat), described([each + 1e-3 for each in flat])).mismatches


@pytest.mark.parametrize("score", [np.nan, np.inf])
def test_not_a_number_is_another_reranker(score: float) -> None:
    now = [each.copy() for each in SCORES]
    now[1][2] = score
    assert compared(described(SCORES), described(now)).mismatches
    assert compared(described(now), described(now)) == SystemComparison()


@pytest.mark.parametrize("now", [None, "", "other 1 2", "garbage"])
def test_incomparable_scores_leave_the_profile_unverified(now: str | None) -> None:
    comparison = compared(described(SCORES), now)
    assert (comparison.mismatches, comparison.flags) == ((), (Flag.UNVERIFIED,))


def test_profile_without_scores_compares_as_before() -> None:
    assert compared(None, described(SCORES)) == SystemComparison()


def test_probes_are_compared_beside_a_sketch() -> None:
    """Scores are compared within their tolerance beside a sketch of the corpus."""
    corpus, nearly = CorpusSketch.of(range(100)), [each * 1.0001 for each in SCORES]
    assert compared(described(SCORES), described(nearly), corpus).flags == ()
    assert compared(described(SCORES), described([each * 2 for each in SCORES]), corpus).mismatches


def test_every_probe_is_scored_in_order() -> None:
    def length(_: str, documents: object) -> FloatArray:
        return np.array([len(each) for each in documents], dtype=float)  # type: ignore[attr-defined]

    expected = [len(each) for _, documents in PROBES for each in documents]
    assert [float(each) for each in probe_scores(length).split(" ")[1:]] == expected


def test_probes_vary_in_length_and_script() -> None:
    """So that truncation, casing and tokenizers show."""
    documents = [each for _, documents in PROBES for each in documents]
    assert len(set(documents)) == len(documents) >= 40
    assert max(map(len, documents)) > 4_000
    assert sum(not each.isascii() for each in documents) >= 10
