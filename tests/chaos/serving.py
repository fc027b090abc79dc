"""The process that serves while a fault occurs: index, retriever, profile, guard, sampler, store.

All of them are real. A leg can be made to fail, and at the smaller size the vectors are of hashes
of words instead of the bundled model.
"""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from accounting import CallerCounts, ProcessAccounts, compare, in_sums, read_metrics
from prometheus_client import CollectorRegistry, generate_latest

from ctxguard.core.context import Context
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile, Provenance, RouteProfile
from ctxguard.resilience import Deadlines
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.protocols import Reranker
from tests.doubles import Fault, FaultyEmbedder

PATIENCE_SECONDS = 300.0
"""Ends what hangs; nothing is timed by it."""

CANARY = "canaryword"
"""In every query and passage, and in no log and no metric."""

POLICIES = {
    Route.HYBRID_RERANK: (RatioPolicy(k=6, min_ratio=0.01), ScoreKind.LOGIT),
    Route.HYBRID: (RatioPolicy(k=5, min_ratio=0.3), ScoreKind.RATIO),
    Route.LEXICAL: (RatioPolicy(k=4, min_ratio=0.3), ScoreKind.RATIO),
    Route.DENSE: (RatioPolicy(k=3, min_ratio=0.1, temperature=0.1), ScoreKind.COSINE),
}
"""A different policy for each route, so that an answer shows which of them decided."""

_VOCABULARY = [f"word{n}" for n in range(400)]
_CLIENTS = 4


class Size(StrEnum):
    """How much of everything there is."""

    SMALL = "small"
    """For continuous integration: seconds each, no model."""
    FULL = "full"


@dataclass(frozen=True)
class Report:
    """The effect of a fault.

    Attributes:
        observed: The effect in words.
        wrong: Checks that failed and accounts that do not add up; empty if it passed.
        accounts: The sums of requests, candidates and samples, in words.
    """

    observed: str
    wrong: tuple[str, ...]
    accounts: str = ""

    @classmethod
    def of(
        cls, observed: str, checks: dict[str, bool], processes: Sequence[ProcessAccounts] = ()
    ) -> "Report":
        """Collect what did not hold, and the accounts of every process that took part."""
        wrong = [what for what, held in checks.items() if not held]
        wrong += [each for one in processes for each in one.wrong]
        return cls(observed, tuple(wrong), in_sums(processes))


def embedder_for(size: Size) -> FaultyEmbedder:
    """The bundled model, or hashes of words; its queries can be made to fail."""
    return FaultyEmbedder(None if size is Size.SMALL else SentenceTransformerEmbedder())


