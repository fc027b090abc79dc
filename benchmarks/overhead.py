"""Time what filtering costs a request: ctxguard beside its peers and a floor in plain Python.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.overhead --json overhead.json --check

Results are ready-made and nothing is encoded or searched: what is timed is what stands between a
retriever and the model. Everyone keeps at most 10 of n candidates, those with at least 0.6 of the
best score, in one process and one thread, whose processor time is taken. The guard runs as it would
in service: metrics in a registry, 5% of requests sampled, the queue drained between turns. First
stands the guard as calibration makes it for an index, with its peers beside it.

``over bare`` is a case's median less that of its own stub retriever called by itself.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._timing import Call, Timing, environment, interleaved
from ctxguard.core.decision import decide
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import TRANSFORMS, feature_names, named_features
from ctxguard.core.types import FloatArray, Hit, Leg, Ranking, Route, ScoreKind
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.sampling.sampler import Sampler

K = 10
MIN_RATIO = 0.6
SAMPLING_RATE = 0.05
WORDS_PER_PASSAGE = 100
BAR_SIZE = 100
"""Candidates at which the bars hold."""

PACKAGES = (
    *("ctxguard-rag", "numpy", "prometheus-client"),
    *("langchain-core", "langchain-classic", "llama-index-core"),
)

FLOOR, FLOOR_SHUFFLED = "floor: plain Python", "floor: plain Python, shuffled"
DECIDE, DECIDE_SHUFFLED = "decide, ratio", "decide, ratio, shuffled"
GUARD, GUARD_HITS = "guard, ratio, Ranking", "guard, ratio, hits"
GUARD_UTILITY = "guard, expected_utility"
GUARD_SIGNALS = "guard, expected_utility, signals"
COMPRESSION = "LangChain ContextualCompressionRetriever, scores given"
CUT = "LlamaIndex SimilarityPostprocessor"

FIRST = (GUARD_SIGNALS, GUARD_UTILITY, GUARD, GUARD_HITS, CUT, COMPRESSION)
"""The order of the table: the default, then each peer beside what does its work."""


class Case(NamedTuple):
    """One timed call.

    Attributes:
        call: The whole of what a request would do, the stub retriever included.
        bare: The stub retriever by itself; None where the call has none.
    """

    call: Call
    bare: Call | None = None


Pool = tuple[list[Hit], FloatArray]
"""A retriever's hits with scores like BM25's, best first, and cosines of the same passages."""


def keep(scores: Sequence[float]) -> list[int]:
    """Filter as the guard does, with one check of the scores and nothing on record: the floor."""
    if not math.isfinite(sum(scores)):
        raise ValueError("a score is not finite")
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:K]
    least = MIN_RATIO * scores[best[0]]
    while scores[best[-1]] < least:
        best.pop()
    return best


def make_pool(n: int, seed: int) -> Pool:
    """Draw n hits and their cosines."""
    rng = random.Random(seed)
    words = [f"word{number}" for number in range(4000)]
    scores = sorted([rng.gammavariate(2.0, 4.0) for _ in range(n)], reverse=True)
    hits = [
        Hit(f"passage-{row:06d}", score, " ".join(rng.choices(words, k=WORDS_PER_PASSAGE)))
        for row, score in enumerate(scores)
    ]
    return hits, np.array([rng.betavariate(5.0, 3.0) for _ in range(n)])


def relevance_model(
    legs: Sequence[str], signals: Sequence[str] = (), clip: float | None = None
) -> RelevanceModel:
    """Make a model with coefficients of a plausible size, which do not change the time."""
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
    """Make ctxguard's cases on one pool, and return them with the samplers of their guards."""
    hits, cosines = pool
    scores = [float(hit.score or 0.0) for hit in hits]
    shuffle = random.Random(seed).sample(range(len(hits)), len(hits))
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO, Route.LEXICAL)
    shuffled = Ranking.from_hits([hits[at] for at in shuffle], ScoreKind.RATIO, Route.LEXICAL)
    # Every candidate's scores in both legs, as the embedded retriever gives them.
    both_legs = replace(
        ranking,
        route=Route.HYBRID,
        legs={
            "lexical": Leg(np.array(scores), ScoreKind.RATIO),
            "dense": Leg(cosines, ScoreKind.COSINE),
        },
    )
    ratio = RatioPolicy(k=K, min_ratio=MIN_RATIO)
    utility = ExpectedUtilityPolicy(relevance_model(tuple(both_legs.legs)), k=K)
    rng = np.random.default_rng(seed)
    everything = replace(both_legs, signals={name: rng.random(len(hits)) for name in TRANSFORMS})
    pooled = relevance_model(tuple(everything.legs), tuple(TRANSFORMS), clip=8.0)
    samplers: list[Sampler] = []

    def guarded(results: Callable[[], Ranking | list[Hit]], policy: Policy = ratio) -> Case:
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

    best = [hits[at].passage_id for at in keep(scores)]
    assert all(list(decide(each, ratio).kept_ids) == best for each in (ranking, shuffled))
    return {
        FLOOR: Case(partial(keep, scores)),
        FLOOR_SHUFFLED: Case(partial(keep, [scores[at] for at in shuffle])),
        DECIDE: Case(lambda: decide(ranking, ratio)),
        DECIDE_SHUFFLED: Case(lambda: decide(shuffled, ratio)),
        "decide, expected_utility": Case(lambda: decide(both_legs, utility)),
        GUARD: guarded(lambda: ranking),
        GUARD_HITS: guarded(lambda: list(hits)),
        GUARD_UTILITY: guarded(lambda: both_legs, utility),
        GUARD_SIGNALS: guarded(lambda: everything, ExpectedUtilityPolicy(pooled, k=K)),
    }, samplers


