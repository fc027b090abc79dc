"""Sampled traffic in a store: a guard served it, and the truth about every candidate is known."""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from household import write_jsonl
from prometheus_client import CollectorRegistry
from running import Result, Run

from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import Hit, Mode, Route, ScoreKind
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.sampling.record import DEFAULT_PRIVACY, Privacy
from ctxguard.monitor.sampling.sampler import DEFAULT_RATES, JudgingRates
from ctxguard.monitor.store import SampleStore, State
from ctxguard.monitor.store.writer import sample_to
from ctxguard.profile.schema import Certificate, Profile, RouteProfile
from tests.profiles import CERTIFICATE, profile_with

DEPTH = 12
EVERYTHING = JudgingRates(
    dropped_rate=1.0, full_pool_rate=1.0, full_pool_rate_if_no_hit=1.0, baseline_rate=1.0
)
ONLY_SERVED = JudgingRates(
    dropped_rate=0.0, full_pool_rate=0.0, full_pool_rate_if_no_hit=0.0, baseline_rate=0.0
)

BROKEN = RatioPolicy(k=1)
"""Serves the first passage only, where the fifth is the relevant one."""


@dataclass(frozen=True)
class Traffic:
    """What was served to whom.

    Attributes:
        file: Of the store.
        relevant: The relevant candidates by query.
    """

    file: Path
    relevant: Mapping[str, frozenset[str]]

    @property
    def url(self) -> str:
        return f"sqlite:///{self.file}"

    def copied(self, folder: Path) -> "Traffic":
        """The same in a store of its own, for a test that changes it."""
        return replace(self, file=Path(shutil.copy(self.file, folder)))

    def write_labels(self, file: Path) -> Path:
        """The truth, as `--judge labels` reads it."""
        return write_jsonl(
            file,
            (
                {"query_id": query, "query": query, "relevant": sorted(relevant)}
                for query, relevant in self.relevant.items()
            ),
        )


def judge(
    run: Run, traffic: Traffic, *options: object, columns: str = "100", **keys: object
) -> Result:
    """Run `ctxguard monitor --once` with the truth for a judge."""
    labels = traffic.write_labels(traffic.file.with_name("truth.jsonl"))
    return run(
        *("monitor", "--store", traffic.url, "--judge", "labels", "--labels", labels, "--once"),
        *options,
        columns=columns,
        system={"monitor": keys} if keys else None,
    )


def profile_of(policy: Policy, certificate: Certificate | None = CERTIFICATE) -> Profile:
    """A profile of the traffic's retriever, made by hand."""
    return profile_with(
        {
            Route.EXTERNAL: RouteProfile(
                policy=policy,
                score_kind=ScoreKind.COSINE,
                certificate=certificate,
                safe_policy=RatioPolicy(k=10),
            )
        },
        depth=DEPTH,
    )


def serve(
    folder: Path,
    n: int = 60,
    *,
    first: int = 0,
    ids: Callable[[int, int], str] = "d{}-{}".format,
    relevant_ranks: Sequence[int] | None = None,
    misleading: float = 0.0,
    profile: Profile | None = None,
    rates: JudgingRates = DEFAULT_RATES,
    privacy: Privacy = DEFAULT_PRIVACY,
    filters: Sequence[Where | None] = (None,),
    days_ago: float = 0.0,
    mode: Mode | None = None,
    session: str = "",
) -> Traffic:
    """Serve ``n`` requests and sample all of them into ``folder/samples.db``.

    Args:
        first: The number of the first query.
        ids: Of the passages, by the query's number and the rank in the pool.
        relevant_ranks: Which candidates are relevant; at random, mostly the first, unless given.
        misleading: Share of the passages whose text says the opposite of what they are worth.
        profile: What the guard serves by; k = 5 unless given.
        filters: Of the requests, in turn.
        days_ago: When they were answered; alarms wait for the end of the day.
        mode: The guard's.
        session: Ends the ids of the requests, which are the same queries in every session.
    """
    relevant: dict[str, frozenset[str]] = {}
    pools: dict[str, list[Hit]] = {}
    for number in range(first, first + n):
        luck = random.Random(number)
        query = f"which shelf holds tool {number}"
        pools[query], right = [], set()
        for rank in range(DEPTH):
            name = ids(number, rank)
            if relevant_ranks is None:
                is_right = luck.random() < (0.5 if rank < 3 else 0.08)
            else:
                is_right = rank in relevant_ranks
            says_so = is_right != (luck.random() < misleading)
            text = f"{query} is {name}" if says_so else f"nothing of use, {'abcdefghijkl'[rank]}"
            score = 0.9 - 0.05 * rank
            if relevant_ranks is None:
                score = luck.gauss(0.8 if is_right else 0.4, 0.12)
            pools[query].append(Hit(name, score, text=text))
            right |= {name} if is_right else set()
        relevant[query] = frozenset(right)
    writer = sample_to(f"sqlite:///{folder / 'samples.db'}", rate=1.0, rates=rates, privacy=privacy)
    offer = writer.sampler.offer
    writer.sampler.offer = lambda context, probability, now: offer(  # type: ignore[method-assign]
        context, probability, now - days_ago * 86_400.0
    )
    metadata = {"tenant": ["a", "b"], "level": 3}

    def search(query: str, *, depth: int, where: Where | None = None) -> list[Hit]:
        return [replace(hit, metadata=metadata) for hit in pools[query]]

    guard = ContextGuard(
        search,
        profile=profile,
        policy=RatioPolicy(k=5, min_ratio=0.0) if profile is None else None,
        score_kind=ScoreKind.COSINE,
        sampler=writer.sampler,
        mode=mode,
        telemetry=Telemetry(CollectorRegistry()),
    )
    for query, where in zip(pools, cycle(filters), strict=False):
        # Choices hash the ids, and tests should choose the same each time.
        guard.retrieve(query, request_id=query.replace(" ", "-") + session, where=where)
    writer.stop()
    writer.store.close()
    return Traffic(folder / "samples.db", relevant)


def states(traffic: Traffic) -> dict[State, int]:
    """How many samples are in each state that some are in."""
    with SampleStore.open(traffic.url) as store:
        return {state: n for state, n in store.states().items() if n}


def mean_precision(traffic: Traffic) -> float:
    """Of what was served, by the truth."""
    found = []
    with SampleStore.open(traffic.url) as store:
        for record in store.records(range(1, 1 + len(traffic.relevant))).values():
            right = traffic.relevant[str(record.query)]
            served = [record.passage_ids[place] for place in record.served]
            found.append(sum(name in right for name in served) / len(served))
    return sum(found) / len(found)