def corpus(n: int = 200, *, generation: str = "g0") -> list[Passage]:
    """Passages that share words; the last word of each names the generation."""
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
    """A profile of this system: `POLICIES`, or top ``k`` on every route."""
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
class ServingProcess:
    """A guard with everything around it, its callers, and their accounts.

    Attributes:
        folder: Holds the store.
        size: How large the corpus, the model and the traffic are.
        retriever: Searches in place of one over `corpus`; None for that one.
        deadlines: The deadlines of a search.
        reranker: Reranks the candidates; None for no reranking.
        exit_seconds: How long the writer may go on when the process ends.
        clock: Seconds since the epoch, for the store.
        guard_settings: Further arguments of the guard.
    """

    folder: Path
    size: Size
    retriever: HybridRetriever | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    reranker: Reranker | None = None
    exit_seconds: float = PATIENCE_SECONDS
    clock: Callable[[], float] = time.time
    guard_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log, log = Recorder(), logging.getLogger("ctxguard")
        log.addHandler(self.log)
        log.propagate = False
        log.setLevel(logging.INFO)
        self.callers = CallerCounts()
        self.queries = queries()
        self.embedder = embedder_for(self.size)
        if self.retriever is None:
            self.retriever = HybridRetriever.build(corpus(), embedder=self.embedder)
        if self.reranker is not None:
            self.retriever = self.retriever.with_reranker(self.reranker, rerank_depth=20)
        self.lexical = self._faulty_lexical_leg()
        self.profile = profile_for(self.retriever)
        self.retriever = self.retriever.with_deadlines(self.deadlines)
        url = f"sqlite:///{self.folder / 'samples.db'}"
        self.store = SampleStore.open(url, clock=self.clock)
        self.sampler = Sampler(1.0, capacity=10_000)
        self.writer = SampleWriter(
            self.sampler, self.store, interval_seconds=0.02, exit_seconds=self.exit_seconds
        )
        self.writer.start()
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(self.registry, all_metrics=True)
        self.guard = ContextGuard(
            self.retriever,
            profile=self.profile,
            check=ProfileCheck(strict=True),
            sampler=self.sampler,
            telemetry=self.telemetry,
            **self.guard_settings,
        )
        # As in a server: the model is loaded before the fault.
        self.retriever.warm_up()

    def _faulty_lexical_leg(self) -> Fault:
        """Make the lexical leg of the index that answers now one that can be made to fail.

        In place, unlike `FaultyRetriever`: a loaded retriever keeps its folder.
        """
        assert self.retriever is not None
        fault, lexical = Fault(), cast(Any, self.retriever.generation.lexical)
        search = lexical.search
        lexical.search = lambda *asked: fault.run(lambda: search(*asked))
        return fault

    @property
    def dense(self) -> Fault:
        """The fault of the dense leg."""
        return self.embedder.fault

    @contextmanager
    def _counted(self) -> Iterator[list[Context]]:
        """Count for its caller what the block answers, or that it raised."""
        started, answers = time.perf_counter(), list[Context]()
        try:
            yield answers
        except Exception as error:
            self.callers.raised(error, time.perf_counter() - started)
        else:
            self.callers.answered(answers[0], time.perf_counter() - started)

    def request(self, number: int) -> Context | None:
        """Answer a query, and count it for its caller; None where the guard raised."""
        with self._counted() as answers:
            answers.append(self.guard.retrieve(self.queries[number % len(self.queries)]))
        return answers[0] if answers else None

    async def arequest(self, number: int) -> Context | None:
        """`request` from an event loop."""
        with self._counted() as answers:
            answers.append(await self.guard.aretrieve(self.queries[number % len(self.queries)]))
        return answers[0] if answers else None

    def comes_to_answer_by(self, route: Route) -> bool:
        """Request until an answer is of this route; False where none ever is."""
        return until(lambda: routes_of(answered([self.request(0)])) == {route})

    def serve(self, n: int) -> list[Context | None]:
        """Make ``n`` requests from threads, then ``n`` from the tasks of an event loop."""
        with ThreadPoolExecutor(_CLIENTS) as clients:
            answers = list(clients.map(self.request, range(n)))

        async def client(first: int) -> list[Context | None]:
            return [await self.arequest(number) for number in range(first, n, _CLIENTS)]

        async def clients_of_a_loop() -> None:
            for some in await asyncio.gather(*[client(first) for first in range(_CLIENTS)]):
                answers.extend(some)

        asyncio.run(clients_of_a_loop())
        return answers

    def by_size(self, small: int, full: int) -> int:
        """The number for this size."""
        return small if self.size is Size.SMALL else full

    def accounts(self) -> ProcessAccounts:
        """Stop the writer, and compare the accounts of this process."""
        self.writer.stop()
        return compare(
            self.callers,
            read_metrics(self.registry),
            self.writer.accounts(),
            self.store.accounts(worker_id=self.sampler.worker_id).stored,
        )

    def finish(
        self,
        observed: str,
        checks: dict[str, bool],
        *others: ProcessAccounts,
        may_fail: bool = False,
    ) -> Report:
        """Stop serving, and check that the accounts add up and no text has leaked.

        Args:
            observed: The effect of the fault in words.
            checks: What must hold, and whether it did.
            others: The accounts of other processes on the same store.
            may_fail: Whether requests may have been refused, or have failed.
        """
        processes = (self.accounts(), *others)
        stored = sum(one.stored_rows for one in processes)
        checks = {
            **checks,
            "every request is answered": may_fail or not self.callers.errors,
            "the store holds what was stored": sum(self.store.states().values()) == stored,
            "no log quotes a query or a passage": CANARY not in "\n".join(self.log.lines),
            "the metrics can be scraped and quote nothing": CANARY.encode()
            not in generate_latest(self.registry),
        }
        return Report.of(observed, checks, processes)

    def decided_by_route(self, *several: Sequence[Context]) -> bool:
        """Whether each answer was decided by the policy made for the stages that answered."""
        unusual = {"profile_mismatch", "route_uncalibrated", "uncalibrated"}
        return all(
            one.decision.policy == self.profile.routes[one.route].policy
            and unusual.isdisjoint(one.flags)
            for contexts in several
            for one in contexts
        )


def answered(contexts: Sequence[Context | None]) -> list[Context]:
    """The contexts of the requests that got one."""
    return [context for context in contexts if context is not None]


def routes_of(*several: Sequence[Context]) -> set[Route]:
    """The routes that answered."""
    return {one.route for contexts in several for one in contexts}


def causes_of(contexts: Sequence[Context]) -> Counter[str]:
    """Why stages were left out of answers, counted."""
    return Counter([failure.kind.value for one in contexts for failure in one.failures])


def seen(contexts: Sequence[Context]) -> str:
    """The routes that answered and the causes, as text."""
    routes = in_words(Counter([one.route.value for one in contexts]))
    return f"route {routes}; {in_words(causes_of(contexts))}"


def until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; False where it never does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def in_background(work: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def in_words(counts: dict[str, int]) -> str:
    """Counts by name, as text."""
    return ", ".join([f"{name} {n:,}" for name, n in sorted(counts.items())]) or "none"