def langchain(hits: Sequence[Hit]) -> dict[str, Case]:
    """Make the case of ContextualCompressionRetriever, whose compressor calls `keep`.

    Raises:
        ImportError: it is not installed.
    """
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.retrievers import BaseRetriever

    class Stub(BaseRetriever):  # type: ignore[misc]
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:  # noqa: ARG002
            return list(documents)

    class GivenScores(BaseDocumentCompressor):  # type: ignore[misc]
        def compress_documents(
            self,
            documents: Sequence[Document],
            query: str,  # noqa: ARG002
            callbacks: Any = None,  # noqa: ARG002
        ) -> list[Document]:
            return [documents[at] for at in keep([each.metadata["score"] for each in documents])]

    documents = [
        Document(hit.text, metadata={"id": hit.passage_id, "score": hit.score}) for hit in hits
    ]
    stub = Stub()
    compression = ContextualCompressionRetriever(base_retriever=stub, base_compressor=GivenScores())
    return {COMPRESSION: Case(lambda: compression.invoke("query"), lambda: stub.invoke("query"))}


def llama_index(hits: Sequence[Hit]) -> dict[str, Case]:
    """Make the case of SimilarityPostprocessor, whose cut-off is absolute.

    Raises:
        ImportError: it is not installed.
    """
    from llama_index.core.postprocessor import SimilarityPostprocessor
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [
        NodeWithScore(node=TextNode(text=hit.text, id_=hit.passage_id), score=hit.score)
        for hit in hits
    ]
    cut = SimilarityPostprocessor(similarity_cutoff=MIN_RATIO * float(hits[0].score or 0.0))
    return {CUT: Case(lambda: cut.postprocess_nodes(nodes))}


Row = tuple[Timing, float]
"""The timing of a whole call, and the median of its stub retriever alone (0 without one), in µs."""


def over_bare(row: Row) -> float:
    """Return what a case adds to its retriever at the median, in microseconds."""
    return row[0].p50 - row[1]


