"""The guard: what it wraps, what it answers, what it counts, and what can never fail a request."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ctxguard.core.assembly import Assembly
from ctxguard.core.context import Context
from ctxguard.core.decision import decide
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.scores import is_contradicted
from ctxguard.core.signals import feature_names
from ctxguard.core.types import (
    DropReason,
    Flag,
    Hit,
    Leg,
    Mode,
    Passage,
    Ranking,
    Route,
    ScoreKind,
    StageFailure,
)
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    ProfileFormatError,
    ProfileMismatchError,
    QueryError,
    StageUnavailableError,
)
from ctxguard.guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry, default_telemetry
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import Sample
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile, RouteProfile
from ctxguard.resilience import RequestLimits
from tests.counted import Counted
from tests.doubles import Fault, FaultyRetriever
from tests.profiles import profile_with
from tests.timing import NEVER, PATIENCE_SECONDS

HITS = [
    Hit("a", 10.0, "The first."),
    Hit("b", 8.0, "The second."),
    Hit("c", 7.0, "The third."),
    Hit("d", 2.0, "The fourth."),
    Hit("e", 1.0, "The fifth."),
    Hit("f", 0.5, "The sixth."),
]
RANKING = Ranking.from_hits(HITS, ScoreKind.RATIO)
SEVENTY = RatioPolicy(k=5, min_ratio=0.7)


@dataclass
class Answering:
    """A retriever that answers every query with one ranking."""

    answer: object = field(default_factory=lambda: RANKING)
    depths: list[int] = field(default_factory=list)

    def retrieve(self, query: str, *, depth: int = 100) -> object:
        self.depths.append(depth)
        return self.answer


UNREAD = Telemetry(CollectorRegistry())
OWN = {"embedder": "mini", "corpus_size": "6"}
STRICT = ProfileCheck(strict=True)


class Identified(Answering):
    def fingerprint(self) -> dict[str, str]:
        return OWN


@dataclass
class Failing:
    error: BaseException

    def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
        raise self.error


@dataclass
class Sampled:
    """A sampler that takes every request, and notes when it was asked what."""

    events: list[str] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    takes: bool = True

    def draw(self, request_id: str, /) -> float:
        self.events.append(f"draw {request_id}")
        return 0.25 if self.takes else 0.0

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        self.events.append(f"offer {context.request_id}")
        self.contexts.append(context)
        self.probabilities.append(probability)
        return True


@pytest.fixture
def counted() -> Counted:
    return Counted()


def guard_of(retriever: object = None, **settings: object) -> ContextGuard:
    """A guard whose counts nobody reads, unless it is given a telemetry."""
    settings.setdefault("telemetry", UNREAD)
    return ContextGuard(Answering() if retriever is None else retriever, **settings)  # type: ignore[arg-type]


def profile_of(
    policy: Policy = SEVENTY,
    *,
    route: Route = Route.EXTERNAL,
    kind: ScoreKind = ScoreKind.RATIO,
    fingerprint: dict[str, str] | None = None,
    fusion: Fusion | None = None,
) -> Profile:
    routes = {route: RouteProfile(policy=policy, score_kind=kind)}
    return profile_with(routes, fusion=fusion, fingerprint=fingerprint)


def served(context: Context) -> list[str]:
    return [passage.passage_id for passage in context.passages]


class TestWhatItWraps:
    def test_retrieve_is_asked_for_candidate_depth(self) -> None:
        retriever = Answering()
        context = guard_of(retriever, policy=SEVENTY, depth=37).retrieve("q?")
        assert (served(context), retriever.depths) == (["a", "b", "c"], [37])

    @pytest.mark.parametrize(
        "search",
        [
            lambda query, depth: RANKING,
            lambda query, depth: HITS,
            lambda query, depth: iter(HITS[:depth]),
            lambda query, depth: [
                type("Own", (Hit,), {})(hit.passage_id, hit.score) for hit in HITS
            ],
        ],
        ids=["ranking", "hits", "generator", "subclass"],
    )
    def test_callable_may_return_ranking_or_hits(self, search: Any) -> None:
        guard = guard_of(search, policy=SEVENTY, score_kind="ratio")
        assert served(guard.retrieve("q?")) == ["a", "b", "c"]

    @pytest.mark.parametrize(
        "form", ["method", "asynchronous only", "function", "callable object", "awaitable"]
    )
    def test_a_retriever_may_be_asynchronous(self, form: str) -> None:
        async def search(query: str, *, depth: int) -> Ranking:
            await asyncio.sleep(0)
            return RANKING

        class WithMethod:
            async def aretrieve(self, query: str, *, depth: int) -> Ranking:
                return await search(query, depth=depth)

            retrieve = Answering().retrieve

        class AsynchronousOnly:
            def aretrieve(self, query: str, *, depth: int) -> Awaitable[Ranking]:
                return search(query, depth=depth)

        class Callable_:  # noqa: N801 - Callable is taken
            async def __call__(self, query: str, *, depth: int) -> Ranking:
                return await search(query, depth=depth)

        retriever: object = {
            "method": WithMethod(),
            "asynchronous only": AsynchronousOnly(),
            "function": search,
            "callable object": Callable_(),
            "awaitable": lambda query, depth: search(query, depth=depth),
        }[form]
        guard = guard_of(retriever, policy=SEVENTY)
        assert served(asyncio.run(guard.aretrieve("q?"))) == ["a", "b", "c"]

    def test_async_retriever_needs_async_code(self, counted: Counted) -> None:
        async def search(query: str, *, depth: int) -> Ranking:
            return RANKING

        class AsynchronousOnly:
            aretrieve = staticmethod(search)

        for retriever in (search, AsynchronousOnly()):
            for seconds in (None, NEVER):
                guard = guard_of(
                    retriever,
                    telemetry=counted.telemetry,
                    limits=RequestLimits(deadline_seconds=seconds),
                )
                with pytest.raises(ConfigurationError, match="await aretrieve"):
                    guard.retrieve("q?")
        assert counted["failed_requests"] == 4

    @pytest.mark.parametrize("is_embedded", [False, True])
    def test_sync_retriever_leaves_the_loop_free(self, is_embedded: bool) -> None:
        faulty = FaultyRetriever([Passage(hit.passage_id, hit.text) for hit in HITS])
        fault = faulty.faults["dense"] if is_embedded else Fault()
        search = (
            faulty.retriever if is_embedded else lambda query, depth: fault.run(lambda: RANKING)
        )

        async def main() -> Context:
            loop, released = asyncio.get_running_loop(), asyncio.Event()

            def slowly(work: Callable[[], Any]) -> Any:
                # Only a loop that still runs can set the event that this waits for.
                asyncio.run_coroutine_threadsafe(released.wait(), loop).result(PATIENCE_SECONDS)
                return work()

            with fault.injected(slowly):
                answer = asyncio.create_task(guard_of(search).aretrieve("the first"))
                await asyncio.sleep(0)
                released.set()
                return await answer

        context = asyncio.run(main())
        assert (len(context), context.failures) == (5, ())

    @settings(max_examples=50)
    @given(st.data())
    def test_aretrieve_and_filter_equal_retrieve(self, data: st.DataObject) -> None:
        ranking = data.draw(rankings())
        guard = guard_of(Answering(ranking), policy=SEVENTY)

        def outcome(ask: Callable[[], Context]) -> object:
            try:
                return ask().to_dict()
            except StageUnavailableError as error:
                return str(error)

        retrieved = outcome(lambda: guard.retrieve("q?", request_id="r"))
        assert retrieved == outcome(lambda: asyncio.run(guard.aretrieve("q?", request_id="r")))
        # The order of results at hand is not evidence against their scores.
        assume(not is_contradicted(ranking))
        assert retrieved == outcome(lambda: guard.filter("q?", ranking, request_id="r"))

    @pytest.mark.parametrize("hits", ["text", b"text", {"a": 1.0}, None, 7, [("a", 1.0)], ["a"]])
    def test_wrong_results_do_not_blame_retriever(self, hits: Any) -> None:
        with pytest.raises(ConfigurationError, match="the results are a") as raised:
            ContextGuard(score_kind="cosine").filter("q?", hits)
        assert "retriever" not in str(raised.value)

    def test_results_need_no_retriever(self) -> None:
        guard = ContextGuard(policy=SEVENTY)
        assert served(guard.filter("q?", RANKING)) == ["a", "b", "c"]
        with pytest.raises(ConfigurationError, match="no retriever"):
            guard.retrieve("q?")
        with pytest.raises(ConfigurationError, match="no retriever"):
            asyncio.run(guard.aretrieve("q?"))


class TestModes:
    def test_shadow_serves_top_k_and_records(self) -> None:
        context = guard_of(policy=SEVENTY, mode="shadow", k=4).retrieve("q?")
        assert (served(context), context.kept_ids) == (["a", "b", "c", "d"], ("a", "b", "c"))
        assert context.verdicts[3].reason is DropReason.BELOW_RATIO

    def test_shadow_records_what_assembly_would_drop(self, counted: Counted) -> None:
        hits = [*HITS[:2], replace(HITS[2], text="the  FIRST."), replace(HITS[3], text=None)]  # type: ignore[arg-type]
        answer = Answering(Ranking.from_hits(hits, ScoreKind.RATIO))
        context = guard_of(answer, mode="shadow", telemetry=counted.telemetry).retrieve("q?")
        assert (served(context), context.kept_ids) == (["a", "b", "c"], ("a", "b"))
        assert context.verdicts[-1].reason is DropReason.DUPLICATE_TEXT
        assert counted.dropped() == {DropReason.DUPLICATE_TEXT: 1, DropReason.UNREADABLE: 1}

    @settings(max_examples=50)
    @given(st.data())
    def test_shadow_gives_the_verdicts_of_enforce(self, data: st.DataObject) -> None:
        ranking, assembly = data.draw(rankings()), data.draw(ASSEMBLIES)
        guards = [
            guard_of(Answering(ranking), policy=SEVENTY, assembly=assembly, mode=mode)
            for mode in (Mode.SHADOW, Mode.ENFORCE)
        ]
        try:
            shadow, enforced = (guard.retrieve("q?") for guard in guards)
        except StageUnavailableError:
            assume(False)  # no passage can be read
        assert repr(shadow.verdicts) == repr(enforced.verdicts)
        assert shadow.would_keep_ids == shadow.kept_ids == enforced.kept_ids
        assert sorted(shadow.would_keep_ids) == sorted(enforced.served_ids)
        assert shadow.served_ids == tuple(served(shadow))
        assert (shadow.flags, shadow.failures) == (enforced.flags, enforced.failures)

    @settings(max_examples=50)
    @given(st.data())
    def test_shadow_and_off_equal_bare_retriever(self, data: st.DataObject) -> None:
        ranking = data.draw(rankings())
        for mode in (Mode.SHADOW, Mode.OFF):
            guard = guard_of(Answering(ranking), policy=SEVENTY, mode=mode)
            passages = [ranking.passages[i] for i in range(len(ranking))]
            readable = [p for p in passages if p.text is not None]
            if passages and not readable:
                with pytest.raises(StageUnavailableError, match="text is NoneType, not str"):
                    guard.retrieve("q?")
                continue
            first = [p for p in passages[:5] if p.text is not None]
            assert list(guard.retrieve("q?").passages) == (first or readable[:1])


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"profile": profile_of(), "policy": SEVENTY}, "not both"),
            ({"depth": 0}, "depth 0"),
            ({"score_kind": "bm25"}, "score_kind 'bm25' is unknown"),
            ({"policy": SEVENTY, "score_kind": "rank"}, "min_ratio"),
            ({"mode": "enforced"}, "'enforced' is unknown; use one of enforce"),
            ({"retriever": "a retriever's name"}, "a str is not a retriever"),
        ],
    )
    def test_unworkable_settings_are_refused(self, settings: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigurationError, match=match):
            guard_of(**settings)

    @pytest.mark.parametrize("mode", ["off", Mode.OFF])
    def test_mode_may_change_while_serving(self, mode: Any) -> None:
        guard = guard_of(policy=SEVENTY, k=4)
        assert guard.mode is Mode.ENFORCE
        guard.mode = mode
        assert guard.mode is Mode.OFF
        context = guard.retrieve("q?")
        assert (context.mode, context.flags) == (Mode.OFF, ())
        assert served(context) == list(context.kept_ids) == ["a", "b", "c", "d"]
        guard.mode = "enforce"
        assert served(guard.retrieve("q?")) == ["a", "b", "c"]

    def test_unknown_mode_cannot_be_set(self) -> None:
        guard = guard_of(policy=SEVENTY)
        with pytest.raises(ConfigurationError, match="'enfroce' is unknown; use one of enforce"):
            guard.mode = cast(Any, "enfroce")
        assert guard.mode is Mode.ENFORCE

    def test_request_keeps_its_first_mode(self, counted: Counted) -> None:
        def search(query: str, depth: int) -> Ranking:
            guard.mode = "off"
            if query == "fail":
                raise OSError("down")
            return RANKING

        guard = guard_of(search, policy=SEVENTY, telemetry=counted.telemetry)
        context = guard.retrieve("q?")
        assert context.mode is Mode.ENFORCE
        assert served(context) == ["a", "b", "c"]
        guard.mode = "shadow"
        with pytest.raises(StageUnavailableError):
            guard.retrieve("fail")
        assert counted.by_label("received_requests") == {("enforce",): 1, ("shadow",): 1}
        assert counted.by_label("failed_requests") == {("shadow", "error"): 1}

    @pytest.mark.parametrize(
        "setting", ["depth", "score_kind", "assembly", "max_query_chars", "profile", "retriever"]
    )
    def test_other_settings_are_fixed(self, setting: str) -> None:
        guard = guard_of()
        with pytest.raises(AttributeError):
            setattr(guard, setting, getattr(guard, setting))


class TestErrors:
    @pytest.mark.parametrize(
        "error", [QueryError("the query is empty"), StageUnavailableError("engine", "no answer")]
    )
    def test_own_errors_pass_through(self, error: CtxguardError, counted: Counted) -> None:
        error.__cause__ = cause = ConnectionError("refused")
        guard = guard_of(Failing(error), telemetry=counted.telemetry)
        with pytest.raises(CtxguardError) as caught:
            guard.retrieve("")
        assert caught.value is error
        assert caught.value.__cause__ is cause
        assert counted["failed_requests"] == 1

    def test_failure_while_reading_is_an_outage(self) -> None:
        def search(query: str, depth: int) -> Iterator[Hit]:
            yield HITS[0]
            raise ConnectionError("reset")

        with pytest.raises(StageUnavailableError, match="ConnectionError at"):
            guard_of(search, score_kind="ratio").retrieve("q?")

    @pytest.mark.parametrize("answer", [None, 3, "abc", "", b"", {}, {"a": 1.0}])
    def test_wrong_return_type_names_the_right(self, answer: object, counted: Counted) -> None:
        guard = guard_of(Answering(answer), score_kind="ratio", telemetry=counted.telemetry)
        with pytest.raises(ConfigurationError, match=f"a {type(answer).__name__}; return a Rank"):
            guard.retrieve("q?")
        assert counted["failed_requests"] == 1

    @pytest.mark.parametrize("score_kind", [None, "ratio"])
    @pytest.mark.parametrize(
        ("answer", "holds"),
        [
            (["a"], "a list that holds str;"),
            ([("a", 1)], "a list that holds tuple;"),
            ([Answering(), HITS[0]], r"a list that holds \S*test_guard\.Answering;"),
            (
                (Passage("p", "text"), 1.0),
                r"a tuple that holds ctxguard\.core\.types\.Passage, flo",
            ),
        ],
    )
    def test_list_of_objects_names_the_remedy(
        self, answer: object, holds: str, score_kind: Any
    ) -> None:
        """As the documents of a framework, with or without their scores."""
        mend = r".*make each item a ctxguard\.Hit, as in Hit\(passage_id, score, text\)"
        with pytest.raises(ConfigurationError, match=holds + mend):
            guard_of(Answering(answer), score_kind=score_kind).retrieve("q?")

    @pytest.mark.parametrize("passage_id", [None, ["a"]])
    def test_hit_without_id_is_no_outage(self, passage_id: Any, counted: Counted) -> None:
        def search(query: str, *, depth: int) -> list[Hit]:
            return [HITS[0], Hit(passage_id, 10.0)]

        guard = guard_of(search, score_kind="ratio", telemetry=counted.telemetry)
        with pytest.raises(ConfigurationError, match=r"an id of type .* give it as the text"):
            guard.retrieve("q?")
        assert counted.by_label("failed_requests") == {("enforce", "invalid_request"): 1}

    def test_hits_without_kind_list_the_kinds(self) -> None:
        with pytest.raises(ConfigurationError, match=r"score_kind.*ratio, cosine"):
            guard_of(Answering(HITS)).retrieve("q?")

    @pytest.mark.parametrize("answer", [Ranking.from_hits([], ScoreKind.RATIO), []])
    def test_empty_result_is_flagged_answer(self, answer: object, counted: Counted) -> None:
        guard = guard_of(Answering(answer), score_kind="ratio", telemetry=counted.telemetry)
        context = guard.retrieve("q?")
        assert context.empty
        assert context.text == ""
        assert Flag.EMPTY_RETRIEVAL in context.flags
        assert (counted.requests("ok"), counted["failed_requests"]) == (1, 0)

    def test_rank_only_falls_back_to_top_k(self) -> None:
        fused = replace(RANKING, kind=ScoreKind.RANK)
        policy = RatioPolicy(k=4, min_ratio=0.7)
        context = guard_of(Answering(fused), policy=policy).retrieve("q?")
        assert served(context) == ["a", "b", "c", "d"]
        assert Flag.RANK_ONLY in context.flags


class TestCalibration:
    @pytest.mark.parametrize(
        ("retriever", "settings", "flags"),
        [
            (Answering, {"k": 3}, (Flag.UNCALIBRATED,)),
            (Answering, {"policy": SEVENTY}, (Flag.UNCALIBRATED,)),
            (Identified, {"profile": profile_of(fingerprint=OWN), "check": STRICT}, ()),
            (
                Answering,
                {"profile": profile_of(fingerprint=OWN), "check": replace(STRICT, fingerprint=OWN)},
                (),
            ),
        ],
        ids=["top k", "by hand", "identifies itself", "identified by hand"],
    )
    def test_only_own_profile_applies_unflagged(
        self, retriever: type[Answering], settings: dict[str, Any], flags: tuple[Flag, ...]
    ) -> None:
        context = guard_of(retriever(), **settings).retrieve("q?")
        assert (served(context), context.flags) == (["a", "b", "c"], flags)

    def test_strict_mode_refuses_foreign_profile(self) -> None:
        profile = profile_of(fingerprint={"embedder": "large", "corpus_size": "6"})
        with pytest.raises(ProfileMismatchError, match="embedder is 'mini', was 'large'") as caught:
            guard_of(Identified(), profile=profile, check=STRICT)
        assert caught.value.differences == ("embedder is 'mini', was 'large'",)

    def test_foreign_profile_gives_k_and_flag(self, counted: Counted) -> None:
        profile = profile_of(
            RatioPolicy(k=4, min_ratio=0.9), fingerprint={"embedder": "large", "corpus_size": "6"}
        )
        guard = guard_of(Identified(), profile=profile, telemetry=counted.telemetry)
        for _ in range(2):
            context = guard.retrieve("q?")
            assert served(context) == ["a", "b", "c", "d"]
            assert context.flags == (Flag.PROFILE_MISMATCH,)
        assert counted.by_label("flags") == {("profile_mismatch",): 2}

    def test_uncalibrated_route_gets_top_k(self) -> None:
        guard = guard_of(profile=profile_of(route=Route.HYBRID), k=2)
        context = guard.retrieve("q?")
        assert served(context) == ["a", "b"]
        assert context.flags == (Flag.UNVERIFIED, Flag.ROUTE_UNCALIBRATED)
        line = "the profile has no policy of the route external, it has hybrid"
        assert line in context.differences

    def test_each_route_has_its_own_policy(self) -> None:
        routes = {
            Route.HYBRID: RouteProfile(policy=SEVENTY, score_kind=ScoreKind.RATIO),
            Route.LEXICAL: RouteProfile(policy=RatioPolicy(k=1), score_kind=ScoreKind.RATIO),
        }
        guard = guard_of(profile=profile_with(routes))
        assert served(guard.filter("q?", replace(RANKING, route=Route.HYBRID))) == ["a", "b", "c"]
        assert served(guard.filter("q?", replace(RANKING, route=Route.LEXICAL))) == ["a"]

    def test_other_score_kinds_are_never_compared(self) -> None:
        profile = profile_of(RatioPolicy(k=4, min_ratio=0.7), kind=ScoreKind.LOGIT)
        context = guard_of(profile=profile).retrieve("q?")
        assert served(context) == ["a", "b", "c", "d"]
        assert context.flags == (Flag.UNVERIFIED, Flag.PROFILE_MISMATCH)
        assert "score kind of the route external is 'ratio', was 'logit'" in context.differences

    def test_profiles_fusion_is_set(self) -> None:
        @dataclass
        class Fusing(Answering):
            fusion: Fusion = field(default_factory=Fusion)

            def with_fusion(self, fusion: Fusion) -> "Fusing":
                return replace(self, fusion=fusion)

        original = Fusing()
        guard = guard_of(original, profile=profile_of(fusion=Fusion("convex", 0.3)))
        assert isinstance(guard.retriever, Fusing)
        assert (guard.retriever.fusion, original.fusion) == (Fusion("convex", 0.3), Fusion())

    def test_profile_is_read_from_path(self, tmp_path: object) -> None:
        file = f"{tmp_path}/profile.json"
        profile_of().save(file)
        assert served(guard_of(profile=file).retrieve("q?")) == ["a", "b", "c"]
        with pytest.raises(ProfileFormatError, match="absent"):
            guard_of(profile=f"{tmp_path}/absent.json")

    def test_expected_utility_through_the_guard(self) -> None:
        names = feature_names(["dense"])
        model = RelevanceModel(("dense",), (10.0, 0, 0, 0, 0), (0.0,) * 5, (1.0,) * 5, -7.0)
        assert names[0] == "dense.value"
        cosines = np.array([0.2, 0.9, 0.8, 0.1, 0.3, 0.0])
        ranking = replace(RANKING, legs={"dense": Leg(cosines, ScoreKind.COSINE)})
        profile = profile_of(ExpectedUtilityPolicy(model=model, k=5))
        context = guard_of(Answering(ranking), profile=profile).retrieve("q?")
        assert served(context) == ["b", "c"]
        missing = guard_of(profile=profile).retrieve("q?")
        assert served(missing) == ["a", "b", "c", "d", "e"]
        assert missing.flags == (Flag.UNVERIFIED, Flag.MISSING_SIGNALS)
        line = "the policy needs scores of dense, the answer has those of none"
        assert line in missing.differences


@dataclass
class Swapping(Answering):
    """A retriever whose generation is an attribute of the instance."""

    generation: object = field(default_factory=object)
    corpus_size: int = 6

    def pinned(self) -> "Swapping":
        return replace(self)

    def fingerprint(self) -> dict[str, str]:
        return {"corpus_size": str(self.corpus_size)}

    def swap(self, generation: object, corpus_size: int) -> None:
        self.corpus_size = corpus_size
        self.generation = generation


class Delegating:
    """Hands what it does not have itself on to the retriever that it wraps."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
        return replace(self.inner.retrieve(query, depth=depth), route=Route.DENSE)


