"""A profile holds for the reranker that it was calibrated on, whatever that one calls itself."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from http_service import NamedScores, Serve

from ctxguard.core.types import FloatArray
from ctxguard.profile.reranker_probe import FINGERPRINT_KEY, PROBES, described
from ctxguard.profile.schema import Profile
from tests.timing import until

DOCUMENTS = ["0.9 best", "0.1 none"]
PROBED = {query for query, _ in PROBES}


class Reranker(NamedScores):
    """Scores probes by their length, as a model of this scale would."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.is_down = False

    async def ascore(self, query: str, documents: Sequence[str], **options: object) -> FloatArray:
        if query not in PROBED:
            return await super().ascore(query, documents, **options)
        self.asked.append({"query": query})
        if self.is_down:
            raise ConnectionError("refused")
        return np.array([np.log(len(each)) for each in documents]) * self.scale


@pytest.fixture
def scorer() -> Reranker:
    return Reranker()


@pytest.fixture
def probed(profile: Path, tmp_path: Path) -> Path:
    scores = [np.array([np.log(len(each)) for each in documents]) for _, documents in PROBES]
    known = Profile.load(profile)
    fingerprint = known.fingerprint | {FINGERPRINT_KEY: described(scores)}
    file = tmp_path / "profile.json"
    known.model_copy(update={"fingerprint": fingerprint}).save(file)
    return file


def flags(client) -> list[str]:
    answer = client.post("/rerank", json={"query": "q", "documents": DOCUMENTS}).json()
    return answer["meta"]["ctxguard"]["flags"]


def comes_to(client, expected: list[str]) -> None:
    until(lambda: flags(client) == expected, f"{expected}")


def test_the_same_reranker_is_served_by_the_profile(serve: Serve, probed: Path) -> None:
    assert flags(serve(profile=probed)) == []


def test_another_reranker_of_the_same_name_is_a_mismatch(
    serve: Serve, probed: Path, scorer: Reranker, caplog: pytest.LogCaptureFixture
) -> None:
    scorer.scale = 1.5
    assert flags(serve(profile=probed)) == ["profile_mismatch"]
    assert "its scores of the probe texts differ" in caplog.text


def test_readiness_tells_that_the_profile_is_of_another_reranker(
    serve: Serve, probed: Path, scorer: Reranker
) -> None:
    client = serve(profile=probed)
    assert client.get("/readyz").json()["profile"] == "applies"
    scorer.scale = 1.5
    told = serve(profile=probed).get("/readyz").json()["profile"]
    assert "does not apply" in told
    assert "its scores of the probe texts differ" in told


def test_readiness_tells_that_the_profile_was_made_with_another_rerank_model(
    serve: Serve, profile: Path, scorer: Reranker
) -> None:
    known = Profile.load(profile).fingerprint["reranker"]
    scorer.fingerprint = "cohere another"
    told = serve(profile=profile).get("/readyz").json()["profile"]
    assert known in told
    assert "cohere another" in told


def test_readiness_says_nothing_of_a_profile_where_there_is_none(serve: Serve) -> None:
    assert serve(profile=None).get("/readyz").json()["profile"] is None


def test_the_reranker_is_asked_again_while_serving(
    serve: Serve, probed: Path, scorer: Reranker
) -> None:
    client = serve(profile=probed, probe_seconds=0.05)
    assert flags(client) == []
    scorer.scale = 1.5
    comes_to(client, ["profile_mismatch"])
    scorer.scale = 1.0
    comes_to(client, [])


def test_a_reranker_that_does_not_answer_leaves_the_profile_unverified(
    serve: Serve, probed: Path, scorer: Reranker
) -> None:
    scorer.is_down = True
    client = serve(profile=probed, probe_seconds=0.05)
    assert flags(client) == ["unverified"]
    scorer.is_down = False
    comes_to(client, [])


def test_no_probe_is_asked_where_the_profile_has_no_scores(
    serve: Serve, profile: Path, scorer: Reranker
) -> None:
    assert flags(serve(profile=profile)) == []
    assert len(scorer.asked) == 1


def test_the_log_speaks_of_no_former_profile_where_there_was_none(
    serve: Serve, probed: Path, scorer: Reranker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    scorer.fingerprint = "another"
    client = serve(profile=probed)
    until(lambda: "is mismatched" in caplog.text)
    assert flags(client) == ["profile_mismatch"]
    assert "no profile applies" in caplog.text
    assert "the one before" not in caplog.text
