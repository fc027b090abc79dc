"""The service with an assessor: it asks by the profile, and answers in any case."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_service import Serve, counted
from prometheus_client import CollectorRegistry

from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import RANKING, feature_names
from ctxguard.core.types import Route, ScoreKind
from ctxguard.core.value_of_information import AnswerModel
from ctxguard.profile.schema import AssessorProfile, RouteProfile
from ctxguard.server.settings import ServiceSettings
from tests.profiles import profile_with
from tests.timing import SOON

pytest.importorskip("openai")

from tests.model_endpoint import ModelEndpoint

TEXTS = ["a cat", "a fox", "a dog", "a cow"]
BODY = {
    "query": "what is red?",
    "score_kind": "logit",
    "candidates": [
        {"id": text, "score": 0.2 - place / 10, "text": f"{text} of me@example.org"}
        for place, text in enumerate(TEXTS)
    ],
}
Settings = dict[str, Any]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelEndpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = ModelEndpoint()
    yield served
    served.close()


@pytest.fixture
def settings(endpoint: ModelEndpoint, tmp_path: Path) -> Settings:
    """A service whose profile keeps what has P ≥ 0.5 by its score, or by a decision model."""
    asked: Settings = {
        "assessor": "decisions",
        "assessor_model": "m-2026",
        "assessor_url": endpoint.url,
        "assessor_prices": (1.0, 0.0),
    }
    stage = ServiceSettings(**asked).assessor_stage()
    assert stage is not None
    n = len(feature_names((RANKING,)))
    model = RelevanceModel((RANKING,), (1.0, *[0.0] * (n - 1)), (0.0,) * n, (1.0,) * n, 0.0)
    route = RouteProfile(
        policy=ExpectedUtilityPolicy(model, k=3, cost=1.0),
        score_kind=ScoreKind.LOGIT,
        assessor=AssessorProfile(
            fingerprint=stage.fingerprint,
            name="relevant",
            model=AnswerModel((0.0, 1.0), (-1.0, 1.0), -1.0, 0.0, 2.0, 1.0),
            policy=ExpectedUtilityPolicy(model, k=3, cost=1.0),
            price=0.001,
            first=20,
            decision="enforce",
        ),
    )
    stage.close()
    system = {"reranker": "named scores", "score_kind": "logit"}
    profile_with({Route.EXTERNAL: route}, fingerprint=system).save(tmp_path / "profile.json")
    own = {"profile": tmp_path / "profile.json", "mode": "enforce", "score_kind": "logit"}
    return {**asked, **own}


def test_what_the_assessor_knows_decides(
    serve: Serve, settings: Settings, endpoint: ModelEndpoint, registry: CollectorRegistry
) -> None:
    answer = serve(**settings).post("/v1/filter", json=BODY).json()
    assert (answer["kept_ids"], len(endpoint.requests)) == (["a fox"], 1)
    assert "of [e-mail]" in str(endpoint.requests)
    assert "example.org" not in str(endpoint.requests)
    assert counted(registry, "ctxguard_assessed_candidates_total", outcome="answered") == 4
    assert counted(registry, "ctxguard_changed_decisions_total", answers="applied") == 1
    assert counted(registry, "ctxguard_assessor_cost_total") == pytest.approx(300 / 1e6)


def test_hanging_assessor_leaves_calibrated_answer(
    serve: Serve, settings: Settings, endpoint: ModelEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.hanging_on = "fox"
    with caplog.at_level(logging.DEBUG, "ctxguard"):
        answer = serve(**settings, assessor_seconds=SOON).post("/v1/filter", json=BODY).json()
    assert answer["kept_ids"] == ["a cat", "a fox", "a dog"]
    assert "degraded" in answer["flags"]
    assert "a fox" not in caplog.text