class TestSwappingRetrievers:
    @pytest.mark.parametrize("first", ["one", None])
    def test_instance_attribute_generation_is_followed(self, first: object) -> None:
        retriever = Swapping(generation=first)
        guard = guard_of(retriever, profile=profile_of(fingerprint={"corpus_size": "6"}))
        assert guard.retrieve("q?").flags == ()
        retriever.swap("two", corpus_size=7)
        assert guard.retrieve("q?").flags == (Flag.PROFILE_MISMATCH,)
        retriever.swap("three", corpus_size=6)
        assert guard.retrieve("q?").flags == ()

    def test_wrapper_is_not_bypassed(self) -> None:
        guard = guard_of(Delegating(Swapping()))
        assert guard.retrieve("q?").route is Route.DENSE


UNREADABLE_FIRST = [replace(HITS[0], text=None), *HITS[1:]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hits", "stage", "outcome", "label"),
    [
        (HITS, "dense", "degraded", "dense"),
        (HITS, "tenant-417", "degraded", "other"),
        # A failure in assembly is counted, but the answer is not degraded.
        (UNREADABLE_FIRST, None, "ok", "assembly"),
    ],
)
def test_missing_stage_degrades_and_is_named(
    hits: list[Hit], stage: str | None, outcome: str, label: str, counted: Counted
) -> None:
    failures = () if stage is None else (StageFailure(stage, "timed out"),)
    ranking = replace(Ranking.from_hits(hits, ScoreKind.RATIO), failures=failures)
    context = guard_of(Answering(ranking), telemetry=counted.telemetry).retrieve("q?")
    assert (Flag.DEGRADED in context.flags) == (stage is not None)
    assert context.failures[: len(failures)] == failures
    assert [counted.requests(each) for each in ("ok", "degraded")] == [
        int(outcome == "ok"),
        int(outcome == "degraded"),
    ]
    assert counted.by_label("stage_failures") == {(label, "error"): 1}


