"""A profile lives with its corpus: it applies while that changes, and every answer says how much.

From passages that are added to what a person sees: the flag, what differs, the metric.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ctxguard import (
    ContextGuard,
    CorpusSketch,
    Flag,
    Hit,
    Passage,
    Profile,
    ProfileMismatchError,
    RatioPolicy,
    Route,
    ScoreKind,
    passage_digest,
)
from ctxguard.errors import ConfigurationError
from ctxguard.guard.reload import ProfileWatcher
from ctxguard.guard.telemetry import Telemetry
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import RouteProfile
from tests.profiles import profile_with

SEVENTY = RatioPolicy(k=4, min_ratio=0.7)
HITS = [Hit(f"p{n}", 1.0 - n / 10, f"text {n}") for n in range(6)]


def corpus(*numbers: range) -> tuple[Passage, ...]:
    return tuple(Passage(f"p{n}", f"text {n}") for part in numbers for n in part)


@dataclass
class Engine:
    """A wrapped engine whose corpus changes while it serves."""

    passages: tuple[Passage, ...]
    embedder: str = "mini"
    generation: object = field(default_factory=object)

    def retrieve(self, query: str, *, depth: int = 100) -> list[Hit]:
        return HITS

    def fingerprint(self) -> dict[str, str]:
        return {
            "embedder": self.embedder,
            "corpus_size": str(len(self.passages)),
            "corpus_digest": str(hash(self.passages)),
        }

    def corpus_sketch(self) -> CorpusSketch:
        return CorpusSketch.of(map(passage_digest, self.passages))

    def pinned(self) -> "Engine":
        return replace(self)

    def swap(self, passages: tuple[Passage, ...]) -> None:
        self.passages, self.generation = passages, object()


def profile_of(engine: Engine, *, sketch: bool = True) -> Profile:
    routes = {
        Route.EXTERNAL: RouteProfile(
            policy=SEVENTY, score_kind=ScoreKind.RATIO, safe_policy=RatioPolicy(k=6)
        )
    }
    made = profile_with(routes, fingerprint=engine.fingerprint())
    return made.model_copy(update={"corpus": engine.corpus_sketch() if sketch else None})


@pytest.fixture
def engine() -> Engine:
    return Engine(corpus(range(100)))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def guard_of(engine: object, profile: Profile | None, **settings: object) -> ContextGuard:
    settings.setdefault("score_kind", "ratio")
    return ContextGuard(engine, profile=profile, **settings)  # type: ignore[arg-type]


def test_one_change_keeps_the_profile_in_force(engine: Engine) -> None:
    """One passage changed leaves the profile in force also in strict mode."""
    profile = profile_of(engine)
    guard = guard_of(engine, profile)
    engine.swap(corpus(range(101)))
    context = guard.retrieve("q?")
    assert (context.flags, context.differences, context.decision.policy) == ((), (), SEVENTY)
    engine.swap(corpus(range(1, 101)))
    assert guard_of(engine, profile, check=ProfileCheck(strict=True)).retrieve("q?").flags == ()


class TestBeyondTheShare:
    @pytest.fixture
    def profile(self, engine: Engine) -> Profile:
        return profile_of(engine)

    def test_answers_are_flagged_and_policy_decides(
        self,
        engine: Engine,
        profile: Profile,
        registry: CollectorRegistry,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        guard = guard_of(engine, profile, telemetry=Telemetry(registry, all_metrics=True))
        assert guard.retrieve("q?").flags == ()
        with caplog.at_level(logging.WARNING, "ctxguard"):
            engine.swap(corpus(range(250)))
            contexts = [guard.retrieve("q?"), guard.retrieve("q?")]
        assert [context.flags for context in contexts] == [(Flag.CORPUS_CHANGED,)] * 2
        assert [context.decision.policy for context in contexts] == [SEVENTY] * 2
        assert "calibrate again" in caplog.text
        scraped = generate_latest(registry).decode()
        assert 'ctxguard_flags_total{flag="corpus_changed"} 2.0' in scraped

    @pytest.mark.parametrize("share", [0.5, 0.6])
    def test_answer_says_how_much_has_changed(
        self, share: float, engine: Engine, profile: Profile
    ) -> None:
        """The answer says how much has changed beyond the share that is set."""
        engine.swap(corpus(range(250)))
        context = guard_of(engine, profile, check=ProfileCheck(max_corpus_change=share)).retrieve(
            "q?"
        )
        line = (
            "corpus: 60% has changed since calibration, but a profile is valid only up to 50% "
            "(250 passages, were 100)"
        )
        said = [line] if share == 0.5 else []
        assert context.flags == ((Flag.CORPUS_CHANGED,) if said else ())
        assert context.to_dict()["differences"] == [*context.differences] == said

    def test_invalid_share_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="max_corpus_change 60 must lie in"):
            ProfileCheck(max_corpus_change=60)

    def test_strict_mode_refuses_at_start_and_reload(
        self, engine: Engine, profile: Profile
    ) -> None:
        strict = guard_of(engine, profile, check=ProfileCheck(strict=True))
        engine.swap(corpus(range(250)))
        for refused in (
            lambda: guard_of(engine, profile, check=ProfileCheck(strict=True)),
            lambda: strict.use_profile(profile),
        ):
            with pytest.raises(ProfileMismatchError, match="60% has changed"):
                refused()

    def test_profile_loads_and_switches_to_safe(self, engine: Engine, profile: Profile) -> None:
        engine.swap(corpus(range(250)))
        guard = guard_of(engine, None)
        guard.use_profile(profile)
        assert guard.retrieve("q?").flags == (Flag.CORPUS_CHANGED,)
        guard.use_profile(profile.safe())
        context = guard.retrieve("q?")
        assert (context.flags, len(context)) == ((Flag.CORPUS_CHANGED,), 6)
        guard.use_profile(profile_of(engine))  # a new calibration ends it
        assert guard.retrieve("q?").flags == ()

    def test_watched_file_is_not_reloaded(
        self, engine: Engine, profile: Profile, tmp_path: Path
    ) -> None:
        engine.swap(corpus(range(250)))
        file = tmp_path / "profile.json"
        profile.save(file)
        telemetry = Telemetry(CollectorRegistry())
        watcher = ProfileWatcher(guard_of(engine, profile), file, telemetry=telemetry)
        assert watcher.check() is None


class TestAnotherSystem:
    def test_corpus_with_nothing_common_is_another(self, engine: Engine) -> None:
        profile = profile_of(engine)
        engine.swap(corpus(range(500, 600)))
        context = guard_of(engine, profile).retrieve("q?")
        assert context.flags == (Flag.PROFILE_MISMATCH,)
        assert context.decision.policy == RatioPolicy(k=SEVENTY.k)
        assert context.differences == ("corpus: none of the 100 passages is in this one",)


class Delegating:
    """Hands what it does not have itself on to the retriever that it wraps."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def retrieve(self, query: str, *, depth: int = 100) -> list[Hit]:
        return HITS[:1]


