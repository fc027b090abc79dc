"""The system that faults are brought about in: index, retriever, profile, guard, sampler, store.

All of it real. A leg is wrapped by a switch that is off but for its fault, and the smaller size
computes vectors from hashes of words instead of by the bundled model.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bookkeeping import Books, Tally, balance, counted
from prometheus_client import CollectorRegistry, generate_latest

from ctxguard.context import Context
from ctxguard.fusion import Fusion
from ctxguard.guard import ContextGuard
from ctxguard.monitor.sampler import Sampler
from ctxguard.monitor.store import Limits, SampleStore
from ctxguard.monitor.writer import DEFAULT_PRIVACY, Privacy, SampleWriter
from ctxguard.policy import RatioPolicy
from ctxguard.profile import Profile, Provenance, RouteProfile
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.protocols import Embedder, Float32Array, Progress, Reranker
from ctxguard.stages import Deadlines
from ctxguard.telemetry import Telemetry
from ctxguard.testing import WordHashEmbedder
from ctxguard.types import Passage, Route, ScoreKind

RESERVE_BYTES = 2**20
SLACK_SECONDS = 2.0
"""A busy machine's; the tail past a deadline is measured by the benchmark of load, not here."""

CANARY = "canaryword"
"""In every query and passage, and in no log and no metric."""

POLICIES = {
    Route.HYBRID_RERANK: (RatioPolicy(k=6, min_ratio=0.01), ScoreKind.LOGIT),
    Route.HYBRID: (RatioPolicy(k=5, min_ratio=0.3), ScoreKind.RATIO),
    Route.LEXICAL: (RatioPolicy(k=4, min_ratio=0.3), ScoreKind.RATIO),
    Route.DENSE: (RatioPolicy(k=3, min_ratio=0.1, temperature=0.1), ScoreKind.COSINE),
}
"""Another for every route, so that an answer shows which of them decided."""

_VOCABULARY = [f"word{n}" for n in range(400)]
_CLIENTS = 4


class Size(StrEnum):
    """How much of everything there is."""

    SMALL = "small"
    """For continuous integration: seconds a row, no model."""
    FULL = "full"


@dataclass(frozen=True)
class Seen:
    """What a row saw.

    Attributes:
        observed: In words.
        checks: What was to be, and whether it was.
        books: Of every process that took part.
    """

    observed: str
    checks: dict[str, bool]
    books: tuple[Books, ...]

    @property
    def passed(self) -> bool:
        """Whether everything was as it should be and every account adds up."""
        return all(self.checks.values()) and not any(one.wrong for one in self.books)


@dataclass
class Switch:
    """What a stage does instead of its work, given the work; None while it does its work."""

    fault: Callable[[Callable[[], Any]], Any] | None = None

    def __call__(self, work: Callable[[], Any]) -> Any:
        """The work, or the fault in its place."""
        return work() if self.fault is None else self.fault(work)

    @contextmanager
    def thrown(self, fault: Callable[[Callable[[], Any]], Any]) -> Any:
        """Faulty for as long as the block lasts."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None


class SwitchedEmbedder:
    """An embedder whose queries go through a switch."""

    def __init__(self, inner: Embedder) -> None:
        self._inner = inner
        self.switch = Switch()
        self.name, self.dimension = inner.name, inner.dimension

    def encode_query(self, text: str) -> Float32Array:
        return self.switch(lambda: self._inner.encode_query(text))

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        return self._inner.encode_passages(texts, progress)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()


def embedder_for(size: Size) -> SwitchedEmbedder:
    """The bundled model, or hashes of words."""
    return SwitchedEmbedder(
        WordHashEmbedder() if size is Size.SMALL else SentenceTransformerEmbedder()
    )


def corpus(n: int = 200, *, generation: str = "g0") -> list[Passage]:
    """Passages that share words with each other, the last of which says when they were made."""
    rng = random.Random(7)
    return [
        Passage(
            f"p{row:05d}",
            f"{' '.join(rng.choices(_VOCABULARY, k=12))} {CANARY} number{row} {generation}",
            metadata={"tenant": row % 3},
        )
        for row in range(n)
    ]


def queries(n: int = 64) -> list[str]:
    """Queries of some words each."""
    rng = random.Random(11)
    return [f"{' '.join(rng.choices(_VOCABULARY, k=4))} {CANARY}?" for _ in range(n)]


def profile_for(retriever: HybridRetriever, *, k: int | None = None) -> Profile:
    """A profile of this system: a policy of its own for every route, or one ``k`` for all."""
    fused = retriever.with_fusion(Fusion("convex", weight=0.5))
    return Profile(
        routes={
            route: RouteProfile(policy=policy if k is None else RatioPolicy(k=k), score_kind=kind)
            for route, (policy, kind) in POLICIES.items()
        },
        fusion=fused.fusion,
        fingerprint=fused.fingerprint(),
        provenance=Provenance(
            ctxguard_version="0", seed=0, dataset="chaos", dataset_digest="0", depth=100
        ),
    )


class Recorder(logging.Handler):
    """Keeps every line of the log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@dataclass
