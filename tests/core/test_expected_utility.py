"""The expected-utility policy: order by P(relevant), keep what is worth its place."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.decision import decide
from ctxguard.core.passages import TOKENS
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import DropReason, Flag, Hit, Leg, Ranking, ScoreKind, Threshold
from ctxguard.errors import ConfigurationError

# Log-odds are the logit leg's own score, so that a test can write probabilities down.
IDENTITY = RelevanceModel(("rerank",), (1.0, 0, 0, 0, 0), (0.0,) * 5, (1.0,) * 5, 0.0)


def log_odds(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


def ranking_of(
    probabilities: Sequence[float],
    scores: Sequence[float | None] | None = None,
    ids: Sequence[str] | None = None,
) -> Ranking:
    """Passages a, b, … with these probabilities; their own scores fall from n to 1."""
    n = len(probabilities)
    scores = [float(n - i) for i in range(n)] if scores is None else scores
    ids = [chr(97 + i) for i in range(n)] if ids is None else ids
    hits = [Hit(passage_id, score) for passage_id, score in zip(ids, scores, strict=True)]
    odds = np.array([p if math.isnan(p) else log_odds(p) for p in probabilities])
    return replace(
        Ranking.from_hits(hits, ScoreKind.RATIO), legs={"rerank": Leg(odds, ScoreKind.LOGIT)}
    )


def policy_of(
    k: int = 5, cost: float = 1.0, gain: float = 1.0, min_keep: int = 1
) -> ExpectedUtilityPolicy:
    return ExpectedUtilityPolicy(IDENTITY, k=k, cost=cost, gain=gain, min_keep=min_keep)


shares = st.lists(st.floats(0.01, 0.99), max_size=15)


@st.composite
def policies(draw: st.DrawFn) -> ExpectedUtilityPolicy:
    k = draw(st.integers(1, 10))
    return policy_of(
        k,
        cost=draw(st.floats(0.0, 3.0)),
        gain=draw(st.floats(0.1, 3.0)),
        min_keep=draw(st.integers(0, k)),
    )


class TestRule:
    def test_passages_of_no_negative_utility_are_kept(self) -> None:
        # cost / (cost + gain) = 0.5 / 1.5
        policy = policy_of(cost=0.5)
        assert policy.min_probability == pytest.approx(1 / 3)
        assert decide(ranking_of([0.9, 0.34, 0.33]), policy).kept_ids == ("a", "b")
        assert decide(ranking_of([0.9, 0.5]), policy_of()).kept_ids == ("a", "b")  # exactly zero

    def test_equal_probabilities_keep_score_order(self) -> None:
        ranking = ranking_of([0.7, 0.7, 0.7], scores=[1.0, 3.0, 2.0])
        assert decide(ranking, policy_of()).kept_ids == ("b", "c", "a")

    def test_rank_only_scores_are_no_obstacle(self) -> None:
        fused = replace(ranking_of([0.6, 0.9]), kind=ScoreKind.RANK)
        decision = decide(fused, policy_of())
        assert decision.kept_ids == ("b", "a")
        assert [candidate.relative_score for candidate in decision.decisions] == [None, None]


class TestProperties:
    @given(shares, policies())
    def test_kept_are_the_worthwhile_by_probability(
        self, probabilities: list[float], policy: ExpectedUtilityPolicy
    ) -> None:
        """Exactly the worthwhile by probability within k and `min_keep` are kept."""
        decision, n = decide(ranking_of(probabilities), policy), len(probabilities)
        order, found = list(decision.order), list(decision.probabilities or ())
        assert sorted(order) == list(range(n))
        assert found == pytest.approx([probabilities[position] for position in order])
        assert list(zip(found, order, strict=True)) == sorted(
            zip(found, order, strict=True), key=lambda pair: (-pair[0], pair[1])
        )
        assert list(decision.kept) == order[: decision.n_kept]
        worthwhile = sum(p >= policy.min_probability for p in found)
        assert decision.n_kept == max(min(worthwhile, policy.k), min(policy.min_keep, n))
        assert len(decision.decisions) == n
        assert decision.n_kept + sum(decision.dropped_by_reason.values()) == n
        for candidate in decision.decisions:
            assert candidate.kept == (candidate.passage_id in decision.kept_ids)
            assert candidate.kept == (not candidate.kept_if)


class TestDecisions:
    def test_drop_names_the_probability_to_keep(self) -> None:
        decision = decide(ranking_of([0.9, 0.25]), policy_of())
        candidate = decision.decisions[1]
        assert candidate.reason is DropReason.BELOW_PROBABILITY
        assert (candidate.probability, candidate.relative_score) == (pytest.approx(0.25), 0.5)
        assert candidate.kept_if == (Threshold("min_probability", candidate.probability),)
        cheaper = policy_of(cost=0.25 / 0.75 - 1e-9)
        assert decide(ranking_of([0.9, 0.25]), cheaper).kept_ids == ("a", "b")

        beyond = decide(ranking_of([0.9, 0.2]), policy_of(k=1)).decisions[1]
        assert beyond.reason is DropReason.BEYOND_K
        assert [threshold.setting for threshold in beyond.kept_if] == ["k", "min_probability"]


class TestMissingSignals:
    @pytest.mark.parametrize(
        "legs",
        [
            {},
            {"dense": Leg(np.array([0.9, 0.2, 0.1]), ScoreKind.COSINE)},
            dict.fromkeys(("dense", "rerank"), Leg(np.array([0.9, 0.2, 0.1]), ScoreKind.LOGIT)),
            {"rerank": Leg(np.array([0.9, 0.2, 0.1]), ScoreKind.RANK)},
            *[
                {"rerank": Leg(np.array([0.9, bad, 0.1]), ScoreKind.LOGIT)}
                for bad in (math.nan, math.inf, -math.inf, -3.4e38)
            ],
        ],
    )
    def test_top_k_is_kept_and_flagged(self, legs: dict[str, Leg]) -> None:
        ranking = replace(ranking_of([0.1, 0.9, 0.5]), legs=legs)
        decision = decide(ranking, policy_of(k=2))
        assert (decision.kept_ids, decision.flags) == (("a", "b"), (Flag.MISSING_SIGNALS,))
        assert decision.probabilities is None
        assert decision.dropped_by_reason == {DropReason.BEYOND_K: 1}

    def test_bad_distances_keep_the_upstream_order(self) -> None:
        hits = [Hit("a", 0.1), Hit("b", 0.5), Hit("c", 0.9)]
        decision = decide(Ranking.from_hits(hits, ScoreKind.DISTANCE), policy_of(k=2))
        assert decision.kept_ids == ("a", "b")
        assert decision.flags == (Flag.MISSING_SIGNALS, Flag.DOMAIN_VIOLATION)

    @pytest.mark.parametrize("per_token", [False, True])
    def test_an_empty_ranking_misses_nothing(self, per_token: bool) -> None:
        decision = decide(ranking_of([]), replace(policy_of(), per_token=per_token))
        assert (decision.kept_ids, decision.flags) == ((), ())


def with_lengths(ranking: Ranking, tokens: Sequence[float]) -> Ranking:
    return replace(ranking, signals={TOKENS: np.array(tokens, dtype=float)})


@st.composite
def lengthy(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Probabilities, and tokens of as many passages."""
    probabilities = draw(shares)
    n = len(probabilities)
    return probabilities, draw(st.lists(st.integers(0, 2_000), min_size=n, max_size=n))