GARBAGE = st.sampled_from([None, math.nan, math.inf, -math.inf, 1e37, -3.4e38, "0.9"])


@st.composite
def rankings(draw: st.DrawFn) -> Ranking:
    """Any candidates: garbage scores, repeated ids, repeated and unreadable texts, dead stages."""
    n = draw(st.integers(0, 12))
    scores = st.one_of(st.floats(0.0, 50.0), st.sampled_from([0.0, 1.0, 5.0]), GARBAGE)
    hits = [
        Hit(
            draw(st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "-1"])),
            draw(scores),  # type: ignore[arg-type]
            draw(st.sampled_from(["", "one", "One ", "two words", "three", None])),  # type: ignore[arg-type]
            rank=draw(st.one_of(st.none(), st.integers(1, 9))),
        )
        for _ in range(n)
    ]
    ranking = Ranking.from_hits(hits, draw(st.sampled_from([ScoreKind.RATIO, ScoreKind.LOGIT])))
    failures = draw(st.lists(st.just(StageFailure("dense", "down")), max_size=2))
    return replace(ranking, failures=tuple(failures), route=draw(st.sampled_from(list(Route))))


POLICIES = st.sampled_from(
    [SEVENTY, RatioPolicy(), RatioPolicy(k=2, min_ratio=0.2), RatioPolicy(k=3, min_keep=0)]
)
ASSEMBLIES = st.sampled_from(
    [
        Assembly(),
        Assembly(max_tokens=4),
        Assembly(max_tokens=4, truncate=True),
        Assembly(order="edges", drop_duplicates=False),
    ]
)