class Scene:
    """One process that serves.

    Attributes:
        folder: Where the store and its counts are kept.
        size: Of the row.
        passages: What is searched; None for the usual corpus.
        deadlines: Of the search.
        reranker: None for none.
        capacity: Of the sampler's queue.
        interval_seconds: Of the writer.
        exit_seconds: Of the writer.
        clock: Seconds since the epoch, for the store.
        registry: What metrics are read from.
        guard_settings: Of the guard, beside those above.
    """

    folder: Path
    size: Size
    passages: list[Passage] | None = None
    retriever: HybridRetriever | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    reranker: Reranker | None = None
    privacy: Privacy = DEFAULT_PRIVACY
    capacity: int = 10_000
    interval_seconds: float = 0.02
    exit_seconds: float = 10.0
    clock: Callable[[], float] = time.time
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    guard_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = Recorder()
        logging.getLogger("ctxguard").addHandler(self.log)
        logging.getLogger("ctxguard").propagate = False
        logging.getLogger("ctxguard").setLevel(logging.INFO)
        self.tally = Tally()
        self.queries = queries()
        self.embedder = embedder_for(self.size)
        if self.retriever is None:
            self.retriever = HybridRetriever.build(
                corpus() if self.passages is None else self.passages, embedder=self.embedder
            )
        if self.reranker is not None:
            self.retriever = self.retriever.with_reranker(self.reranker, rerank_depth=20)
        self.lexical = Switch()
        self._switch_lexical()
        self.profile = profile_for(self.retriever)
        self.retriever = self.retriever.with_deadlines(self.deadlines)
        url = f"sqlite:///{self.folder / 'samples.db'}"
        self.store = SampleStore.open(
            url, limits=Limits(reserve_bytes=RESERVE_BYTES), clock=self.clock
        )
        self.sampler = Sampler(
            1.0, capacity=self.capacity, counts_folder=self.folder / "samples.db.counts"
        )
        self.writer = SampleWriter(
            self.sampler,
            self.store,
            privacy=self.privacy,
            interval_seconds=self.interval_seconds,
            exit_seconds=self.exit_seconds,
        )
        self.writer.start()
        self.telemetry = Telemetry(self.registry)
        settings = {"profile": self.profile, "strict": True, **self.guard_settings}
        self.guard = ContextGuard(
            self.retriever, sampler=self.sampler, telemetry=self.telemetry, **settings
        )
        # Compiled and loaded before anything goes wrong, as in a server that was warmed up.
        self.retriever.warm_up()

    def _switch_lexical(self) -> None:
        assert self.retriever is not None
        lexical: Any = self.retriever._live.index.lexical
        words = lexical.words
        lexical.words = lambda query: self.lexical(lambda: words(query))

    @property
    def dense(self) -> Switch:
        """The switch of the dense leg."""
        return self.embedder.switch

    def ask(self, number: int, *, guard: ContextGuard | None = None) -> Context | None:
        """One request from plain code; None where it raised."""
        return self.noted(
            lambda: (guard or self.guard).retrieve(self.queries[number % len(self.queries)])
        )

    def noted(self, call: Callable[[], Context]) -> Context | None:
        """What a call answered, noted in the tally; None where it raised."""
        started = time.perf_counter()
        try:
            context = call()
        except Exception as error:
            self.tally.raised(error, time.perf_counter() - started)
            return None
        self.tally.answered(context, time.perf_counter() - started)
        return context

    async def aask(self, number: int) -> Context | None:
        """One request from an event loop."""
        started = time.perf_counter()
        try:
            context = await self.guard.aretrieve(self.queries[number % len(self.queries)])
        except Exception as error:
            self.tally.raised(error, time.perf_counter() - started)
            return None
        self.tally.answered(context, time.perf_counter() - started)
        return context

    def serve(self, n: int) -> list[Context | None]:
        """``n`` requests from several threads and, as many again, from an event loop's tasks."""
        with ThreadPoolExecutor(_CLIENTS) as clients:
            answers = list(clients.map(self.ask, range(n)))

        async def client(first: int) -> list[Context | None]:
            return [await self.aask(number) for number in range(first, n, _CLIENTS)]

        async def clients_of_a_loop() -> None:
            for some in await asyncio.gather(*[client(first) for first in range(_CLIENTS)]):
                answers.extend(some)

        asyncio.run(clients_of_a_loop())
        return answers

    def n(self, small: int, full: int) -> int:
        """A number by size."""
        return small if self.size is Size.SMALL else full

    def balanced(self) -> Books:
        """The accounts of this process, once its writer has stopped."""
        self.writer.stop()
        return balance(
            self.tally,
            counted(self.registry),
            self.writer.accounts(),
            self.store.stored_count(self.sampler.worker_id),
        )

    def finish(
        self, observed: str, checks: dict[str, bool], *others: Books, rows: int | None = None
    ) -> Seen:
        """End serving, and see that everything adds up and nothing was given away.

        Args:
            observed: In words.
            checks: What was to be, and whether it was.
            others: Books of other processes on the same store.
            rows: Samples that the store holds in all; None for those of the books.
        """
        books = (self.balanced(), *others)
        stored = sum(one.stored_rows for one in books) if rows is None else rows
        checks = {
            **checks,
            "the store holds what was stored": sum(self.store.states().values()) == stored,
            "no log quotes a query or a passage": CANARY not in "\n".join(self.log.lines),
            "the metrics can be scraped and quote nothing": CANARY.encode()
            not in generate_latest(self.registry),
        }
        return Seen(observed, checks, books)

    def decided_by_its_route(self, context: Context) -> bool:
        """Whether an answer was decided by the policy made for the stages that answered."""
        expected = self.profile.routes[context.route].policy
        unusual = {"profile_mismatch", "route_uncalibrated", "uncalibrated"} & set(context.flags)
        return context.decision.policy == expected and not unusual


def all_of(answers: Sequence[Context | None]) -> list[Context]:
    """Those that are answers."""
    return [answer for answer in answers if answer is not None]


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Wait for something to come about; whether it did."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def in_background(work: Callable[[], object]) -> threading.Thread:
    """A daemon thread that works."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def most(found: dict[str, int]) -> str:
    """Counts in words."""
    return ", ".join([f"{name} {n:,}" for name, n in sorted(found.items())]) or "none"
