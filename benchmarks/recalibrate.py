"""Simulate how often a recalibrated bound is false over requests, where few questions are popular.

    python -m benchmarks.recalibrate --repeats 1000 --through-store 100 --json results.json

The losses of a simulated population of questions are known, and so is each question's share of the
traffic. Each repeat draws n requests, samples them at unequal probabilities, as a rate limit does,
and deals the questions out by halves. The bound comes from one half; it is false if the mean loss
over the requests of the population exceeds it.

Traffic:
    12 hard questions   60% of the requests ask 12 questions of large loss, the others one of 5,000
    12 of any kind      the same, with losses like the others'
    one hard question   30% of the requests ask a single question of large loss
    Zipf                shares fall as 1 / rank, and the popular half is harder
    even                5,000 questions are asked equally often

With ``--through-store`` the first is also served by a guard, sampled under a rate limit, stored,
judged and recalibrated, and the certificate is compared with the policy's loss over the population.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.from_traffic import JudgedTraffic, judged_traffic, recalibrate
from calibration.pool_labels import IntArray, label
from calibration.replay import replay
from calibration.retrievers import RecordedRankings
from calibration.risk import betting_upper_bound
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Hit, Leg, Ranking, Route, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Certificate, Profile, Provenance, RouteProfile
from ctxguard.request.telemetry import Telemetry

SUMMARY = "Simulate how often a recalibrated bound is false over requests."
DELTA = 0.1
QUESTIONS = 5_000
STORED_QUESTIONS = 600
THROUGH_STORE_REQUESTS = (300, 1_000)
POPULAR = 12
POPULAR_SHARE = 0.6
QUIET, BUSY = 1.0, 0.2
"""Probabilities of being sampled, in quiet hours and in busy ones."""

DEPTH, SERVED = 20, 5
IN_FORCE = Profile(
    routes={Route.HYBRID: RouteProfile(policy=RatioPolicy(k=3), score_kind=ScoreKind.RATIO)},
    provenance=Provenance(
        ctxguard_version="", seed=0, dataset="none", dataset_digest="", depth=DEPTH
    ),
)
RATES = JudgingRates(
    dropped_rate=0.0, full_pool_rate=0.5, full_pool_rate_if_no_hit=1.0, baseline_rate=0.0
)
REQUESTS_PER_SECOND, SAMPLES_PER_SECOND = 10.0, 8.0


@dataclass(frozen=True)
class Traffic:
    """A population of questions.

    Attributes:
        shares: Shape (n_questions,), of all requests.
        losses: Shape (n_questions,), what a policy loses on each, in [0, 1].
        busy: Shape (n_questions,), the share of each one's requests that comes in busy hours.
    """

    shares: FloatArray
    losses: FloatArray
    busy: FloatArray

    @property
    def truth(self) -> float:
        """The mean loss over requests."""
        return float(self.shares @ self.losses)


@dataclass(frozen=True)
class Outcome:
    """One method over all repeats of one traffic at one n.

    Attributes:
        false: Share of repeats in which the truth exceeds the bound.
        false_difference: The same of the bound on the difference in recall; None where there is
            none.
        certified: Share of repeats whose bound is below 0.5.
        bound, truth: Their means.
        questions: Mean number of questions that the bound is from.
    """

    traffic: str
    method: str
    n: int
    repeats: int
    false: float
    false_difference: float | None
    certified: float
    bound: float
    truth: float
    questions: float


def _like_others(n: int, rng: np.random.Generator) -> FloatArray:
    """One question in ten loses something."""
    return np.where(rng.random(n) < 0.1, rng.beta(2.0, 2.0, n), 0.0)


def _with_popular(shares: FloatArray, losses: FloatArray, rng: np.random.Generator) -> Traffic:
    """Some popular questions, asked mostly in busy hours, before many that are asked rarely."""
    rest = np.full(QUESTIONS, (1.0 - shares.sum()) / QUESTIONS)
    return Traffic(
        np.concatenate([shares, rest]),
        np.concatenate([losses, _like_others(QUESTIONS, rng)]),
        np.concatenate([np.full(shares.size, 0.8), np.full(QUESTIONS, 0.4)]),
    )


def _zipf(rng: np.random.Generator) -> Traffic:
    shares = 1.0 / np.arange(1, QUESTIONS + 1)
    harder = np.where(np.arange(QUESTIONS) < QUESTIONS / 2, 3, 1)
    losses = np.max([_like_others(QUESTIONS, rng) for _ in range(3)], axis=0)
    losses = np.where(harder == 3, losses, _like_others(QUESTIONS, rng))
    return Traffic(shares / shares.sum(), losses, np.full(QUESTIONS, 0.5))


_EACH = np.full(POPULAR, POPULAR_SHARE / POPULAR)
TRAFFIC: Mapping[str, Callable[[np.random.Generator], Traffic]] = {
    "12 hard questions": lambda rng: _with_popular(_EACH, rng.beta(3.0, 3.0, POPULAR), rng),
    "12 of any kind": lambda rng: _with_popular(_EACH, _like_others(POPULAR, rng), rng),
    "one hard question": lambda rng: _with_popular(np.array([0.3]), np.array([0.6]), rng),
    "Zipf": _zipf,
    "even": lambda rng: _with_popular(np.empty(0), np.empty(0), rng),
}


def weighed(traffic: Traffic, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """The questions that the sampled of n requests ask, and the weight of each: the sum of 1/π."""
    asked = rng.choice(traffic.shares.size, n, p=traffic.shares)
    probability = np.where(rng.random(n) < traffic.busy[asked], BUSY, QUIET)
    taken = rng.random(n) < probability
    questions, place = np.unique(asked[taken], return_inverse=True)
    return questions, np.bincount(place, 1.0 / probability[taken]).astype(np.float64)


def level(name: str, n: int, repeats: int, seed: int) -> list[Outcome]:
    """Bounds of a policy that is fixed, by questions weighted and by distinct questions."""
    rng = np.random.default_rng([seed, n, list(TRAFFIC).index(name)])
    rows: dict[str, list[tuple[float, float, float]]] = {"requests": [], "distinct questions": []}
    for _ in range(repeats):
        traffic = TRAFFIC[name](rng)
        questions, weights = weighed(traffic, n, rng)
        tested = rng.permutation(questions.size)[questions.size // 2 :]
        losses = traffic.losses[questions[tested]]
        # In units of the heaviest of all questions, on whichever side it falls.
        by_requests = betting_upper_bound(losses, DELTA, weights[tested] / weights.max())
        by_questions = betting_upper_bound(losses, DELTA)
        rows["requests"].append((by_requests, traffic.truth, tested.size))
        rows["distinct questions"].append((by_questions, traffic.truth, tested.size))
    return [_outcome(name, method, n, np.array(own)) for method, own in rows.items()]


def _outcome(name: str, method: str, n: int, rows: FloatArray) -> Outcome:
    """Of rows of bound, truth and questions; and of the difference's bound and truth, if any."""
    bound, truth, questions, *difference = rows.T
    return Outcome(
        traffic=name,
        method=method,
        n=n,
        repeats=len(rows),
        false=float((truth > bound).mean()),
        false_difference=float((difference[1] < difference[0]).mean()) if difference else None,
        certified=float((bound < 0.5).mean()),
        bound=float(bound.mean()),
        truth=float(truth.mean()),
        questions=float(questions.mean()),
    )