class TestPerToken:
    """A long passage takes more of the budget, so more must speak for it."""

    @staticmethod
    def policy(**settings: float) -> ExpectedUtilityPolicy:
        return replace(policy_of(**settings), per_token=True)  # type: ignore[arg-type]

    def test_a_long_passage_needs_more_probability(self) -> None:
        """The threshold is .5; 300 tokens halve P, 100 leave it, none double it."""
        ranking = ranking_of([0.9, 0.9, 0.6, 0.3])
        kept = decide(with_lengths(ranking, [300, 100, 100, 0]), self.policy()).kept_ids
        assert kept == ("b", "c", "d")
        assert decide(with_lengths(ranking, [299, 100, 100, 70]), self.policy()).kept_ids == (
            "b",
            "c",
        )
        assert decide(ranking, policy_of()).kept_ids == ("a", "b", "c")

    def test_drop_names_the_threshold_to_keep(self) -> None:
        ranking = with_lengths(ranking_of([0.9, 0.8, 0.4]), [100, 500, 100])
        decision = decide(ranking, self.policy())
        assert decision.kept_ids == ("a",)
        for candidate in decision.decisions[1:]:
            assert candidate.reason is DropReason.BELOW_PROBABILITY
            (threshold,) = candidate.kept_if
            assert threshold.setting == "min_probability"
            below, above = (
                self.policy(cost=least / (1.0 - least))
                for least in (threshold.value - 1e-9, threshold.value + 1e-9)
            )
            assert candidate.passage_id in decide(ranking, below).kept_ids
            assert candidate.passage_id not in decide(ranking, above).kept_ids
        assert decision.decisions[2].probability == pytest.approx(0.8)

    @pytest.mark.parametrize(
        "tokens", [None, [100.0, math.nan, 100.0], [math.inf, 100.0, 100.0]], ids=str
    )
    def test_missing_lengths_keep_the_top_k(self, tokens: list[float] | None) -> None:
        ranking = ranking_of([0.1, 0.9, 0.5])
        if tokens is not None:
            ranking = with_lengths(ranking, tokens)
        decision = decide(ranking, self.policy(k=2))
        assert (decision.kept_ids, decision.flags) == (("a", "b"), (Flag.MISSING_SIGNALS,))
        assert decision.probabilities is None

    @given(lengthy(), policies())
    def test_kept_are_best_by_weighed_probability(
        self, given: tuple[list[float], list[float]], policy: ExpectedUtilityPolicy
    ) -> None:
        probabilities, tokens = given
        policy, n = replace(policy, per_token=True), len(probabilities)
        decision = decide(with_lengths(ranking_of(probabilities), tokens), policy)
        order = list(decision.order)
        assert sorted(order) == list(range(n))
        found = np.array(decision.probabilities or ())
        assert found == pytest.approx([probabilities[at] for at in order])
        weighed = found * 200.0 / (np.array([tokens[at] for at in order], dtype=float) + 100.0)
        assert (decision.weighed or []) == pytest.approx(weighed)
        worthwhile = int((weighed >= policy.min_probability).sum())
        n_kept = decision.n_kept
        assert n_kept == max(min(worthwhile, policy.k), min(policy.min_keep, n))
        assert (np.diff(found[:n_kept]) <= 0.0).all()
        assert weighed[:n_kept].min(initial=np.inf) >= weighed[n_kept:].max(initial=-np.inf)
        assert (np.diff(weighed[n_kept:]) <= 0.0).all()

    @given(lengthy(), policies(), st.booleans(), st.randoms())
    def test_order_of_input_does_not_matter(
        self,
        given: tuple[list[float], list[float]],
        policy: ExpectedUtilityPolicy,
        per_token: bool,
        random: object,
    ) -> None:
        probabilities, tokens = given
        ranking = with_lengths(ranking_of(probabilities), tokens)
        order = list(range(len(probabilities)))
        random.shuffle(order)  # type: ignore[attr-defined]
        shuffled = replace(
            ranking,
            passage_ids=[ranking.passage_ids[i] for i in order],
            scores=[ranking.scores[i] for i in order],
            legs={"rerank": Leg(ranking.legs["rerank"].scores[order], ScoreKind.LOGIT)},
            signals={TOKENS: ranking.signals[TOKENS][order]},
        )
        policy = replace(policy, per_token=per_token)
        assert decide(shuffled, policy).kept_ids == decide(ranking, policy).kept_ids

    def test_garbage_takes_no_others_length(self) -> None:
        ranking = ranking_of(
            [0.9, 0.8, 0.7, 0.6], scores=[4.0, math.nan, 2.0, 1.0], ids=["a", "b", "a", "c"]
        )
        decision = decide(with_lengths(ranking, [100, 0, 0, 900]), self.policy())
        assert (decision.kept_ids, decision.weighed) == (("a",), pytest.approx([0.9, 0.12]))


