"""Calibration from labels to a profile: bad labels, evidence, routes, reproducibility."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from simulated_pools import DEPTH, Recorded, calibrated, simulate

from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import ordering_and_test_parts
from calibration.data.dataset import Dataset, Query
from calibration.settings import Settings
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import Leg, Ranking, Route, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError, QueryError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile


class TestBadLabels:
    def test_no_relevant_passage_at_all(self) -> None:
        for held_out, chosen_on in ((0.5, 20), (None, 40)):
            with pytest.raises(CalibrationError, match=f"none of the {chosen_on} queries to choo"):
                calibrated(40, unanswerable=1.0, held_out=held_out)

    def test_skipped_queries_are_on_record(self) -> None:
        retriever, dataset = simulate(60)
        refused = dataset.queries[0]
        rest = {t: ranking for t, ranking in retriever.rankings.items() if t != refused.text}
        profile = calibrate(Recorded(rest), dataset, Settings(depth=DEPTH)).profile
        assert f"hybrid: {refused.query_id}: {refused.text!r} cannot be searched" in (
            profile.provenance.notes
        )

    def test_unanswered_choosers_leave_no_choice(self) -> None:
        retriever, dataset = simulate(60)
        unasked = {query.text for query in calibrated(60, held_out=0.5).chosen_on.queries}
        rest = {t: ranking for t, ranking in retriever.rankings.items() if t not in unasked}
        with pytest.raises(CalibrationError, match="the retriever answered none of them"):
            calibrate(Recorded(rest), dataset, Settings(policy="ratio", depth=DEPTH, held_out=0.5))

    @pytest.mark.parametrize(
        "settings",
        [
            {"held_out": 1.0},
            {"held_out": -0.1},
            {"depth": 0},
            {"serving_k": 0},
            {"serving_k": 6, "depth": 5},
            {"tolerance": -0.1},
            {"tolerance": 1.0},
            {"max_loss": 0.0},
            {"max_loss": 1.0},
            {"context": "short"},
            {"policy": "boosted"},
            {"delta": 0.0},
            {"delta": 1.5},
            {"alpha": 0.0},
            {"alpha": 1.0},
        ],
    )
    def test_settings_that_cannot_work_are_refused(self, settings: dict[str, object]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            Settings(**settings)  # type: ignore[arg-type]


def test_held_out_labels_move_nothing() -> None:
    retriever, dataset = simulate(80)
    asked = Settings(depth=DEPTH, held_out=0.5)
    result = calibrate(retriever, dataset, asked)
    kept = {q.query_id: dataset.qrels[q.query_id] for q in result.chosen_on.queries}
    other = calibrate(retriever, replace(dataset, qrels=kept), asked)
    route, changed = (r.profile.routes[Route.HYBRID] for r in (result, other))
    assert route.policy == changed.policy
    assert route.evidence != changed.evidence


@dataclass
class Switchable(Recorded):
    """Two legs whose stages can be switched; the lexical one knows nothing."""

    route: Route = Route.HYBRID
    fusion: Fusion = Fusion()  # noqa: RUF009 - frozen
    routes = (Route.HYBRID, Route.LEXICAL, Route.DENSE)

    def on_route(self, route: Route) -> "Switchable":
        return replace(self, route=route)

    def with_fusion(self, fusion: Fusion) -> "Switchable":
        return replace(self, fusion=fusion)

    def fingerprint(self) -> dict[str, str]:
        return {"fusion": f"{self.fusion.method} {self.fusion.weight}"}

    def encode_query(self, query: str) -> str:
        if query not in self.rankings:
            raise QueryError("cannot be encoded")
        return query.upper()

    def retrieve(self, query: str, *, depth: int = 100, query_vector: str | None = None) -> Ranking:
        full = super().retrieve(query)
        assert query_vector == query.upper()
        if self.route is Route.HYBRID:
            scores = fuse(full.legs, self.fusion).tolist()
            return replace(full, scores=scores, kind=self.fusion.kind)
        name, leg = self.route.value, full.legs[self.route.value]
        scores = leg.scores.tolist()
        return replace(full, scores=scores, kind=leg.kind, route=self.route, legs={name: leg})


def switchable(*, reversed_lexical: bool = False) -> tuple[Switchable, Dataset]:
    """A retriever with routes, and labels that its dense leg alone can find.

    Its lexical leg is noise, or ranks every relevant passage last.
    """
    retriever, dataset = simulate(80)
    random = np.random.default_rng(0)
    rankings = {}
    for text, ranking in retriever.rankings.items():
        noise = Leg(random.exponential(3.0, DEPTH), ScoreKind.RATIO)
        if reversed_lexical:
            noise = Leg(1.0 - ranking.legs["dense"].scores, ScoreKind.RATIO)
        rankings[text] = replace(ranking, legs={**ranking.legs, "lexical": noise})
    return Switchable(rankings), dataset


@pytest.fixture(scope="module")
def result() -> Calibration:
    """Of a retriever with routes, and one query that it refuses."""
    retriever, dataset = switchable()
    unknown = replace(dataset, queries=(*dataset.queries, Query("odd", "never seen")))
    return calibrate(retriever, unknown, Settings(depth=DEPTH, context="utility"))


class TestWhatTheProfileIsFor:
    def made(self, **given: object) -> Profile:
        """Of a retriever that says nothing of itself."""
        retriever, dataset = simulate(60)
        retriever.identity.clear()
        return calibrate(retriever, dataset, Settings(policy="ratio", depth=DEPTH), **given).profile

    def test_nameless_system_gives_unverified_profile(self) -> None:
        profile = self.made()
        assert profile.unverified
        assert profile.corpus is None
        assert any(note.startswith("unverified: ") for note in profile.provenance.notes)

    def test_identity_can_be_given(self) -> None:
        sketch = CorpusSketch.of(range(10))
        profile = self.made(fingerprint={"index": "v3"}, corpus_sketch=sketch)
        assert not profile.unverified
        assert profile.corpus == sketch
        assert not any(note.startswith("unverified: ") for note in profile.provenance.notes)


class TestRoutes:
    def test_routes_and_fusion_share_labels(self, result: Calibration) -> None:
        routes = result.profile.routes
        assert set(routes) == {Route.HYBRID, Route.LEXICAL, Route.DENSE}
        assert routes[Route.HYBRID].policy.kind == "expected_utility"
        assert routes[Route.LEXICAL].policy.kind == "expected_utility"
        assert routes[Route.DENSE].score_kind is ScoreKind.COSINE
        assert result.profile.fusion.method == "convex"
        assert result.profile.fusion.weight > 0.6
        assert result.profile.fingerprint == {"fusion": f"convex {result.profile.fusion.weight}"}

    def test_certifying_queries_fit_no_fusion(self) -> None:
        retriever, dataset = switchable()
        asked = Settings(depth=DEPTH, alpha=0.1)
        fitted = calibrate(retriever, dataset, asked)
        _, testing = ordering_and_test_parts(fitted.chosen_on, asked.seed)
        # For the queries that certify, what the lexical leg ranks first becomes relevant.
        relabelled = dict(dataset.qrels)
        for query in testing.queries:
            ranking = retriever.rankings[query.text]
            best = ranking.passage_ids[int(np.argmax(ranking.legs["lexical"].scores))]
            relabelled[query.query_id] = {best: 1}
        other = calibrate(retriever, replace(dataset, qrels=relabelled), asked)
        assert other.profile.fusion == fitted.profile.fusion

    def test_uncertified_route_fails_no_other(self) -> None:
        retriever, dataset = switchable(reversed_lexical=True)
        found = calibrate(retriever, dataset, Settings(depth=DEPTH, alpha=0.3))
        hybrid, lexical = (found.profile.routes[r] for r in (Route.HYBRID, Route.LEXICAL))
        assert lexical.policy == RatioPolicy(k=5)
        assert "the first 5 as today" in lexical.why
        assert lexical.certificate is None
        assert hybrid.certificate.recall_loss <= hybrid.certificate.alpha == 0.3

    def test_unencodable_query_is_skipped_everywhere(self, result: Calibration) -> None:
        notes = result.profile.provenance.notes
        assert sum("odd: 'never seen' cannot be searched" in note for note in notes) == 3

    def test_guard_takes_the_profile(self, result: Calibration, tmp_path: Path) -> None:
        result.profile.save(tmp_path / "profile.json")
        guard = ContextGuard(
            Switchable({}), profile=tmp_path / "profile.json", check=ProfileCheck(strict=True)
        )
        assert guard.differences == ()
        assert guard.retriever.fusion == result.profile.fusion
        (ranking,) = result.outcomes[Route.HYBRID].route.pools.subset(["q00000"]).rankings()
        context = guard.filter("?", ranking)
        assert context.flags == ()
        assert isinstance(context.decision.policy, ExpectedUtilityPolicy)
