"""Calibrate on judged traffic: from live samples back to a profile.

The unit is a request of the traffic. Of the judged requests those are used whose whole pool was
judged, since an unjudged candidate would count as irrelevant; each weighs 1/π, where π is the
probability that it was sampled, judged, and its pool judged in full. Requests that ask the same
question are one query, which weighs as much as all of them, so that no split divides them. A
person's grade of a passage replaces the judge's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import log
from typing import TYPE_CHECKING

import numpy as np

from calibration.asking import RecordedAnswers
from calibration.calibrate import Calibration, Passes, calibrate, provenance
from calibration.calibrate_route import Settings, spare_share
from calibration.data.dataset import Dataset, DistractorKind, Query, folded
from calibration.evaluate import per_query
from calibration.pool_labels import labelled_part
from calibration.results import COMPARED, Results, tabulate
from calibration.retrievers import RecordedRankings
from calibration.weights import effective_number
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_K, FloatArray, Mode, Ranking, Route
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.monitor.estimation.full_judged_pools import (
    IN_PART,
    NEVER_WHOLE,
    JudgedPool,
    judged_pools,
)
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import HashSampler
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.profile.schema import Profile, RouteProfile

if TYPE_CHECKING:
    from ctxguard.monitor.store import SampleStore

_DRAWN = HashSampler("question")

_MORE_WHOLE_POOLS = 0.5
"""The share of whole pools whose effect is said where pools were judged in part."""

_FEW_QUESTIONS = 0.1
"""It is said where so few of the questions make up half of the traffic."""


@dataclass(frozen=True)
class JudgedTraffic:
    """Judged requests that calibration can use.

    Attributes:
        dataset: What they ask, each question once, with the verdicts on one of its requests as
            labels. Its weight is that of all its requests, in units of the heaviest question.
        rankings: What was retrieved, by query text.
        route: The stages that answered all of them.
        requests: How many they are.
        effective_requests: How many of equal probability would give as precise a mean, had each
            asked its own question (Kish).
        effective_questions: The same of questions: how many of equal weight.
        left_out: How many judged requests were not used, by reason in words.
        serving_k: How many passages the first k were, of those that no policy cut; None where
            every request was served by a policy.
        depth: The most candidates of a request.
    """

    dataset: Dataset
    rankings: Mapping[str, Ranking]
    route: Route
    requests: int
    effective_requests: float
    effective_questions: float
    left_out: Mapping[str, int]
    serving_k: int | None
    depth: int


def judged_traffic(
    store: "SampleStore", series: str, *, route: Route | None = None
) -> JudgedTraffic:
    """Gather the requests of a store whose whole pool was judged.

    Args:
        store: The samples.
        series: The series of judgments, as the store names it.
        route: The stages that answered; the commonest unless given.

    Raises:
        CalibrationError: no request can be used.
    """
    left_out: Counter[str] = Counter()
    samples: list[JudgedPool] = []
    in_part: list[SampleRecord] = []
    for pool in judged_pools(store, series):
        if not pool.unusable:
            samples.append(pool)
            continue
        left_out[pool.unusable] += 1
        if pool.unusable in {IN_PART, NEVER_WHOLE}:
            in_part.append(pool.record)
    samples.sort(key=lambda sample: sample.sample_id, reverse=True)
    if route is None and samples:
        route = Counter(sample.record.route for sample in samples).most_common(1)[0][0]
    by_question: dict[str, list[JudgedPool]] = {}
    for sample in samples:
        if sample.record.route is route:
            by_question.setdefault(folded(sample.text), []).append(sample)
        else:
            left_out[f"of another route ({sample.record.route.value})"] += 1
    if not by_question or route is None:
        on_route = "" if route is None else f" for route {route.value}"
        reasons = "; ".join([f"{n:,} {reason}" for reason, n in left_out.items()])
        raise CalibrationError(
            f"no judged request can be calibrated on{on_route}: "
            + "; ".join([reasons or "none is judged", *_more_whole_pools(in_part)])
        )
    questions = [_question(asked) for asked in by_question.values()]
    used = [sample.weight for asked in by_question.values() for sample in asked]
    totals = np.array([question.weight for question in questions])
    weights = totals / totals.max()
    effective = (effective_number(np.array(used)), effective_number(weights))
    in_all = (
        f"{len(used):,} judged requests ask {len(questions):,} questions. A question weighs as "
        "much as its requests, each by 1 / the probability that it was used, and has the answer "
        f"and verdicts of one of them: in all like {effective[0]:,.0f} requests and "
        f"{effective[1]:,.0f} questions of equal weight"
    )
    graded = (
        f"the labels are the grades of judge {series!r}, or of people where they graded: where the "
        "judge errs, a certificate is about its grades"
    )
    notes = (
        in_all,
        *_dominance(weights),
        graded,
        *[f"{n:,} judged requests are left out: {why}" for why, n in left_out.items()],
        *_more_whole_pools(in_part),
    )
    bare = [
        len(sample.record.served)
        for sample in chain(*by_question.values())
        if sample.record.mode is not Mode.ENFORCE or sample.record.profile_id is None
    ]
    return JudgedTraffic(
        _dataset(series, questions, weights, notes),
        {question.text: question.record.ranking() for question in questions},
        route,
        len(used),
        *effective,
        left_out,
        max(bare, default=None),
        max(len(question.record.passage_ids) for question in questions),
    )


def _dataset(
    series: str, questions: Sequence[JudgedPool], weights: FloatArray, notes: tuple[str, ...]
) -> Dataset:
    qrels: dict[str, dict[str, int]] = {}
    distractors: dict[str, dict[str, DistractorKind]] = {}
    for question in questions:
        labels = question.labels.items()
        if grades := {name: verdict.grade for name, verdict in labels if verdict.judged}:
            qrels[question.query_id] = grades
        distractors[question.query_id] = {
            name: verdict.negative.value for name, verdict in labels if verdict.negative is not None
        }
    queries = [
        Query(question.query_id, question.text, weight=weight)
        for question, weight in zip(questions, weights.tolist(), strict=True)
    ]
    return Dataset(f"judged traffic ({series})", tuple(queries), qrels, distractors, notes=notes)


def _question(asked: list[JudgedPool]) -> JudgedPool:
    """Return one of the requests that ask a question, newest first, with the weight of all.

    It is drawn by weight (Efraimidis and Spirakis, Information Processing Letters 97(5), 2006).
    The latest would not do: where verdicts on one question differ, those on requests that were
    served nothing relevant are the likelier to be here. What people said of any holds of all.
    """

    def key(sample: JudgedPool) -> float:
        return log(1.0 - _DRAWN.uniform(sample.record.request_id)) / sample.weight

    by_people: dict[str, Judgment] = {}
    for sample in reversed(asked):
        by_people.update(sample.by_people)
    drawn = max(asked, key=key)
    known = {name: by_people.get(name, verdict) for name, verdict in drawn.labels.items()}
    return replace(drawn, labels=known, weight=sum([sample.weight for sample in asked]))


def _more_whole_pools(in_part: list[SampleRecord]) -> Iterable[str]:
    """Say what to set so that more pools are judged in full, and what it gives and costs."""
    if in_part:
        highest = max(record.rates.full_pool_rate for record in in_part)
        rate = _MORE_WHOLE_POOLS if highest < _MORE_WHOLE_POOLS else 1.0
        more = np.mean([len(record.dropped) for record in in_part])
        yield (
            f"where requests are sampled, sample_to(…, rates=JudgingRates(full_pool_rate={rate:g}))"
            f" would make about {rate * len(in_part):,.0f} of {len(in_part):,} such requests "
            f"usable, each for {more:.0f} dropped passages to judge"
        )


def _dominance(weights: FloatArray) -> Iterable[str]:
    """Say what it means that few questions make up much of the traffic, where they do."""
    shares = np.sort(weights)[::-1].cumsum() / weights.sum()
    few = int(np.searchsorted(shares, 0.5)) + 1
    if few < _FEW_QUESTIONS * weights.size:
        yield (
            f"{few:,} of {weights.size:,} questions are {shares[few - 1]:.0%} of the traffic. All "
            f"weigh as much as {weights.sum():.0f} of the most frequent: a bound rests on about so "
            "many, less those that choose"
        )


def served_today(
    traffic: JudgedTraffic,
    *,
    fusion: Fusion,
    fingerprint: Mapping[str, str],
    corpus_sketch: CorpusSketch | None = None,
) -> Profile:
    """Make the profile of what is served where there is none: the first k, to recalibrate.

    Args:
        traffic: From ``judged_traffic``.
        fusion: How the legs of the retriever that answered are fused.
        fingerprint: What identifies that system; empty where nothing does.
        corpus_sketch: Of the corpus that it searches.
    """
    first_k = RatioPolicy(k=DEFAULT_K if traffic.serving_k is None else traffic.serving_k)
    ranking = next(iter(traffic.rankings.values()))
    route = RouteProfile(policy=first_k, score_kind=ranking.kind, safe_policy=first_k)
    return Profile(
        routes={traffic.route: route},
        fusion=fusion,
        fingerprint=dict(fingerprint),
        corpus=corpus_sketch,
        provenance=provenance(traffic.dataset, Settings(depth=traffic.depth), {}, fingerprint),
    )


@dataclass(frozen=True)
class Recalibration:
    """A recalibrated profile beside the one in force.

    Attributes:
        profile: The profile in force with one route replaced.
        calibration: The calibration of that route.
        results: The policies ``old`` and ``new`` on the held-out queries.
        held_out: How many questions are held out.
    """

    profile: Profile
    calibration: Calibration
    results: Results
    held_out: int


def recalibrate(
    traffic: JudgedTraffic,
    profile: Profile,
    settings: Settings,
    passes: Passes | None = None,
    corpus_sketch: CorpusSketch | None = None,
) -> Recalibration:
    """Choose a policy on one part of judged traffic, and compare it with the old on the other.

    Nothing is put in force: a person decides whether to use the new profile.

    Args:
        traffic: From ``judged_traffic``.
        profile: The profile in force, or ``served_today`` where there is none; it must have a
            policy for the route of the traffic.
        settings: How to choose; some queries must be held out. The serving k and the depth are
            those of the profile in force.
        corpus_sketch: Of the corpus that the traffic was answered from; None for that of the
            profile in force.

    Raises:
        ConfigurationError: the settings hold nothing out.
        CalibrationError: the profile has no policy for the route, the labels do not support a
            choice, or no query would be held out.
    """
    if settings.held_out == 0.0:
        raise ConfigurationError(
            "no query would be held out with held_out 0: old and new are compared on queries held "
            "out, so give a share above 0"
        )
    answerable = len(traffic.dataset.answerable)
    share = spare_share(answerable) if settings.held_out is None else settings.held_out
    if share == 0.0:
        raise CalibrationError(
            f"no query would be held out of {answerable} that have a "
            "relevant passage: old and new are compared on queries held out, so judge more "
            "traffic or give a share to hold out"
        )
    settings = settings.model_copy(update={"held_out": share})
    route = traffic.route
    before = profile.routes.get(route)
    if before is None:
        raise CalibrationError(
            f"the profile in force has no policy for route {route.value}, which answered; "
            f"it has {', '.join(sorted(each.value for each in profile.routes))}"
        )
    if isinstance(before.safe_policy, RatioPolicy):
        # What was served when the profile was made, which the guard falls back to.
        settings = settings.model_copy(update={"serving_k": before.safe_policy.k})
    settings = settings.model_copy(update={"depth": profile.provenance.depth})
    calibration = calibrate(
        RecordedRankings(traffic.rankings),
        traffic.dataset,
        settings,
        fusion=profile.fusion,
        fingerprint=profile.fingerprint,
        passes=passes,
        asking=None
        if before.assessor is None
        else RecordedAnswers(traffic.rankings, before.assessor).asking(before.assessor.price),
    )
    after = calibration.profile.routes[route]
    held_out = traffic.dataset.subset(()) if calibration.held_out is None else calibration.held_out
    part = labelled_part(
        calibration.pools[route],
        traffic.dataset,
        held_out,
        settings.utilities,
        baseline_k=settings.serving_k,
    )
    measured_policies = {
        name: per_query(*part, policy)
        for name, policy in (("old", before.policy), ("new", after.policy))
    }
    note = f"route {route.value} was calibrated from judged traffic"
    if profile.routes.keys() != {route}:
        note = note.replace("was calibrated", "was recalibrated")
        note += f"; the others are those of profile {profile.profile_id}"
    made = calibration.profile.provenance
    return Recalibration(
        profile=profile.model_copy(
            update={
                "routes": {**profile.routes, route: after},
                "corpus": profile.corpus if corpus_sketch is None else corpus_sketch,
                "provenance": made.model_copy(update={"notes": (*made.notes, note)}),
            }
        ),
        calibration=calibration,
        results=tabulate(measured_policies, COMPARED, seed=settings.seed),
        held_out=len(part[0]),
    )