def measure(n: int, *, rounds: int, calls: int, seconds: float, seed: int) -> dict[str, Row]:
    """Time every case on n candidates, and the peers that are installed."""
    pool = make_pool(n, seed)
    cases, samplers = our_cases(pool, seed)
    for peer in (langchain, llama_index):
        try:
            cases |= peer(pool[0])
        except ImportError as error:
            CONSOLE.print(f"left out: {error} (pip install -r benchmarks/requirements.txt)")
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
    return {
        name: (timings[name], timings[f"{name} (bare)"].p50 if case.bare is not None else 0.0)
        for name, case in cases.items()
    }


def bars(rows: Mapping[str, Row]) -> dict[str, tuple[str, float, float]]:
    """Return every bar that could be measured: its words, the figure, and the most it may be.

    Of several forms of a case the worst counts.
    """
    p50 = {name: timing.p50 for name, (timing, _) in rows.items()}
    floor = max(p50[DECIDE] / p50[FLOOR], p50[DECIDE_SHUFFLED] / p50[FLOOR_SHUFFLED])
    guards = [rows[GUARD], rows[GUARD_HITS]]
    found = {
        "decide": ("µs of decide, ratio", max(p50[DECIDE], p50[DECIDE_SHUFFLED]), 20.0),
        "floor": ("decide, ratio, to the plain floor", floor, 4.0),
        "guard": ("µs of guard, ratio, over its retriever", max(map(over_bare, guards)), 50.0),
        "tail": ("µs of guard, ratio, at p99", max(timing.p99 for timing, _ in guards), 250.0),
        "utility": ("µs of expected_utility", over_bare(rows[GUARD_UTILITY]), 150.0),
    }
    for name, ours, peer, most in (
        ("langchain", (GUARD, GUARD_HITS), COMPRESSION, 1.0),
        ("ratio", (GUARD,), CUT, 1.1),
        ("signals", (GUARD_SIGNALS,), CUT, 2.2),
    ):
        if peer in p50:
            share = max(p50[each] for each in ours) / p50[peer]
            found[name] = (f"{ours[0]}, to {peer}", share, most)
    return found


def show(n: int, rows: Mapping[str, Row]) -> None:
    """Print one size's figures."""
    columns = ("p50", "p99", "min", "p50 by round", "over bare", "× floor")
    table = figures(f"{n} candidates, µs per call", ("case",), columns)
    for name, (timing, bare) in rows.items():
        times = [f"{each:.1f}" for each in (timing.p50, timing.p99, timing.minimum)]
        spread = f"{timing.lowest_p50:.1f} to {timing.highest_p50:.1f}"
        floors = f"{timing.p50 / rows[FLOOR][0].p50:.1f}"
        table.add_row(name, *times, spread, f"{timing.p50 - bare:.1f}", floors)
    CONSOLE.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Time what filtering costs a request.", seed=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, BAR_SIZE, 1000], metavar="N")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000, help="in each round (default 1000)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a case in a round at most")
    options = parser.parse_args(arguments)
    if min(*options.sizes, options.rounds, options.calls) < 1 or options.seconds <= 0.0:
        parser.error("--sizes, --rounds, --calls and --seconds must be positive")
    if options.check and BAR_SIZE not in options.sizes:
        parser.error(f"the bars hold at {BAR_SIZE} candidates: add it to --sizes")
    how = {name: getattr(options, name) for name in ("rounds", "calls", "seconds", "seed")}
    report: dict[str, Any] = {"environment": environment(PACKAGES), **how, "sizes": {}}
    missed: list[str] = []
    for n in options.sizes:
        rows = measure(n, **how)
        show(n, rows)
        report["sizes"][n] = {
            name: asdict(row[0]) | {"over_bare": over_bare(row)} for name, row in rows.items()
        }
        if n == BAR_SIZE:
            found = bars(rows)
            report["bars"] = {
                name: {"promise": words, "measured": measured, "limit": most}
                for name, (words, measured, most) in found.items()
            }
            missed = [
                f"{name}: {words}: {measured:.3g}, at most {most:g}"
                for name, (words, measured, most) in found.items()
                if measured > most
            ]
    return ended(options, report, missed)


if __name__ == "__main__":
    sys.exit(main())