class TestAccounting:
    @given(
        st.lists(st.one_of(rankings(), st.just(None), st.just("no result")), max_size=6),
        POLICIES,
        ASSEMBLIES,
        st.sampled_from(list(Mode)),
    )
    @settings(max_examples=40)
    def test_every_request_and_candidate_counts_once(
        self, answers: list[object], policy: RatioPolicy, assembly: Assembly, mode: Mode
    ) -> None:
        counted = Counted()
        remaining = iter(answers)
        guard = guard_of(
            lambda query, depth: next(remaining),
            policy=policy,
            assembly=assembly,
            mode=mode,
            telemetry=counted.telemetry,
        )
        contexts = []
        for answer in answers:
            try:
                contexts.append(guard.retrieve("q?"))
            except CtxguardError:
                # Not a ranking, or one of which no passage can be read.
                assert not isinstance(answer, Ranking) or not any(
                    isinstance(answer.passages[at].text, str) for at in decide(answer, policy).order
                )
        ok, degraded = counted.requests("ok"), counted.requests("degraded")
        assert ok + degraded + counted["failed_requests"] == len(answers)
        assert counted["failed_requests"] == len(answers) - len(contexts)
        assert degraded == sum(bool(context.decision.ranking.failures) for context in contexts)
        candidates = sum(context.candidates for context in contexts)
        assert counted["kept_candidates"] + sum(counted.dropped().values()) == candidates
        assert counted["kept_candidates"] == sum(len(context.kept_ids) for context in contexts)
        for reason in DropReason:
            told = sum(v.reason is reason for context in contexts for v in context.verdicts)
            if mode is not Mode.OFF:
                assert counted.dropped().get(reason, 0) == told

    def test_requests_count_by_mode_and_route(self, counted: Counted) -> None:
        answer = replace(RANKING, route=Route.LEXICAL)
        guard_of(Answering(answer), mode="shadow", telemetry=counted.telemetry).retrieve("q?")
        assert counted.by_label("requests") == {("shadow", "lexical", "ok"): 1}

    def test_times_and_sizes_are_observed_once(self, counted: Counted) -> None:
        guard = guard_of(policy=SEVENTY, telemetry=counted.telemetry)
        guard.retrieve("q?")
        guard.filter("q?", RANKING)
        value = counted.registry.get_sample_value
        assert value("ctxguard_guard_seconds_count") == 2
        assert value("ctxguard_retrieve_seconds_count") == 1
        assert value("ctxguard_context_passages_sum") == 6

    def test_guards_share_one_metrics_set(self) -> None:
        registry = CollectorRegistry()
        assert default_telemetry(registry) is default_telemetry(registry)


