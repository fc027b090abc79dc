"""A retriever that gives similarities is told apart once its embedder is swapped behind a URL."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from ctxguard import ContextGuard, Hit, Profile
from ctxguard.core.types import Flag, FloatArray
from ctxguard.errors import ProfileMismatchError
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.retrieval.protocols import ProbedRetriever

TEXTS = [f"The {thing} is {state}." for thing in ("kettle", "loom") for state in ("red", "old")]
QUERIES = tuple([Query(f"q{at}", f"is it so that {text}") for at, text in enumerate(TEXTS * 6)])
DATASET = Dataset(
    "texts", QUERIES, {each.query_id: {str(at % 4): 1} for at, each in enumerate(QUERIES)}
)


class Embedder:
    """Hashes words into random directions; another seed is another model under the same name."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.seed, self.noise, self.is_down = seed, noise, False
        self._calls = 0

    def encode(self, text: str) -> FloatArray:
        if self.is_down:
            raise ConnectionError("the embedder is down")
        self._calls += 1
        total = np.zeros(64)
        for word in text.lower().split():
            total += np.random.default_rng([self.seed, *word.encode()]).normal(size=64)
        total /= max(float(np.linalg.norm(total)), 1e-9)
        return total + np.random.default_rng(self._calls).normal(size=64) * self.noise


class Engine:
    """The same retriever, whatever embedder answers behind its URL."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def similarities(self, query: str, texts: Sequence[str], /) -> FloatArray:
        return np.array([self.embedder.encode(each) for each in texts]) @ self.embedder.encode(
            query
        )

    def retrieve(self, query: str, /, *, depth: int) -> list[Hit]:
        scores = self.similarities(query, TEXTS)
        hits = [Hit(str(at), float(score), TEXTS[at]) for at, score in enumerate(scores)]
        return sorted(hits, key=lambda hit: -(hit.score or 0.0))[:depth]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return calibrate(Engine(Embedder(1)), DATASET, score_kind="cosine").profile


def guard_of(embedder: Embedder, profile: Profile, **settings: object) -> ContextGuard:
    return ContextGuard(Engine(embedder), profile=profile, score_kind="cosine", **settings)  # type: ignore[arg-type]


def test_it_is_a_capability() -> None:
    assert isinstance(Engine(Embedder(1)), ProbedRetriever)
    assert not isinstance(lambda query, *, depth: [], ProbedRetriever)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 4e-4])
def test_noise_is_the_same_embedder(profile: Profile, noise: float) -> None:
    """Other batches move a vector by up to 4e-4: nothing is told."""
    guard = guard_of(Embedder(1, noise), profile)
    assert guard.comparison.differences == ()
    assert guard.probe().differences == ()


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_swapped_embedder_is_told(profile: Profile, seed: int) -> None:
    guard = guard_of(Embedder(seed), profile)
    assert guard.comparison.flags == (Flag.PROFILE_MISMATCH,)
    assert "retriever: its scores of the probe texts differ" in guard.comparison.mismatches[0]
    assert Flag.PROFILE_MISMATCH in guard.retrieve("is the loom old").flags
    with pytest.raises(ProfileMismatchError):
        guard_of(Embedder(seed), profile, check=ProfileCheck(strict=True))


def test_embedder_swapped_while_serving_is_told(profile: Profile) -> None:
    """Asked again it is told, and back again; one that is down leaves what was known."""
    engine = Engine(Embedder(1))
    guard = ContextGuard(engine, profile=profile, score_kind="cosine")
    engine.embedder = Embedder(2)
    assert guard.probe().flags == (Flag.PROFILE_MISMATCH,)
    engine.embedder.is_down = True
    assert guard.probe().flags == (Flag.PROFILE_MISMATCH,)
    engine.embedder = Embedder(1)
    assert guard.probe().flags == ()


def test_embedder_that_is_down_is_unverified(profile: Profile) -> None:
    embedder = Embedder(1)
    embedder.is_down = True
    assert guard_of(embedder, profile).comparison.flags == (Flag.UNVERIFIED,)


def test_profiles_of_others_ask_nothing(profile: Profile, tmp_path: Path) -> None:
    embedder = Embedder(1)
    embedder.is_down = True
    other = profile.model_copy(update={"fingerprint": {"engine": "x"}})
    other.save(tmp_path / "other.json")
    guard = ContextGuard(
        Engine(embedder),
        profile=tmp_path / "other.json",
        score_kind="cosine",
        check=ProfileCheck({"engine": "x"}),
    )
    assert guard.comparison.differences == ()
