"""What filtering costs a request: ctxguard beside its peers and a floor in plain Python.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.overhead --json overhead.json --check

Results are ready-made and nothing is encoded or searched: what is timed is what stands between a
retriever and the model. Everyone keeps at most 10 of n candidates, those with at least 0.6 of the
best score, in one process and one thread, whose processor time is taken. The guard runs as it would
in service: metrics in a registry, 5% of requests sampled, the queue drained between turns. First
stands the guard as calibration makes it for an index, with its peers beside it.

``over bare`` is a case's median less that of its own stub retriever called by itself.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks._filter_peers import Case, Pool, Results, langchain, llama_index
from benchmarks._timing import Timing, environment, interleaved
from ctxguard.core.decision import decide
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import TRANSFORMS, feature_names, named_features
from ctxguard.core.types import Hit, Leg, Ranking, Route, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.sampling.sampler import Sampler

SUMMARY = "What filtering costs a request: ctxguard beside its peers and a floor in plain Python."
K = 10
MIN_RATIO = 0.6
SAMPLING_RATE = 0.05
WORDS_PER_PASSAGE = 100
BAR_SIZE = 100
"""Candidates at which the bars hold."""

PACKAGES = (
    "ctxguard-rag",
    "numpy",
    "prometheus-client",
    "langchain-core",
    "langchain-classic",
    "llama-index-core",
)
NOT_INSTALLED = "not installed (pip install -r benchmarks/requirements.txt)"

FLOOR = "floor: plain Python"
FLOOR_SHUFFLED = "floor: plain Python, shuffled"
DECIDE = "decide, ratio"
DECIDE_SHUFFLED = "decide, ratio, shuffled"
GUARD = "guard, ratio, Ranking"
GUARD_HITS = "guard, ratio, hits"
GUARD_UTILITY = "guard, expected_utility"
GUARD_SIGNALS = "guard, expected_utility, signals"
COMPRESSION = "LangChain ContextualCompressionRetriever, scores given"
CUT = "LlamaIndex SimilarityPostprocessor"

FIRST = (GUARD_SIGNALS, GUARD_UTILITY, GUARD, GUARD_HITS, CUT, COMPRESSION)
"""The order of the table: the default, then each peer beside what does its work."""


def keep(scores: Sequence[float]) -> list[int]:
    """The floor: the same filter with one check of the scores, and nothing on record."""
    if not math.isfinite(sum(scores)):
        raise ValueError("a score is not finite")
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:K]
    least = MIN_RATIO * scores[best[0]]
    while scores[best[-1]] < least:
        best.pop()
    return best


def make_pool(n: int, seed: int) -> Pool:
    """Two lists of n results out of 1.5 n passages, with scores like BM25's and cosines."""
    rng = random.Random(seed)
    rows = range(n + n // 2)
    words = [f"word{number}" for number in range(4000)]
    scores = {
        "lexical": sorted([rng.gammavariate(2.0, 4.0) for _ in range(n)], reverse=True),
        "dense": sorted([rng.betavariate(5.0, 3.0) for _ in range(n)], reverse=True),
    }
    return Pool(
        ids=[f"passage-{row:06d}" for row in rows],
        texts=[" ".join(rng.choices(words, k=WORDS_PER_PASSAGE)) for _ in rows],
        lexical=Results(rng.sample(rows, n), scores["lexical"]),
        dense=Results(rng.sample(rows, n), scores["dense"]),
        k=K,
        min_ratio=MIN_RATIO,
    )


def relevance_model(
    legs: Sequence[str], signals: Sequence[str] = (), clip: float | None = None
) -> RelevanceModel:
    """Coefficients of a plausible size; what they are changes nothing in the time."""
    named = named_features(signals)
    names = feature_names(legs, named)
    return RelevanceModel(
        legs=tuple(sorted(legs)),
        coefficients=tuple([0.0 if name.endswith("log_rank") else 0.5 for name in names]),
        means=(0.0,) * len(names),
        scales=(1.0,) * len(names),
        intercept=-2.0,
        features=named,
        clip=clip,
    )


def our_cases(pool: Pool, seed: int) -> tuple[dict[str, Case], list[Sampler]]:
    """ctxguard's cases on one pool, and the samplers of their guards."""
    hits = [
        Hit(pool.ids[row], score, pool.texts[row])
        for row, score in zip(pool.lexical.rows, pool.lexical.scores, strict=True)
    ]
    shuffle = random.Random(seed).sample(range(len(hits)), len(hits))
    shuffled_hits = [hits[at] for at in shuffle]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO, Route.LEXICAL)
    shuffled = Ranking.from_hits(shuffled_hits, ScoreKind.RATIO, Route.LEXICAL)
    # Every candidate's scores in both legs, as the embedded retriever gives them.
    dense_scores = np.random.default_rng(seed).permutation(pool.dense.scores)
    both_legs = replace(
        ranking,
        route=Route.HYBRID,
        legs={
            "lexical": Leg(np.array(pool.lexical.scores), ScoreKind.RATIO),
            "dense": Leg(dense_scores, ScoreKind.COSINE),
        },
    )
    ratio = RatioPolicy(k=K, min_ratio=MIN_RATIO)
    utility = ExpectedUtilityPolicy(relevance_model(tuple(both_legs.legs)), k=K)
    rng = np.random.default_rng(seed)
    everything = replace(both_legs, signals={name: rng.random(len(hits)) for name in TRANSFORMS})
    pooled = relevance_model(tuple(everything.legs), tuple(TRANSFORMS), clip=8.0)
    samplers: list[Sampler] = []

    def guarded(
        results: Callable[[], Ranking | list[Hit]],
        policy: Policy = ratio,
    ) -> Case:
        def stub(query: str, *, depth: int) -> Ranking | list[Hit]:  # noqa: ARG001
            return results()

        samplers.append(Sampler(SAMPLING_RATE))
        guard = ContextGuard(
            stub,
            policy=policy,
            score_kind=ScoreKind.RATIO,
            sampler=samplers[-1],
            telemetry=Telemetry(CollectorRegistry()),
        )
        return Case(lambda: guard.retrieve("query"), lambda: stub("query", depth=guard.depth))

    best = [pool.ids[pool.lexical.rows[at]] for at in keep(pool.lexical.scores)]
    for each in (ranking, shuffled):
        assert list(decide(each, ratio).kept_ids) == best
    return {
        FLOOR: Case(partial(keep, pool.lexical.scores)),
        FLOOR_SHUFFLED: Case(partial(keep, [pool.lexical.scores[at] for at in shuffle])),
        DECIDE: Case(lambda: decide(ranking, ratio)),
        DECIDE_SHUFFLED: Case(lambda: decide(shuffled, ratio)),
        "decide, expected_utility": Case(lambda: decide(both_legs, utility)),
        GUARD: guarded(lambda: ranking),
        GUARD_HITS: guarded(lambda: list(hits)),
        GUARD_UTILITY: guarded(lambda: both_legs, utility),
        GUARD_SIGNALS: guarded(lambda: everything, ExpectedUtilityPolicy(pooled, k=K)),
    }, samplers


