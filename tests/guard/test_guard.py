"""The guard: what it wraps, what it answers, what it counts, and what can never fail a request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ctxguard.core.assembly import Assembly
from ctxguard.core.context import Context
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
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
    ScoreKind,
    StageFailure,
)
from ctxguard.errors import ConfigurationError, CtxguardError, QueryError, StageUnavailableError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.resilience.bounded_caller import RequestLimits
from tests.counted import Counted
from tests.doubles import Fault, FaultyRetriever
from tests.guard.guards import (
    ASSEMBLIES,
    HITS,
    POLICIES,
    RANKING,
    SEVENTY,
    Answering,
    Failing,
    guard_of,
    profile_of,
    rankings,
    served,
)
from tests.timing import NEVER, PATIENCE_SECONDS


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

    def test_results_need_no_retriever(self) -> None:
        guard = ContextGuard(policy=SEVENTY)
        assert served(guard.filter("q?", RANKING)) == ["a", "b", "c"]
        for ask in (guard.retrieve, lambda query: asyncio.run(guard.aretrieve(query))):
            with pytest.raises(ConfigurationError, match="no retriever"):
                ask("q?")


class TestModes:
    def test_shadow_records_what_assembly_would_drop(self, counted: Counted) -> None:
        hits = [*HITS[:2], replace(HITS[2], text="the  FIRST."), replace(HITS[3], text=None)]  # type: ignore[arg-type]
        answer = Answering(Ranking.from_hits(hits, ScoreKind.RATIO))
        context = guard_of(answer, mode="shadow", telemetry=counted.telemetry).retrieve("q?")
        assert (served(context), context.would_keep_ids) == (["a", "b", "c"], ("a", "b"))
        written = context.to_dict()
        assert (written["kept_ids"], written["would_keep_ids"]) == (["a", "b", "c"], ["a", "b"])
        assert context.decisions[-1].reason is DropReason.DUPLICATE_TEXT
        assert counted.dropped() == {DropReason.DUPLICATE_TEXT: 1, DropReason.UNREADABLE: 1}

    @settings(max_examples=50)
    @given(st.data())
    def test_shadow_gives_the_decisions_of_enforce(self, data: st.DataObject) -> None:
        ranking, assembly = data.draw(rankings()), data.draw(ASSEMBLIES)
        guards = [
            guard_of(Answering(ranking), policy=SEVENTY, assembly=assembly, mode=mode)
            for mode in (Mode.SHADOW, Mode.ENFORCE)
        ]
        try:
            shadow, enforced = (guard.retrieve("q?") for guard in guards)
        except StageUnavailableError:
            assume(False)  # no passage can be read
        assert repr(shadow.decisions) == repr(enforced.decisions)
        assert shadow.would_keep_ids == enforced.kept_ids == enforced.would_keep_ids
        assert sorted(shadow.would_keep_ids) == sorted(enforced.served_ids)
        assert shadow.served_ids == shadow.kept_ids == tuple(served(shadow))
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
        with pytest.raises(ConfigurationError, match="'enfroce' is unknown; use one of enforce"):
            guard.mode = cast(Any, "enfroce")
        assert served(guard.retrieve("q?")) == ["a", "b", "c"]

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
        "setting", ["depth", "k", "score_kind", "assembly", "max_query_chars", "profile"]
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
        """A retriever that fails while its hits are read is an outage."""

        def search(query: str, depth: int) -> Iterator[Hit]:
            yield HITS[0]
            raise ConnectionError("reset")

        with pytest.raises(StageUnavailableError, match="ConnectionError at"):
            guard_of(search, score_kind="ratio").retrieve("q?")

    @pytest.mark.parametrize("score_kind", [None, "ratio"])
    @pytest.mark.parametrize(
        ("answer", "got"),
        [
            *[(each, type(each).__name__) for each in (None, 3, "a", "", b"", {}, {"a": 1.0})],
            (["a"], "list that holds str;"),
            ([("a", 1)], "list that holds tuple;"),
            ([Answering(), HITS[0]], r"list that holds \S*guards\.Answering;"),
            (
                (Passage("p", "text"), 1.0),
                r"tuple that holds ctxguard\.core\.types\.Passage, float;",
            ),
        ],
    )
    def test_other_results_name_the_remedy(
        self, answer: Any, got: str, score_kind: Any, counted: Counted
    ) -> None:
        """As the documents of a framework, with or without their scores."""
        mend = r".*make each item a ctxguard\.Hit, as in Hit\(passage_id, score, text\)"
        said = f"expected a Ranking or a list of Hits, got a {got}{mend if ';' in got else '$'}"
        guard = guard_of(Answering(answer), score_kind=score_kind, telemetry=counted.telemetry)
        for ask in (guard.retrieve, lambda query: guard.filter(query, answer)):
            with pytest.raises(ConfigurationError, match=said):
                ask("q?")
        assert counted["failed_requests"] == 2

    @pytest.mark.parametrize("passage_id", [None, ["a"]])
    def test_hit_without_id_is_no_outage(self, passage_id: Any, counted: Counted) -> None:
        """A hit without an id is the adapter's error not an outage."""

        def search(query: str, *, depth: int) -> list[Hit]:
            return [HITS[0], Hit(passage_id, 10.0)]

        guard = guard_of(search, score_kind="ratio", telemetry=counted.telemetry)
        with pytest.raises(ConfigurationError, match=r"an id of type .* pass the string"):
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

    @pytest.mark.parametrize("kind", ["rank", ScoreKind.RANK, None])
    def test_scoreless_hits_are_cut_by_k(self, kind: Any) -> None:
        hits = [Hit(hit.passage_id, text=hit.text) for hit in HITS]
        context = guard_of(lambda query, depth: hits, score_kind=kind, k=3).retrieve("q?")
        assert (served(context), context.flags) == (["a", "b", "c"], (Flag.UNCALIBRATED,))
        assert context.decision.ranking.kind is ScoreKind.RANK

    def test_upstream_ranks_order_hits_without_scores(self) -> None:
        hits = [Hit("third", rank=3), Hit("first", rank=1), Hit("second", rank=2), Hit("first")]
        context = guard_of(score_kind="rank").filter("q?", hits)
        assert context.kept_ids == ("first", "second", "third")
        assert context.dropped_by_reason == {DropReason.DUPLICATE_ID: 1}

    def test_unreadable_kept_gives_next_passage(self) -> None:
        """Where nothing that was kept can be read the next passage is served."""
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


@pytest.mark.parametrize(("drops", "kept"), [(True, "ab"), (False, "abc")])
def test_better_of_equal_texts_stays(drops: bool, kept: str) -> None:
    hits = [*HITS[:2], replace(HITS[2], text="the  FIRST.")]
    guard = guard_of(Answering(hits), score_kind="ratio", assembly=Assembly(drop_duplicates=drops))
    assert served(guard.retrieve("q?")) == list(kept)


def never_relevant() -> RelevanceModel:
    n = len(feature_names(("lexical",)))
    return RelevanceModel(("lexical",), (0.0,) * n, (0.0,) * n, (1.0,) * n, -3.0)