class TestSampling:
    def test_request_is_selected_and_offered_once(self) -> None:
        sampler = Sampled()

        def search(query: str, depth: int) -> Ranking:
            sampler.events.append("retrieval")
            return RANKING

        context = guard_of(search, sampler=sampler).retrieve("q?", request_id="r7")
        assert sampler.events == ["draw r7", "retrieval", "offer r7"]
        assert sampler.contexts == [context]

    @pytest.mark.parametrize(
        ("takes", "by_hand", "offered"),
        [(True, False, 0.25), (True, True, 0.25), (False, True, 0.0), (False, False, None)],
    )
    def test_chosen_samples_carry_their_probability(
        self, takes: bool, by_hand: bool, offered: float | None
    ) -> None:
        sampler = Sampled(takes=takes)
        guard = guard_of(sampler=sampler)
        guard.retrieve("q?", sample=by_hand)
        asyncio.run(guard.aretrieve("q?", sample=by_hand))
        guard.filter("q?", RANKING, sample=by_hand)
        assert sampler.probabilities == ([] if offered is None else [offered] * 3)

    def test_without_sampler_samples_change_nothing(self) -> None:
        assert len(guard_of(policy=SEVENTY).retrieve("q?", sample=True)) == 3

    def test_session_comes_back_with_context(self) -> None:
        context = guard_of().retrieve("q?", session_id="s1")
        assert context.session_id == "s1"

    def test_a_failed_request_is_not_offered(self) -> None:
        sampler = Sampled()
        with pytest.raises(StageUnavailableError):
            guard_of(Failing(OSError()), sampler=sampler).retrieve("q?")
        assert sampler.contexts == []

    def test_missing_ids_become_distinct(self) -> None:
        guard = guard_of()
        assert len({guard.retrieve("q?").request_id for _ in range(100)}) == 100

    @pytest.mark.parametrize(
        ("method", "error"), [("draw", OSError), ("offer", OSError), ("draw", None)]
    )
    def test_faulty_sampler_fails_no_request(
        self, method: str, error: type[Exception] | None, counted: Counted
    ) -> None:
        class Broken(Sampled):
            pass

        def broken(*_: object, **__: object) -> None:
            if error is not None:
                raise error("disk full")

        setattr(Broken, method, broken)
        guard = guard_of(policy=SEVENTY, sampler=Broken(), telemetry=counted.telemetry)
        assert served(guard.retrieve("q?")) == ["a", "b", "c"]
        assert served(asyncio.run(guard.aretrieve("q?"))) == ["a", "b", "c"]
        assert counted.by_label("observer_failures") == {("sampler",): 2}
        assert counted.requests("ok") == 2

    def test_faulty_telemetry_fails_no_request(self) -> None:
        class Broken(Telemetry):
            def answered(self, *_: object) -> None:
                raise RuntimeError("broken")

        class Dead(Broken):
            raised = observer_failed = Broken.answered

        registry = CollectorRegistry()
        assert len(guard_of(policy=SEVENTY, telemetry=Broken(registry)).retrieve("q?")) == 3
        labels = {"observer": "telemetry"}
        assert registry.get_sample_value("ctxguard_observer_failures_total", labels) == 1
        dead = Dead(CollectorRegistry())
        assert len(guard_of(policy=SEVENTY, telemetry=dead).retrieve("q?")) == 3
        with pytest.raises(StageUnavailableError, match="OSError at"):
            guard_of(Failing(OSError("down")), telemetry=dead).retrieve("q?")


