"""The process that serves while a fault occurs: index, retriever, profile, guard, sampler, store.

All of them are real. A leg can be made to fail, and at the smaller size the vectors are of hashes
of words instead of the bundled model.
"""

import asyncio
import io
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from accounting import CallerCounts, ProcessAccounts, compare, in_sums, read_metrics
from prometheus_client import generate_latest
from pydantic import TypeAdapter

from ctxguard.core.context import Context
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route, ScoreKind
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile, RouteProfile
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.protocols import Reranker
from tests.counted import Counted
from tests.doubles import Fault, FaultyEmbedder
from tests.profiles import profile_with

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

_ACCOUNTS = TypeAdapter(ProcessAccounts)
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


Cause = Callable[[Path, Size], Report]
"""Causes a fault in this process, with a folder of its own."""

FAULTS: dict[str, tuple[str, Cause]] = {}
"""By name, the effect that a fault should have, and what causes it."""


def fault(name: str, effect: str) -> Callable[[Cause], Cause]:
    def add(cause: Cause) -> Cause:
        FAULTS[name] = effect, cause
        return cause

    return add


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
    routes = {
        route: RouteProfile(policy=policy if k is None else RatioPolicy(k=k), score_kind=kind)
        for route, (policy, kind) in POLICIES.items()
    }
    return profile_with(routes, fusion=fused.fusion, fingerprint=fused.fingerprint())


@dataclass
class ServingProcess:
    """A guard with everything around it, its callers, and their accounts.

    The folder holds the store; a retriever searches in place of one over `corpus`.
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
        self._log, log = io.StringIO(), logging.getLogger("ctxguard")
        log.addHandler(logging.StreamHandler(self._log))
        log.propagate = False
        log.setLevel(logging.INFO)
        self.callers = CallerCounts()
        self.queries = queries()
        self.embedder = embedder_for(self.size)
        if self.retriever is None:
            self.retriever = HybridRetriever.build(corpus(), embedder=self.embedder)
        if self.reranker is not None:
            self.retriever = self.retriever.with_reranker(self.reranker, rerank_depth=20)
        # In place, unlike `FaultyRetriever`: a loaded retriever keeps its folder.
        self.lexical = Fault.of(self.retriever.generation.lexical, "search")
        self.profile = profile_for(self.retriever)
        self.retriever = self.retriever.with_deadlines(self.deadlines)
        url = f"sqlite:///{self.folder / 'samples.db'}"
        self.store = SampleStore.open(url, clock=self.clock)
        self.sampler = Sampler(1.0, capacity=10_000)
        self.writer = SampleWriter(
            self.sampler, self.store, interval_seconds=0.02, exit_seconds=self.exit_seconds
        )
        self.writer.start()
        self.counted = Counted()
        self.guard = ContextGuard(
            self.retriever,
            profile=self.profile,
            check=ProfileCheck(strict=True),
            sampler=self.sampler,
            telemetry=self.counted.telemetry,
            **self.guard_settings,
        )
        # As in a server: the model is loaded before the fault.
        self.retriever.warm_up()

    @property
    def dense(self) -> Fault:
        """The fault of the dense leg."""
        return self.embedder.fault

    @property
    def log(self) -> str:
        """All that was logged."""
        return self._log.getvalue()

    def request(self, number: int) -> Context | None:
        """Answer a query, and count it for its caller; None where the guard raised."""
        with self.callers.counting() as answers:
            answers[0] = self.guard.retrieve(self.queries[number % len(self.queries)])
        return answers[0]

    async def arequest(self, number: int) -> Context | None:
        """`request` from an event loop."""
        with self.callers.counting() as answers:
            answers[0] = await self.guard.aretrieve(self.queries[number % len(self.queries)])
        return answers[0]

    def comes_to_answer_by(self, route: Route) -> bool:
        """Request until an answer is of this route; False where none ever is."""
        return until(lambda: (one := self.request(0)) is not None and one.route is route)

    def serve(self, n: int) -> list[Context]:
        """Make ``n`` requests from threads, then ``n`` from the tasks of an event loop.

        Returns:
            The contexts of those that got one.
        """
        with ThreadPoolExecutor(_CLIENTS) as clients:
            answers = list(clients.map(self.request, range(n)))

        async def client(first: int) -> None:
            answers.extend([await self.arequest(number) for number in range(first, n, _CLIENTS)])

        async def clients_of_a_loop() -> None:
            await asyncio.gather(*[client(first) for first in range(_CLIENTS)])

        asyncio.run(clients_of_a_loop())
        return [context for context in answers if context is not None]

    def by_size(self, small: int, full: int) -> int:
        """The number for this size."""
        return small if self.size is Size.SMALL else full

    def fork(self, work: Callable[[], object]) -> Callable[[], ProcessAccounts | None]:
        """Fork; the child works, stops its writer and tells its accounts.

        Returns:
            Waits for the child's accounts; None where it failed, or hung and was killed.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._work_as_child(work, writing)
        os.close(writing)

        def accounts() -> ProcessAccounts | None:
            if not until(lambda: os.waitpid(pid, os.WNOHANG)[0] != 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            with os.fdopen(reading, "rb") as pipe:
                said = pipe.read()
            return _ACCOUNTS.validate_json(said) if said else None

        return accounts

    def _work_as_child(self, work: Callable[[], object], writing: int) -> None:
        status = 1
        try:
            before = read_metrics(self.counted)
            self.callers = CallerCounts()
            work()
            self.writer.stop()
            samples, metrics = self.writer.accounts(), read_metrics(self.counted) - before
            waiting = samples.pending
            accounts = compare(self.callers, metrics, samples, samples.stored, waiting=waiting)
            os.write(writing, _ACCOUNTS.dump_json(accounts))
            status = 0
        finally:
            os._exit(status)

    def finish(
        self,
        observed: str,
        checks: dict[str, bool],
        *others: ProcessAccounts | None,
        may_fail: bool = False,
    ) -> Report:
        """Stop serving, and check that the accounts add up and no text has leaked.

        Others are the accounts of processes on the same store, None of one that failed.
        """
        self.writer.stop()
        rows = self.store.accounts(worker_id=self.sampler.worker_id).stored
        own = compare(self.callers, read_metrics(self.counted), self.writer.accounts(), rows)
        processes = [own, *[one for one in others if one is not None]]
        stored = sum(one.stored_rows for one in processes)
        checks = {
            **checks,
            "every process ends by itself": None not in others,
            "every request is answered": may_fail or not self.callers.errors,
            "the store holds what was stored": sum(self.store.states().values()) == stored,
            "no log quotes a query or a passage": CANARY not in self.log,
            "the metrics can be scraped and quote nothing": CANARY.encode()
            not in generate_latest(self.counted.registry),
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


def in_words(counts: dict[str, int]) -> str:
    """Counts by name, as text."""
    return ", ".join([f"{name} {n:,}" for name, n in sorted(counts.items())]) or "none"