class _World:
    """A retriever and its population of questions, whose relevant candidates are known."""

    def __init__(self, rng: np.random.Generator) -> None:
        rankings, qrels, queries = {}, {}, []
        n = POPULAR + STORED_QUESTIONS
        rest = np.full(STORED_QUESTIONS, (1.0 - POPULAR_SHARE) / STORED_QUESTIONS)
        self.shares = np.concatenate([_EACH, rest])
        for number in range(n):
            query_id, text = f"q{number}", f"question {number}"
            relevant = np.zeros(DEPTH, dtype=bool)
            relevant[rng.choice(DEPTH, 2, replace=False)] = True
            # Of a hard question the relevant candidates score like others.
            gap = 0.05 if number < POPULAR else 0.5
            dense, lexical = (
                np.clip(rng.normal(np.where(relevant, 0.3 + gap, 0.3), 0.12), 0.0, 1.0)
                for _ in range(2)
            )
            order = np.argsort(-(dense + lexical), kind="stable")
            fused = (dense + lexical) / 2.0
            hits = [Hit(f"{query_id}-{place}", float(fused[place])) for place in order]
            ranking = Ranking.from_hits(hits, ScoreKind.RATIO, Route.HYBRID)
            legs = {
                "dense": Leg(dense[order], ScoreKind.COSINE),
                "lexical": Leg(10.0 * lexical[order], ScoreKind.RATIO),
            }
            rankings[text] = replace(ranking, legs=legs)
            queries.append(Query(query_id, text, weight=float(self.shares[number] / _EACH[0])))
            qrels[query_id] = {
                f"{query_id}-{place}": int(relevant[place]) for place in range(DEPTH)
            }
        self.retriever = RecordedRankings(rankings)
        self.dataset = Dataset("population", tuple(queries), qrels)
        self.pools = replay(self.retriever, self.dataset.queries, depth=DEPTH)
        self.labels = label(self.pools, self.dataset, baseline_k=SERVED)
        self.texts = [query.text for query in queries]

    def traffic(self, n: int, rng: np.random.Generator) -> JudgedTraffic:
        """n requests: served, sampled under a rate limit, stored and judged."""
        now = 0.0
        sampler = Sampler(1.0, max_per_second=SAMPLES_PER_SECOND, clock=lambda: now)
        store = SampleStore.open("sqlite://", clock=lambda: now)
        writer = SampleWriter(sampler, store, rates=RATES)
        guard = ContextGuard(
            self.retriever,
            k=3,
            depth=DEPTH,
            sampler=sampler,
            telemetry=Telemetry(CollectorRegistry()),
        )
        for place, asked in enumerate(rng.choice(len(self.texts), n, p=self.shares).tolist()):
            # Popular questions are asked in bursts, when the limit lowers the probability.
            now += float(rng.exponential(1.0 / REQUESTS_PER_SECOND)) * (
                0.5 if asked < POPULAR else 2.0
            )
            guard.retrieve(self.texts[asked], request_id=f"{rng.integers(2**62)}-{place}")
        writer.flush()
        truth = {query.text: self.dataset.qrels[query.query_id] for query in self.dataset.queries}
        monitor = Monitor(store, LabelJudge(truth), clock=lambda: now)
        while monitor.step():
            pass
        try:
            return judged_traffic(store, "labels 1")
        finally:
            store.close()

    def truths(self, profile: Profile) -> tuple[float, float]:
        """Mean recall loss of a profile's policy over the population, and difference in recall."""
        policy = profile.routes[Route.HYBRID].policy
        found = per_query(self.pools, self.labels, policy)
        today = self.labels.recall_of_all()[1]
        difference = found.values["recall"] - today
        loss = found.values["recall_loss"]
        return _mean(loss, self.shares), _mean(difference, self.shares)