class TestSetAside:
    def test_garbage_and_repeats_are_no_candidates(self) -> None:
        ranking = ranking_of(
            [0.9, 0.8, 0.7, 0.6], scores=[4.0, math.nan, 2.0, 1.0], ids=["a", "b", "a", "c"]
        )
        decision = decide(ranking, policy_of())
        assert (decision.kept_ids, decision.flags) == (("a", "c"), (Flag.INVALID_SCORES,))
        reasons = {ranking.passage_ids[i]: reason for i, reason in decision.set_aside}
        assert reasons == {"b": DropReason.INVALID_SCORE, "a": DropReason.DUPLICATE_ID}

    def test_set_aside_leaves_others_signals_alone(self) -> None:
        with_garbage = ranking_of([0.9, math.nan, 0.6], scores=[3.0, None, 1.0])
        decision = decide(with_garbage, policy_of())
        assert decision.flags == (Flag.INVALID_SCORES,)
        assert decision.probabilities == pytest.approx([0.9, 0.6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k 0"),
        ({"min_keep": 6}, "min_keep 6"),
        ({"cost": -0.1}, "cost -0.1"),
        ({"cost": math.inf}, "cost inf"),
        ({"cost": math.nan}, "cost nan"),
        ({"gain": 0.0}, "gain 0.0"),
        ({"gain": math.nan}, "gain nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        policy_of(**change)  # type: ignore[arg-type]
