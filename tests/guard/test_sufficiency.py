"""From a calibrated profile file through the guard: is what was kept enough, and who is told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from simulated_pools import Recorded, calibrated, simulate

from ctxguard.core.assembly import Assembly
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DropReason, Flag, Mode, Route
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.profile.schema import Profile

NOTICE = "Nothing that answers the question was found."


@pytest.fixture(scope="module")
def profile() -> Profile:
    return calibrated(300, noise=0.2, unanswerable=0.4).profile


@pytest.fixture
def file(profile: Profile, tmp_path: Path) -> Path:
    profile.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture(scope="module")
def retriever() -> Recorded:
    """The system that was calibrated, over queries that the calibration has not seen."""
    own, _ = simulate(200, seed=1, noise=0.2, unanswerable=0.4)
    return Recorded(own.rankings, {"simulated": "0"})


def guard_of(retriever: Recorded, profile: Path | Profile, **settings: Any) -> ContextGuard:
    return ContextGuard(retriever, profile=profile, **{"mode": "enforce", **settings})


def answers(guard: ContextGuard, retriever: Recorded, **asked: Any) -> Iterator[Context]:
    return (guard.retrieve(query, **asked) for query in retriever.rankings)


def first(guard: ContextGuard, retriever: Recorded, *, sufficient: bool) -> Context:
    return next(each for each in answers(guard, retriever) if each.sufficient is sufficient)


def test_sufficiency_follows_relevance(file: Path) -> None:
    """Most contexts with a relevant passage are sufficient, and many others are not."""
    own, dataset = simulate(200, seed=1, noise=0.2, unanswerable=0.4)
    guard = guard_of(Recorded(own.rankings, {"simulated": "0"}), file)
    found: dict[bool, list[bool | None]] = {True: [], False: []}
    for query in dataset.queries:
        context = guard.retrieve(query.text)
        holds = bool(set(context.kept_ids) & dataset.qrels[query.query_id].keys())
        found[holds].append(context.sufficient)
        assert (Flag.INSUFFICIENT in context.flags) is (context.sufficient is False)
    assert found[True].count(False) <= 0.1 * len(found[True])
    assert found[False].count(False) >= 0.2 * len(found[False])


def test_the_document_says_it(file: Path, retriever: Recorded) -> None:
    context = first(guard_of(retriever, file), retriever, sufficient=False)
    document = json.loads(json.dumps(context.to_dict()))
    assert document["sufficient"] is False
    assert 0.0 < document["p_sufficient"] == context.p_sufficient
    assert document["flags"] == ["insufficient"]


def test_it_is_counted_by_route(file: Path, retriever: Recorded) -> None:
    registry = CollectorRegistry()
    guard = ContextGuard(retriever, profile=file, telemetry=Telemetry(registry, all_metrics=True))
    contexts = list(answers(guard, retriever))
    insufficient = sum(context.sufficient is False for context in contexts)
    assert insufficient > 0
    metrics = generate_latest(registry).decode()
    sufficient = len(contexts) - insufficient
    for name, n in (("insufficient", insufficient), ("sufficient", sufficient)):
        assert f'_sufficiency_total{{context="{name}",route="hybrid"}} {n}.0' in metrics
    assert f'ctxguard_flags_total{{flag="insufficient"}} {insufficient}.0' in metrics


class TestText:
    def test_model_is_told_nothing_by_default(self, file: Path, retriever: Recorded) -> None:
        context = first(guard_of(retriever, file), retriever, sufficient=False)
        assert len(context) > 0
        assert context.text == Assembly().render(context.passages)

    def test_the_text_stands_before_the_passages(self, file: Path, retriever: Recorded) -> None:
        guard = guard_of(retriever, file, assembly=Assembly(insufficient_text=NOTICE))
        context = first(guard, retriever, sufficient=False)
        assert context.text == f"{NOTICE}\n{Assembly().render(context.passages)}"
        assert NOTICE not in first(guard, retriever, sufficient=True).text

    def test_abstention_text_stands_alone(self, file: Path, retriever: Recorded) -> None:
        assembly = Assembly(insufficient_text=NOTICE, abstain=True)
        guard = guard_of(retriever, file, assembly=assembly)
        context = first(guard, retriever, sufficient=False)
        assert (context.text, context.passages, context.kept_ids) == (NOTICE, (), ())
        dropped = context.dropped_by_reason
        assert dropped[DropReason.INSUFFICIENT] == context.decision.n_kept > 0
        assert sum(dropped.values()) == context.candidates
        dropped = next(each for each in context.decisions if each.reason is DropReason.INSUFFICIENT)
        assert dropped.kept_if[0].setting == "abstain"
        assert len(first(guard, retriever, sufficient=True)) > 0

    def test_abstention_stands_where_nothing_was_retrieved(self) -> None:
        guard = ContextGuard(
            lambda query, depth: [],
            score_kind="cosine",
            assembly=Assembly(insufficient_text=NOTICE),
        )
        context = guard.retrieve("anything")
        assert (context.text, context.sufficient) == (NOTICE, None)

    def test_shadow_records_decision_serves_bare_passages(
        self, file: Path, retriever: Recorded
    ) -> None:
        assembly = Assembly(insufficient_text=NOTICE, abstain=True)
        guard = guard_of(retriever, file, assembly=assembly, mode=Mode.SHADOW)
        context = first(guard, retriever, sufficient=False)
        assert len(context) == 5
        assert NOTICE not in context.text


class TestUnknown:
    def test_off_decides_nothing(self, file: Path, retriever: Recorded) -> None:
        context = next(answers(guard_of(retriever, file, mode="off"), retriever))
        assert (context.sufficient, context.p_sufficient) == (None, None)

    def test_without_threshold_only_a_probability(
        self, profile: Profile, retriever: Recorded
    ) -> None:
        route = profile.routes[Route.HYBRID]
        assert route.sufficiency is not None
        fitted = route.sufficiency.model_copy(update={"threshold": None})
        routes = {Route.HYBRID: route.model_copy(update={"sufficiency": fitted})}
        guard = guard_of(retriever, profile.model_copy(update={"routes": routes}))
        for context in answers(guard, retriever):
            assert context.sufficient is None
            assert context.p_sufficient is not None
            assert context.flags == ()

    def test_other_system_or_policy_has_none(self, file: Path, retriever: Recorded) -> None:
        other = Recorded(retriever.rankings, {"simulated": "other"})
        by_hand = ContextGuard(retriever, policy=RatioPolicy())
        contexts = [
            next(answers(guard_of(other, file), retriever)),
            next(answers(by_hand, retriever)),
        ]
        assert [context.p_sufficient for context in contexts] == [None, None]