def _mean(values: FloatArray, shares: FloatArray) -> float:
    known = ~np.isnan(values)
    return float(values[known] @ shares[known] / shares[known].sum())


def through_store(n: int, repeats: int, seed: int) -> list[Outcome]:
    """The certificate of ``recalibrate`` from a store, by requests and by distinct questions."""
    rows: dict[str, list[tuple[float, ...]]] = {"requests": [], "distinct questions": []}
    for repeat in range(repeats):
        rng = np.random.default_rng([seed, n, repeat])
        world = _World(rng)
        traffic = world.traffic(n, rng)
        equal = replace(
            traffic.dataset,
            queries=tuple([replace(query, weight=1.0) for query in traffic.dataset.queries]),
        )
        settings = Settings(depth=DEPTH, serving_k=SERVED, held_out=0.5, seed=repeat)
        for method, dataset in (("requests", traffic.dataset), ("distinct questions", equal)):
            profile = recalibrate(replace(traffic, dataset=dataset), IN_FORCE, settings).profile
            certificate = profile.routes[Route.HYBRID].certificate
            rows[method].append(_row(certificate, *world.truths(profile)))
    return [
        _outcome("12 hard, through the store", method, n, np.array(own))
        for method, own in rows.items()
    ]


def _row(certificate: Certificate | None, loss: float, difference: float) -> tuple[float, ...]:
    """Without a certificate nothing is claimed: a loss of at most 1."""
    if certificate is None or certificate.recall_difference is None:
        return 1.0, loss, 0.0, -1.0, difference
    return (
        certificate.alpha,
        loss,
        certificate.n_recall,
        certificate.recall_difference.lower,
        difference,
    )


def is_kept(outcome: Outcome) -> bool:
    """Whether bounds are false in at most delta of repeats, within two Monte Carlo errors."""
    most = DELTA + 2.0 * sqrt(DELTA * (1.0 - DELTA) / outcome.repeats)
    return max(outcome.false, outcome.false_difference or 0.0) <= most


def table(outcomes: Sequence[Outcome]) -> Table:
    """The outcomes as a table."""
    result = Table(title=f"delta {DELTA}: bounds are false in at most {DELTA:.0%} of repeats")
    for name in ("traffic", "n", "method"):
        result.add_column(name, no_wrap=True)
    for name in ("false", "below 0.5", "bound", "truth", "questions"):
        result.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        false = f"{outcome.false:.3f}"
        if outcome.false_difference is not None:
            false += f" / {outcome.false_difference:.3f}"
        result.add_row(
            outcome.traffic,
            f"{outcome.n:,}",
            outcome.method,
            false,
            f"{outcome.certified:.2f}",
            f"{outcome.bound:.3f}",
            f"{outcome.truth:.3f}",
            f"{outcome.questions:.0f}",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 if a bound over requests is false too often."""
    parser = argparse.ArgumentParser(prog="benchmarks.recalibrate", description=SUMMARY)
    parser.add_argument("--repeats", type=int, default=1000, help="repeats per n (default 1000)")
    parser.add_argument(
        "--through-store", type=int, default=0, metavar="N", help="repeats through the store"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[300, 1000, 3000], metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    outcomes = [
        outcome
        for n in options.requests
        for name in (TRAFFIC if options.repeats else ())
        for outcome in level(name, n, options.repeats, options.seed)
    ]
    if options.through_store:
        for n in THROUGH_STORE_REQUESTS:
            outcomes += through_store(n, options.through_store, options.seed)
    broken = [one for one in outcomes if one.method == "requests" and not is_kept(one)]
    seconds = time.perf_counter() - start
    console = Console(width=120)
    console.print(table(outcomes))
    console.print(
        f"{seconds:.0f} s. Bounds over requests false in at most delta of repeats, within two "
        f"Monte Carlo errors: {'no' if broken else 'yes'}."
    )
    if options.json is not None:
        results = {
            "delta": DELTA,
            "popular": POPULAR,
            "popular_share": POPULAR_SHARE,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "guarantee_kept": not broken,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
