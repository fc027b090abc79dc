"""What type checkers accept and refuse of the public interface; mypy checks it and nothing runs it.

Each refused line carries a ``type: ignore`` with the error's code. mypy warns of one that is not
needed, so a line that it no longer refuses fails the check.
"""

from collections.abc import Awaitable, Iterator, Sequence

from ctxguard import (
    AsyncRetriever,
    Context,
    ContextGuard,
    Deadlines,
    FilteringRetriever,
    Fusion,
    Hit,
    HybridRetriever,
    JudgingRates,
    Mode,
    Passage,
    Privacy,
    Ranking,
    RatioPolicy,
    Retriever,
    RetrieverFunction,
    ScoreKind,
    SwappingRetriever,
    Where,
    sample_to,
)


class Engine:
    """Answers with a ranking; takes filters; swaps its index."""

    def __init__(self) -> None:
        self.generation: object = object()

    def retrieve(self, query: str, *, depth: int = 100, where: Where | None = None) -> Ranking:
        raise NotImplementedError

    def pinned(self) -> "Engine":
        return self


class HitEngine:
    """Answers with plain hits, and has another name for the query."""

    def retrieve(self, question: str, depth: int) -> list[Hit]:
        raise NotImplementedError


class AsyncEngine:
    """Has only an asynchronous method."""

    async def aretrieve(self, query: str, *, depth: int) -> Ranking:
        raise NotImplementedError


class AwaitableEngine:
    """Has an asynchronous method under the plain one's name."""

    async def retrieve(self, query: str, *, depth: int) -> Sequence[Hit]:
        raise NotImplementedError


class WithoutDepth:
    """Cannot be told how many candidates to return."""

    def retrieve(self, query: str) -> Ranking:
        raise NotImplementedError


class ReturningTexts:
    """Returns neither a ranking nor hits."""

    def retrieve(self, query: str, *, depth: int) -> list[str]:
        raise NotImplementedError


def search(query: str, *, depth: int) -> Iterator[Hit]:
    """A plain function."""
    raise NotImplementedError


async def search_later(query: str, depth: int) -> Ranking:
    """An asynchronous function."""
    raise NotImplementedError


def search_without_depth(query: str) -> list[Hit]:
    """A function that cannot be told how many candidates to return."""
    raise NotImplementedError


def accepted(hybrid: HybridRetriever) -> None:
    """Everything that a guard can wrap, and its settings by member or by name."""
    ContextGuard(Engine())
    ContextGuard(HitEngine(), score_kind="cosine")
    ContextGuard(AsyncEngine())
    ContextGuard(AwaitableEngine())
    ContextGuard(search, score_kind=ScoreKind.COSINE)
    ContextGuard(search_later)
    ContextGuard(policy=RatioPolicy()).filter("who?", [Hit("a", text="without a score")])
    ContextGuard(lambda query, depth: search(query, depth=depth), score_kind="cosine")
    ContextGuard(hybrid.with_deadlines(Deadlines(total_seconds=0.3)), mode="shadow")
    ContextGuard(policy=RatioPolicy(k=3), mode=Mode.OFF)
    Ranking.from_hits([Hit("a", 1.0)], "ratio", "lexical")
    Fusion("convex", 0.3)

    retriever: Retriever = hybrid
    filtering: FilteringRetriever = hybrid
    swapping: SwappingRetriever = hybrid
    own: SwappingRetriever = Engine()
    plain: Retriever = filtering
    pinned: Retriever = swapping.pinned()
    asynchronous: AsyncRetriever = AsyncEngine()
    function: RetrieverFunction = search
    ContextGuard(retriever), ContextGuard(own), ContextGuard(plain), ContextGuard(pinned)
    ContextGuard(asynchronous), ContextGuard(function)

    guard = ContextGuard(
        hybrid,
        sampler=sample_to(
            "sqlite://", rate=0.1, rates=JudgingRates(full_pool_rate=0.5), privacy=Privacy()
        ).sampler,
    )
    guard.mode = "enforce"
    guard.mode = Mode.SHADOW
    mode: Mode = guard.mode
    context: Context = guard.retrieve("who?", where=Where(tenant="a"))
    answer: Awaitable[Context] = guard.aretrieve("who?")
    passages: tuple[Passage, ...] = guard.filter("who?", [Hit("a", 1.0)]).passages
    del mode, context, answer, passages


def refused(guard: ContextGuard, hybrid: HybridRetriever) -> None:
    """Mistakes that a type checker finds before a request does."""
    ContextGuard(42)  # type: ignore[arg-type]
    ContextGuard("an engine's name")  # type: ignore[arg-type]
    ContextGuard(WithoutDepth())  # type: ignore[arg-type]
    ContextGuard(ReturningTexts())  # type: ignore[arg-type]
    ContextGuard(search_without_depth)  # type: ignore[arg-type]
    ContextGuard(hybrid, mode="enfroce")  # type: ignore[arg-type]
    ContextGuard(hybrid, score_kind="bm25")  # type: ignore[arg-type]
    ContextGuard(hybrid, profil="profile.json")  # type: ignore[call-arg]
    Ranking.from_hits([Hit("a", 1.0)], "bm25")  # type: ignore[arg-type]
    Fusion("concave")  # type: ignore[arg-type]
    filtering: FilteringRetriever = HitEngine()  # type: ignore[assignment]
    swapping: SwappingRetriever = HitEngine()  # type: ignore[assignment]
    del filtering, swapping

    guard.mode = "enfroce"  # type: ignore[assignment]
    guard.depth = 10  # type: ignore[misc]
    guard.retrieve(42)  # type: ignore[arg-type]
    guard.retrieve("who?", where={"tenant": "a"})  # type: ignore[arg-type]
    guard.filter("who?", ["a text"])  # type: ignore[list-item]