@settings(max_examples=50)
@given(rankings(), POLICIES)
def test_named_settings_keep_the_dropped(ranking: Ranking, policy: RatioPolicy) -> None:
    """Also among copies, repeated ids and garbage."""
    try:
        context = guard_of(Answering(ranking), policy=policy).retrieve("q?")
    except StageUnavailableError:
        assume(False)  # no passage can be read
    assert len(context.verdicts) == len(ranking)
    for verdict in context.verdicts:
        if verdict.reason in (DropReason.BELOW_RATIO, DropReason.BEYOND_K):
            needed: dict[str, Any] = {each.setting: each.value for each in verdict.kept_if}
            changed = replace(policy, **{**needed, "k": int(needed.get("k", policy.k))})
            assert changed != policy
            assert verdict.passage_id in decide(context.decision.ranking, changed).kept_ids


class TestNeverEmptyByAccident:
    """Empty where nothing was retrieved, where abstention was asked for, or flagged."""

    @settings(max_examples=50)
    @given(rankings(), POLICIES, ASSEMBLIES)
    def test_an_empty_context_says_why(
        self, ranking: Ranking, policy: RatioPolicy, assembly: Assembly
    ) -> None:
        guard = guard_of(Answering(ranking), policy=policy, assembly=assembly)
        try:
            context = guard.retrieve("q?")
        except StageUnavailableError:
            return
        if Flag.EMPTY_RETRIEVAL in context.flags:
            assert set(ranking.passage_ids) <= {"-1"}
        assert not context.empty or {Flag.EMPTY_RETRIEVAL, Flag.OVER_BUDGET} & set(context.flags)

    def test_scoreless_hits_are_cut_by_k(self) -> None:
        hits = [Hit(hit.passage_id, text=hit.text) for hit in HITS]
        for kind in ("rank", ScoreKind.RANK, None):
            guard = guard_of(lambda query, depth: hits, score_kind=kind, k=3)
            context = guard.retrieve("q?")
            assert (served(context), context.flags) == (["a", "b", "c"], (Flag.UNCALIBRATED,))
            assert context.decision.ranking.kind is ScoreKind.RANK

    def test_upstream_ranks_order_hits_without_scores(self) -> None:
        hits = [Hit("third", rank=3), Hit("first", rank=1), Hit("second", rank=2), Hit("first")]
        context = guard_of(score_kind="rank").filter("q?", hits)
        assert context.kept_ids == ("first", "second", "third")
        assert context.dropped_by_reason == {DropReason.DUPLICATE_ID: 1}

    def test_unreadable_kept_gives_next_passage(self) -> None:
        hits = [replace(hit, text=None) for hit in HITS[:4]] + HITS[4:]  # type: ignore[arg-type]
        ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
        context = guard_of(Answering(ranking), policy=RatioPolicy(k=2)).retrieve("q?")
        assert served(context) == ["e"]
        assert Flag.UNREADABLE in context.flags
        assert context.kept_ids == ("e",)
        assert context.dropped_by_reason == {DropReason.UNREADABLE: 4, DropReason.BEYOND_K: 1}

    @pytest.mark.parametrize("mode", list(Mode))
    def test_all_unreadable_is_a_failure(self, mode: Mode, counted: Counted) -> None:
        ranking = replace(RANKING, passages=[None] * len(HITS))
        guard = guard_of(Answering(ranking), mode=mode, telemetry=counted.telemetry)
        with pytest.raises(StageUnavailableError, match="no candidate can be read"):
            guard.retrieve("q?")
        assert counted["failed_requests"] == 1

    def test_nothing_abstains_without_a_stage(self) -> None:
        """That nothing looks relevant to the other stage alone is not a reason to abstain."""
        policy = ExpectedUtilityPolicy(never_relevant(), k=2, cost=1.0, min_keep=0)
        ranking = replace(
            Ranking.from_hits(HITS, ScoreKind.RATIO),
            legs={"lexical": Leg(np.arange(6.0, 0.0, -1.0), ScoreKind.RATIO)},
        )
        assert guard_of(Answering(ranking), policy=policy).retrieve("q?").empty
        degraded = replace(ranking, failures=(StageFailure("dense", "down"),))
        assert served(guard_of(Answering(degraded), policy=policy).retrieve("q?")) == ["a"]


