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


@pytest.mark.parametrize(
    ("scale", "expected", "told"),
    [(1.0, [], "applies"), (1.5, ["profile_mismatch"], "its scores of the probe texts differ")],
)
def test_profile_holds_for_known_scores(
    serve: Serve,
    probed: Path,
    scorer: Reranker,
    caplog: pytest.LogCaptureFixture,
    *,
    scale: float,
    expected: list[str],
    told: str,
) -> None:
    """Whatever it calls itself; readiness and the log say so too."""
    scorer.scale = scale
    client = serve(profile=probed)
    assert flags(client) == expected
    ready = client.get("/readyz").json()["profile"]
    assert told in ready
    assert ("does not apply" in ready) is bool(expected)
    assert (told in caplog.text) is bool(expected)


def test_scoreless_profile_compares_names(serve: Serve, profile: Path, scorer: Reranker) -> None:
    """A profile without scores is told apart by the name and asks for none."""
    assert (flags(serve(profile=profile)), len(scorer.asked)) == ([], 1)
    known = Profile.load(profile).fingerprint["reranker"]
    scorer.fingerprint = "cohere another"
    told = serve(profile=profile).get("/readyz").json()["profile"]
    assert known in told
    assert "cohere another" in told
    assert serve(profile=None).get("/readyz").json()["profile"] is None


def test_reranker_is_asked_again_serving(serve: Serve, probed: Path, scorer: Reranker) -> None:
    """One that is silent at first leaves the profile unverified."""
    scorer.is_down = True
    client = serve(profile=probed, probe_seconds=0.05)
    assert flags(client) == ["unverified"]
    scorer.is_down = False
    for scale, expected in ((1.0, []), (1.5, ["profile_mismatch"]), (1.0, [])):
        scorer.scale = scale
        until(lambda expected=expected: flags(client) == expected, f"{expected}")


def test_log_invents_no_former_profile(
    serve: Serve, probed: Path, scorer: Reranker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    scorer.fingerprint = "another"
    client = serve(profile=probed)
    until(lambda: "is mismatched" in caplog.text)
    assert flags(client) == ["profile_mismatch"]
    assert "no profile applies" in caplog.text
    assert "the one before" not in caplog.text