class TestGenerations:
    @pytest.mark.parametrize("first", ["one", None])
    def test_without_sketch_only_the_same_corpus(self, engine: Engine, first: object) -> None:
        engine.generation = first
        profile = profile_of(engine, sketch=False)
        guard = guard_of(engine, profile, check=ProfileCheck(strict=True))
        assert guard.retrieve("q?").flags == ()
        engine.swap(corpus(range(101)))
        context = guard.retrieve("q?")
        assert context.flags == (Flag.PROFILE_MISMATCH,)
        assert "corpus_size is '101', was '100'" in context.differences
        engine.swap(corpus(range(100)))
        assert guard.retrieve("q?").flags == ()

    def test_wrapper_is_not_bypassed(self, engine: Engine) -> None:
        assert guard_of(Delegating(engine), None).retrieve("q?").candidates == 1


def search(query: str, *, depth: int) -> list[Hit]:
    return HITS


class TestUnverified:
    def test_callables_profile_is_not_taken_silently(self) -> None:
        routes = {Route.EXTERNAL: RouteProfile(policy=SEVENTY, score_kind=ScoreKind.RATIO)}
        profile = profile_with(routes)
        assert profile.unverified
        guard = guard_of(search, profile)
        context = guard.retrieve("q?")
        assert (context.flags, context.decision.policy) == ((Flag.UNVERIFIED,), SEVENTY)
        assert "calibrated without a fingerprint" in context.differences[0]
        with pytest.raises(ProfileMismatchError, match="calibrated without a fingerprint"):
            guard_of(search, profile, check=ProfileCheck(strict=True))

    def test_incomparable_corpus_is_said(self) -> None:
        routes = {Route.EXTERNAL: RouteProfile(policy=SEVENTY, score_kind=ScoreKind.RATIO)}
        sketch = CorpusSketch.of(range(50))
        profile = profile_with(routes, fingerprint={"index": "v3"}).model_copy(
            update={"corpus": sketch}
        )
        check = ProfileCheck({"index": "v3"})
        assert guard_of(search, profile, check=check).retrieve("q?").flags == (Flag.UNVERIFIED,)
        known = replace(check, corpus_sketch=sketch, strict=True)
        verified = guard_of(search, profile, check=known)
        assert verified.retrieve("q?").flags == ()