def never_relevant() -> RelevanceModel:
    n = len(feature_names(("lexical",)))
    return RelevanceModel(("lexical",), (0.0,) * n, (0.0,) * n, (1.0,) * n, -3.0)


class TestAssemblyThroughTheGuard:
    def ask(self, assembly: Assembly, hits: Sequence[Hit] = HITS) -> Context:
        ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
        return guard_of(Answering(ranking), policy=RatioPolicy(k=5), assembly=assembly).retrieve("")

    def test_better_of_equal_texts_stays(self) -> None:
        hits = [*HITS[:2], replace(HITS[2], text="the  FIRST.")]
        context = self.ask(Assembly(), hits)
        assert served(context) == ["a", "b"]
        assert context.verdicts[2].reason is DropReason.DUPLICATE_TEXT
        assert served(self.ask(Assembly(drop_duplicates=False), hits)) == ["a", "b", "c"]


DISTANCES = [0.05, 0.31, 0.36, 0.62, 0.8]


class TestDirection:
    """A retriever's order is evidence of what its scores mean."""

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
        self, kind: str, scores: list[float], policy: Policy | None, *, has_ranks: bool
    ) -> None:
        hits = [
            Hit(f"p{at}", score, f"text {at}", rank=at + 1 if has_ranks else None)
            for at, score in enumerate(scores)
        ]
        if kind == "rank" and policy is not None:
            policy = RatioPolicy(k=5)
        registry = CollectorRegistry()
        guard = ContextGuard(
            Answering(hits), score_kind=kind, policy=policy, telemetry=Telemetry(registry)
        )
        context = guard.retrieve("q?")
        assert served(context) == [hit.passage_id for hit in hits]
        assert Flag.SCORES_CONTRADICTED in context.flags
        counted = registry.get_sample_value("ctxguard_flags_total", {"flag": "scores_contradicted"})
        assert (counted, [verdict.score for verdict in context.verdicts]) == (1.0, scores)
        assert served(asyncio.run(guard.aretrieve("q?"))) == served(context)

    def test_model_does_not_order_them_either(self) -> None:
        legs = feature_names(["ranking"])
        model = RelevanceModel(
            ("ranking",), (1.0,) * len(legs), (0.0,) * len(legs), (1.0,) * len(legs), 0.0
        )
        hits = [Hit(f"p{at}", score, f"text {at}") for at, score in enumerate(DISTANCES)]
        context = guard_of(
            Answering(Ranking.from_hits(hits, "cosine")), policy=ExpectedUtilityPolicy(model, k=3)
        ).retrieve("q?")
        assert served(context) == ["p0", "p1", "p2"]
        assert context.decision.probabilities is None
        assert Flag.MISSING_SIGNALS not in context.flags

    def test_order_of_results_is_no_evidence(self) -> None:
        hits = [Hit(f"p{at}", score, f"text {at}") for at, score in enumerate(DISTANCES)]
        context = ContextGuard(score_kind="cosine").filter("q?", hits)
        assert served(context) == ["p4", "p3", "p2", "p1", "p0"]
        assert context.flags == (Flag.UNCALIBRATED,)

    def test_ranks_of_results_are_evidence(self) -> None:
        hits = [
            Hit(f"p{at}", score, f"text {at}", rank=at + 1) for at, score in enumerate(DISTANCES)
        ]
        context = ContextGuard(score_kind="cosine").filter("q?", hits[::-1])
        assert served(context) == ["p0", "p1", "p2", "p3", "p4"]
        assert Flag.SCORES_CONTRADICTED in context.flags

    @pytest.mark.parametrize("scores", [[0.7], [0.5, 0.5, 0.5], [0.6, 0.9, 0.7, 0.8, 0.1]])
    def test_weak_evidence_leaves_scores_in_force(self, scores: list[float]) -> None:
        hits = [Hit(f"p{at}", score, f"text {at}") for at, score in enumerate(scores)]
        context = ContextGuard(Answering(hits), score_kind="cosine").retrieve("q?")
        assert context.flags == (Flag.UNCALIBRATED,)
        best = max(range(len(scores)), key=scores.__getitem__)
        assert context.kept_ids[0] == f"p{best}"

    def test_sample_is_decided_again_the_same(self) -> None:
        hits = [Hit(f"p{at}", score, f"text {at}") for at, score in enumerate(DISTANCES)]
        guard = ContextGuard(Answering(hits), score_kind="cosine", policy=SEVENTY)
        context = guard.retrieve("q?")
        record = SampleRecord.from_bytes(record_of(Sample(context, 1.0, 0.0)).to_bytes())
        assert decide(record.ranking(), SEVENTY).kept_ids == context.kept_ids
