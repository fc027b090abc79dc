"""A retriever's order is evidence of what its scores mean."""

import asyncio

import pytest

from ctxguard.core.decision import decide
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.types import Flag, Hit
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from tests.counted import Counted
from tests.guard.guards import SEVENTY, Answering, guard_of, served

DISTANCES = [0.05, 0.31, 0.36, 0.62, 0.8]


def hits_of(scores: list[float], *, has_ranks: bool = False) -> list[Hit]:
    return [
        Hit(f"p{at}", score, f"text {at}", rank=at + 1 if has_ranks else None)
        for at, score in enumerate(scores)
    ]


class TestDirection:
    @pytest.mark.parametrize(
        ("kind", "scores"),
        [
            *[
                (kind, DISTANCES)
                for kind in ("cosine", "inner_product", "ratio", "logit", "probability", "rank")
            ],
            ("ratio", [4.0, 11.5, 37.0]),  # L2
            ("inner_product", [0.1, 0.2, 0.9]),  # 1 - cosine
            ("ratio", [-31.0, -12.0, -3.0]),  # BM25 of Milvus Lite
            ("distance", [-0.9, -0.6, -0.1]),  # similarities turned round
            ("cosine", [0.1, 0.8]),
        ],
    )
    @pytest.mark.parametrize("policy", [None, SEVENTY])
    @pytest.mark.parametrize("has_ranks", [False, True])
    def test_opposed_scores_keep_the_engines_order(
        self,
        kind: str,
        scores: list[float],
        policy: Policy | None,
        counted: Counted,
        *,
        has_ranks: bool,
    ) -> None:
        hits = hits_of(scores, has_ranks=has_ranks)
        if kind == "rank" and policy is not None:
            policy = RatioPolicy(k=5)
        guard = guard_of(
            Answering(hits), score_kind=kind, policy=policy, telemetry=counted.telemetry
        )
        context = guard.retrieve("q?")
        assert served(context) == [hit.passage_id for hit in hits]
        assert Flag.SCORES_CONTRADICTED in context.flags
        assert counted.by_label("flags")["scores_contradicted",] == 1
        assert [candidate.score for candidate in context.decisions] == scores
        assert served(asyncio.run(guard.aretrieve("q?"))) == served(context)

    def test_model_does_not_order_them_either(self) -> None:
        legs = feature_names(["ranking"])
        model = RelevanceModel(
            ("ranking",), (1.0,) * len(legs), (0.0,) * len(legs), (1.0,) * len(legs), 0.0
        )
        guard = guard_of(
            Answering(hits_of(DISTANCES)),
            score_kind="cosine",
            policy=ExpectedUtilityPolicy(model, k=3),
        )
        context = guard.retrieve("q?")
        assert served(context) == ["p0", "p1", "p2"]
        assert context.decision.probabilities is None
        assert Flag.MISSING_SIGNALS not in context.flags

    def test_order_of_results_is_no_evidence(self) -> None:
        context = ContextGuard(score_kind="cosine").filter("q?", hits_of(DISTANCES))
        assert served(context) == ["p4", "p3", "p2", "p1", "p0"]
        assert context.flags == (Flag.UNCALIBRATED,)

    def test_ranks_of_results_are_evidence(self) -> None:
        hits = hits_of(DISTANCES, has_ranks=True)
        context = ContextGuard(score_kind="cosine").filter("q?", hits[::-1])
        assert served(context) == ["p0", "p1", "p2", "p3", "p4"]
        assert Flag.SCORES_CONTRADICTED in context.flags

    @pytest.mark.parametrize("scores", [[0.7], [0.5, 0.5, 0.5], [0.6, 0.9, 0.7, 0.8, 0.1]])
    def test_weak_evidence_leaves_scores_in_force(self, scores: list[float]) -> None:
        context = guard_of(Answering(hits_of(scores)), score_kind="cosine").retrieve("q?")
        assert context.flags == (Flag.UNCALIBRATED,)
        best = max(range(len(scores)), key=scores.__getitem__)
        assert context.kept_ids[0] == f"p{best}"

    def test_sample_is_decided_again_the_same(self) -> None:
        guard = guard_of(Answering(hits_of(DISTANCES)), score_kind="cosine", policy=SEVENTY)
        context = guard.retrieve("q?")
        record = SampleRecord.from_bytes(record_of(context, 1.0, 0.0).to_bytes())
        assert decide(record.ranking(), SEVENTY).kept_ids == context.kept_ids