def peer_cases(pool: Pool) -> tuple[dict[str, Case], list[str]]:
    """The cases of the peers that are installed, and the names of the others."""
    cases: dict[str, Case] = {}
    absent = []
    for package, build in (
        ("langchain-classic", partial(langchain, pool, keep)),
        ("llama-index-core", partial(llama_index, pool)),
    ):
        try:
            cases |= build()
        except ImportError:
            absent.append(package)
    return cases, absent


@dataclass(frozen=True)
class Row:
    """What was measured of one case, in microseconds.

    Attributes:
        timing: Of the whole call.
        bare_p50: Median of its stub retriever by itself, 0 where it has none.
    """

    timing: Timing
    bare_p50: float = 0.0

    @property
    def over_bare(self) -> float:
        """What the case adds to its retriever, at the median."""
        return self.timing.p50 - self.bare_p50

    @property
    def quickest_over_bare(self) -> float:
        """The same in its quickest round."""
        return self.timing.lowest_p50 - self.bare_p50


def measure(
    n: int, *, rounds: int, calls: int, seconds: float, seed: int
) -> tuple[dict[str, Row], list[str]]:
    """Every case on n candidates, and the peers that are not installed."""
    pool = make_pool(n, seed)
    cases, samplers = our_cases(pool, seed)
    theirs, absent = peer_cases(pool)
    cases |= theirs
    cases = {name: cases[name] for name in (*FIRST, *cases) if name in cases}

    def drain() -> None:
        for sampler in samplers:
            sampler.drain(sampler.capacity)

    timings = interleaved(
        {name: case.call for name, case in cases.items()}
        | {f"{name} (bare)": case.bare for name, case in cases.items() if case.bare is not None},
        rounds=rounds,
        calls=calls,
        seconds=seconds,
        seed=seed,
        between=drain,
        clock=time.thread_time_ns,
    )
    rows = {
        name: Row(timings[name], timings[f"{name} (bare)"].p50 if case.bare is not None else 0.0)
        for name, case in cases.items()
    }
    return rows, absent


@dataclass(frozen=True)
class Bar:
    """A promise at 100 candidates.

    Attributes:
        measured: None where the peer is not installed.
        limit: The most that ``measured`` may be.
        quickest: The same of the quickest rounds, which says whether a busy machine is the
            reason; None where only a ratio is promised.
    """

    promise: str
    measured: float | None
    limit: float
    quickest: float | None = None

    @property
    def missed(self) -> bool:
        """Whether it was measured and is over the limit."""
        return self.measured is not None and self.measured > self.limit


