"""A wrapped retriever's own signals: from its hits through the profile to a guard."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from simulated_pools import labelled, ranking_of

from calibration.calibrate import Calibration, calibrate
from calibration.data.dataset import Dataset, Query
from calibration.fit import pool_features
from calibration.settings import Settings
from ctxguard import ContextGuard, ExpectedUtilityPolicy, Flag, Hit, Ranking, ScoreKind
from ctxguard.core.decision import decide
from ctxguard.core.signals import feature_names
from ctxguard.errors import ConfigurationError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.worth import STRICT
from ctxguard.monitor.sampling.record import SampleRecord, record_of

N, DEPTH = 60, 12
GARBAGE = (math.nan, math.inf, -3.4e38)


class Shop:
    """Cosines that say little, and an authority that says which passage is right."""

    def __init__(self, *, without: str = "") -> None:
        self.without = without

    def truth(self, query: str) -> int:
        return int(query.rsplit(maxsplit=1)[-1]) % DEPTH

    def retrieve(self, query: str, *, depth: int) -> list[Hit]:
        random = np.random.default_rng(int(query.rsplit(maxsplit=1)[-1]))
        noise, authority = random.random(DEPTH), random.random(DEPTH)
        authority[self.truth(query)] += 1.0
        return [
            Hit(
                f"{query}-{row}",
                float(noise[row]),
                f"Passage {row}.",
                signals={
                    name: value
                    for name, value in (("authority", authority[row]), ("price", noise[-row - 1]))
                    if name != self.without
                },
            )
            for row in np.argsort(-noise)[:depth].tolist()
        ]

    def fingerprint(self) -> dict[str, str]:
        return {"engine": "shop"}


def dataset(n: int = N) -> Dataset:
    queries = tuple(Query(f"q{i:03d}", f"question {i}") for i in range(n))
    qrels = {q.query_id: {f"{q.text}-{Shop().truth(q.text)}": 1} for q in queries}
    return Dataset("shop", queries, qrels)


@cache
def calibrated(n: int = N) -> Calibration:
    return calibrate(
        Shop(),
        dataset(n),
        Settings(depth=DEPTH, context="utility", utilities=STRICT),
        score_kind=ScoreKind.COSINE,
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    calibrated().profile.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def guard_of(retriever: object, profile: Path, registry: CollectorRegistry) -> ContextGuard:
    return ContextGuard(
        retriever,  # type: ignore[arg-type]
        profile=profile,
        score_kind=ScoreKind.COSINE,
        telemetry=Telemetry(registry, all_metrics=True),
    )


class TestFromHitsToTheAnswer:
    def test_right_passage_comes_first(self, profile: Path) -> None:
        guard = guard_of(Shop(), profile, CollectorRegistry())
        contexts = {i: guard.retrieve(f"question {i}") for i in range(1000, 1030)}
        first = [
            c.passages[0].passage_id == f"question {i}-{i % DEPTH}" for i, c in contexts.items()
        ]
        assert np.mean(first) > 0.9
        assert np.mean([len(context.passages) for context in contexts.values()]) < 2.0
        # One in twenty may be called insufficient although it is not.
        assert np.mean([context.flags == () for context in contexts.values()]) > 0.8

    def test_missing_signal_keeps_top_k(self, profile: Path) -> None:
        registry = CollectorRegistry()
        context = guard_of(Shop(without="authority"), profile, registry).retrieve("question 7")
        assert context.flags == (Flag.MISSING_SIGNALS,)
        assert context.differences == ("the policy needs signals that the answer lacks: authority",)
        flagged = registry.get_sample_value("ctxguard_flags_total", {"flag": "missing_signals"})
        assert flagged == 1.0

    def test_sample_is_decided_again_alike(self, profile: Path) -> None:
        guard = guard_of(Shop(), profile, CollectorRegistry())
        context = guard.retrieve("question 9")
        made = record_of(context, 0.5, 1.0)
        record = SampleRecord.from_bytes(made.to_bytes())
        again = decide(record.ranking(), context.decision.policy)
        assert again.kept_ids == context.decision.kept_ids
        assert again.probabilities == pytest.approx(context.decision.probabilities, abs=1e-5)


def test_scores_without_legs_are_a_leg() -> None:
    (route,) = calibrated().profile.routes.values()
    policy = route.policy
    assert isinstance(policy, ExpectedUtilityPolicy)
    assert policy.model.legs == ("ranking",)
    assert policy.model.signals == ("authority", "price")
    assert "1 scorer, 2 named signals" in route.why


def with_signals(**signals: Sequence[float]) -> Ranking:
    arrays = {name: np.array(values) for name, values in signals.items()}
    return replace(ranking_of([0.9, 0.5, 0.1], kind=ScoreKind.COSINE), signals=arrays)


class TestPools:
    def test_signals_follow_candidate_order(self) -> None:
        ranking = ranking_of([0.1, 0.9], kind=ScoreKind.COSINE)
        ranking = replace(ranking, signals={"price": np.array([5.0, 7.0])})
        pools = labelled([ranking], [{"p0": 1}], depth=3)
        assert pools.passage_ids == (("p1", "p0"),)
        assert pools.signals["price"][0, :2].tolist() == [7.0, 5.0]
        assert math.isnan(pools.signals["price"][0, 2])
        (again,) = pools.rankings()
        assert again.signals["price"].tolist() == [7.0, 5.0]
        names = feature_names(["ranking"], ["price", "price.z", "price.gap"])
        assert pool_features(pools).shape == (2, len(names))

    @pytest.mark.parametrize("lacking", [{}, *[{"age": [1.0, n, 2.0]} for n in GARBAGE]])
    def test_lacking_signal_is_left_out(self, lacking: dict[str, list[float]]) -> None:
        rankings = [
            with_signals(price=[1.0, 2.0, 3.0], **lacking),
            with_signals(price=[1.0, 2.0, 3.0], age=[1.0, 1.0, 2.0]),
            ranking_of([], kind=ScoreKind.COSINE),  # without a candidate nothing is lacking
        ]
        pools = labelled(rankings, [{"p0": 1}, {}, {}])
        assert list(pools.signals) == ["price"]
        (note,) = pools.notes
        assert note == "signal 'age' is left out: 1 of 3 queries have a candidate without it"

    def test_the_note_is_in_the_profile(self) -> None:
        class Half(Shop):
            def retrieve(self, query: str, *, depth: int) -> list[Hit]:
                hits = super().retrieve(query, depth=depth)
                return [replace(hit, signals=None) for hit in hits] if "7" in query else hits

        found = calibrate(Half(), dataset(), Settings(depth=DEPTH), score_kind=ScoreKind.COSINE)
        notes = "\n".join(found.profile.provenance.notes)
        assert "external: signal 'authority' is left out" in notes

    @pytest.mark.parametrize("name", ["price.z", "a.b", ""])
    def test_feature_like_name_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="no full stop"):
            labelled([with_signals(**{name: [1.0, 2.0, 3.0]})], [{"p0": 1}])

    def test_what_is_no_number_is_unknown(self) -> None:
        values: list[object] = [1, "2", None, "free", 10**400, True]
        hits = [Hit(f"p{i}", 1.0, signals={"price": v}) for i, v in enumerate(values)]  # type: ignore[dict-item]
        found = Ranking.from_hits(hits, ScoreKind.COSINE).signals["price"]
        assert np.array_equal(found, [1.0, 2.0, math.nan, math.nan, math.nan, 1.0], equal_nan=True)
