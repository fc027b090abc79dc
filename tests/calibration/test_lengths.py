"""Policies that weigh by length: what is measured of them is what a guard serves."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from simulated_pools import DEPTH, Recorded, guard_of, outcome_of, simulate, with_texts

from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import LabelledRoute
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import contexts
from calibration.replay import replay
from calibration.settings import Settings
from ctxguard.core.passages import TOKENS, estimate_tokens, with_tokens
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import Flag, Hit, Passage, Ranking, ScoreKind
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.record import record_of
from ctxguard.profile.schema import Profile


def lengthened(retriever: Recorded, seed: int = 0) -> Recorded:
    """The same passages with texts of ten to some eight hundred words."""
    random = np.random.default_rng(seed)
    return with_texts(
        retriever, lambda name: f"{name} " + "some words " * int(random.geometric(0.02) + 5)
    )


@cache
def made(n: int = 120) -> tuple[Recorded, Dataset, Calibration]:
    retriever, dataset = simulate(n, noise=0.2)
    texts = lengthened(retriever)
    return texts, dataset, calibrate(texts, dataset, Settings(depth=DEPTH, context="richer"))


def policy_of(made: Calibration) -> ExpectedUtilityPolicy:
    return outcome_of(made).profile.policy


def test_all_count_titles_and_texts() -> None:
    """The replay, the guard's decision and the monitor's sample; titles are what a model reads."""
    passages = [Passage(f"p{n}", "some words " * n, "A title " * (4 - n)) for n in range(1, 4)]
    hits = [Hit(each.passage_id, 0.9, each.text, title=each.title) for each in passages]
    ranking = Ranking.from_hits(hits, ScoreKind.COSINE)
    pools = replay(Recorded({"q": ranking}), [Query("q", "q")], depth=3)
    context = ContextGuard(policy=RatioPolicy(k=3)).filter("q", ranking)
    expected = [estimate_tokens(f"{each.title}{each.text}") for each in passages]
    assert pools.tokens[0].tolist() == expected
    assert with_tokens(ranking).signals[TOKENS].tolist() == expected
    assert record_of(context, 1.0, 0.0).tokens.kept == sum(expected)


def test_guard_serves_measured_contexts() -> None:
    """On other queries than those that chose, all of a saved profile."""
    _, _, calibration = made()
    assert policy_of(calibration).per_token
    profile = Profile.model_validate_json(calibration.profile.to_json())
    retriever, dataset = simulate(60, seed=5, noise=0.2)
    texts = lengthened(retriever, 1)
    guard = guard_of(texts, profile, mode="enforce", depth=DEPTH)
    pools = replay(texts, dataset.queries, depth=DEPTH)
    order, kept = contexts(pools, policy_of(calibration))
    sizes = set()
    for row, query in enumerate(dataset.queries):
        expected = [pools.passage_ids[row][column] for column in order[row][kept[row]]]
        found = guard.retrieve(query.text)
        assert Flag.MISSING_SIGNALS not in found.flags
        assert list(found.kept_ids) == expected
        sizes.add(len(expected))
    assert len(sizes) > 3


def test_unreadable_passage_takes_no_place() -> None:
    texts, dataset, calibration = made()
    query = dataset.queries[0].text
    whole = guard_of(texts, calibration.profile, mode="enforce", depth=DEPTH).retrieve(query)
    lost = whole.kept_ids[0]

    class Lost:
        def __init__(self, ranking: object) -> None:
            self.ranking = ranking

        def __getitem__(self, position: int) -> Passage:
            passage: Passage = self.ranking.passages[position]  # type: ignore[attr-defined]
            if passage.passage_id == lost:
                raise OSError("the disk is gone")
            return passage

    ranking = texts.rankings[query]
    broken = Recorded({query: replace(ranking, passages=Lost(ranking))}, texts.identity)
    found = guard_of(broken, calibration.profile, mode="enforce", depth=DEPTH).retrieve(query)
    assert lost not in found.kept_ids
    assert set(whole.kept_ids) - {lost} <= set(found.kept_ids)
    assert len(found.kept_ids) >= len(whole.kept_ids) - 1


class TestEqualTokens:
    """The longest first k that costs no more than an option."""

    def route(self) -> LabelledRoute:
        return outcome_of(made()[2]).route

    def test_costs_no_more_than_today(self) -> None:
        route, outcome = self.route(), outcome_of(made()[2])
        found = route.of_equal_tokens(outcome.chosen)
        k = found.policy.k
        assert found.policy == RatioPolicy(k=k)
        assert found.name == f"first {k}"
        limit = outcome.chosen.metrics["tokens"].mean()
        tokens = np.nan_to_num(route.measured.tokens).cumsum(axis=1).mean(axis=0)
        assert tokens[k - 1] <= limit < tokens[k]
        assert found.metrics["tokens"].mean() == pytest.approx(tokens[k - 1])
        assert found.metrics["kept"].tolist() == [k] * 120

    def test_it_is_no_row_beside_itself(self) -> None:
        """Neither beside today's context, a policy that is the first k, nor an empty context."""
        route = self.route()
        assert route.of_equal_tokens(route.today) is None
        first_three = contexts(route.measured, RatioPolicy(k=3))
        three = route.option("three", RatioPolicy(k=3), *first_three)
        assert route.of_equal_tokens(three) is None
        order = route.today.order
        empty = route.option("none", RatioPolicy(k=1), order, np.zeros(order.shape, dtype=bool))
        assert route.of_equal_tokens(empty) is None

    def test_without_texts_passages_are_counted(self) -> None:
        retriever, dataset = simulate(120, noise=0.2)
        asked = Settings(depth=DEPTH, context="richer")
        outcome = outcome_of(calibrate(retriever, dataset, asked))
        found = outcome.route.of_equal_tokens(outcome.chosen)
        kept = outcome.chosen.metrics["kept"].mean()
        assert found.policy.k <= kept < found.policy.k + 1