def bars(rows: Mapping[str, Row]) -> dict[str, Bar]:
    """Every bar by its name; of several forms of a case the worst counts."""
    p50 = {name: row.timing.p50 for name, row in rows.items()}
    guards = [rows[GUARD], rows[GUARD_HITS]]

    def share_of(peer: str, *ours: str) -> float | None:
        return max(p50[case] for case in ours) / p50[peer] if peer in p50 else None

    return {
        "decide": Bar(
            "decide, ratio: µs at p50, sorted and shuffled",
            max(p50[DECIDE], p50[DECIDE_SHUFFLED]),
            20.0,
            max(rows[name].timing.lowest_p50 for name in (DECIDE, DECIDE_SHUFFLED)),
        ),
        "floor": Bar(
            "decide, ratio, to the plain floor at p50, sorted and shuffled",
            max(p50[DECIDE] / p50[FLOOR], p50[DECIDE_SHUFFLED] / p50[FLOOR_SHUFFLED]),
            4.0,
        ),
        "guard": Bar(
            "guard, ratio: µs over the bare retriever at p50, Ranking and hits",
            max(guard.over_bare for guard in guards),
            50.0,
            max(guard.quickest_over_bare for guard in guards),
        ),
        "tail": Bar(
            "guard, ratio: µs at p99, Ranking and hits",
            max(guard.timing.p99 for guard in guards),
            250.0,
        ),
        "utility": Bar(
            "guard, expected_utility: µs over the bare retriever at p50",
            rows[GUARD_UTILITY].over_bare,
            150.0,
            rows[GUARD_UTILITY].quickest_over_bare,
        ),
        "langchain": Bar(
            "guard, ratio, to ContextualCompressionRetriever at p50",
            share_of(COMPRESSION, GUARD, GUARD_HITS),
            1.0,
        ),
        "ratio": Bar(
            "guard, ratio, Ranking, to LlamaIndex's SimilarityPostprocessor at p50",
            share_of(CUT, GUARD),
            1.1,
        ),
        "signals": Bar(
            "guard, P of signals, to LlamaIndex's SimilarityPostprocessor at p50",
            share_of(CUT, GUARD_SIGNALS),
            2.2,
        ),
    }


BARS = (
    "decide",
    "floor",
    "guard",
    "tail",
    "utility",
    "langchain",
    "ratio",
    "signals",
)


def table(n: int, rows: Mapping[str, Row], absent: Sequence[str]) -> Table:
    """One size's figures, for people."""
    result = Table(title=f"{n} candidates, µs per call", title_justify="left")
    result.add_column("case", no_wrap=True)
    for column in ("p50", "p99", "min", "p50 by round", "over bare", "× floor"):
        result.add_column(column, justify="right", no_wrap=True)
    floor = rows[FLOOR].timing.p50
    for name, row in rows.items():
        timing = row.timing
        result.add_row(
            name,
            f"{timing.p50:.1f}",
            f"{timing.p99:.1f}",
            f"{timing.minimum:.1f}",
            f"{timing.lowest_p50:.1f} to {timing.highest_p50:.1f}",
            f"{row.over_bare:.1f}",
            f"{timing.p50 / floor:.1f}",
        )
    for package in absent:
        result.add_row(f"{package}: {NOT_INSTALLED}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a bar that was checked is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=SUMMARY)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 100, 1000], metavar="N")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000, help="in each round (default 1000)")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of a case in a round at most (default 0.3)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument(
        "--check",
        nargs="*",
        choices=BARS,
        metavar="BAR",
        help=f"exit with 1 where a bar is missed: all, or some of {', '.join(BARS)}",
    )
    options = parser.parse_args(arguments)
    if min(*options.sizes, options.rounds, options.calls) < 1 or options.seconds <= 0.0:
        parser.error("--sizes, --rounds, --calls and --seconds must be positive")
    if options.check is not None and BAR_SIZE not in options.sizes:
        parser.error(f"the bars hold at {BAR_SIZE} candidates: add it to --sizes")
    console = Console(width=144, highlight=False)
    report: dict[str, Any] = {
        "environment": environment(PACKAGES),
        "k": K,
        "min_ratio": MIN_RATIO,
        "sampling_rate": SAMPLING_RATE,
        "rounds": options.rounds,
        "calls": options.calls,
        "seed": options.seed,
        "sizes": {},
    }
    console.print_json(data=report["environment"])
    missed: list[str] = []
    for n in options.sizes:
        rows, absent = measure(
            n,
            rounds=options.rounds,
            calls=options.calls,
            seconds=options.seconds,
            seed=options.seed,
        )
        console.print(table(n, rows, absent))
        report["sizes"][n] = {
            name: asdict(row.timing) | {"over_bare": row.over_bare} for name, row in rows.items()
        }
        if n == BAR_SIZE:
            found = bars(rows)
            report["bars"] = {
                name: asdict(bar) | {"missed": bar.missed} for name, bar in found.items()
            }
            for name, bar in found.items():
                console.print(_in_words(name, bar))
            checked = () if options.check is None else options.check or BARS
            missed = [name for name in checked if found[name].missed]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


def _in_words(name: str, bar: Bar) -> str:
    if bar.measured is None:
        return f"not measured  {name}: {bar.promise}; {NOT_INSTALLED}"
    verdict = "MISSED" if bar.missed else "met"
    quickest = "" if bar.quickest is None else f" (quickest round {bar.quickest:.3g})"
    return (
        f"{verdict:<13} {name}: {bar.promise}: {bar.measured:.3g}{quickest}, at most {bar.limit:g}"
    )


if __name__ == "__main__":
    sys.exit(main())
