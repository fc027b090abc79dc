"""Calibrate on judged traffic: from live samples back to a profile.

Only requests whose whole pool was judged are used, and only if the pool was chosen regardless of
what was served: an unjudged candidate would count as irrelevant, and pools judged because nothing
relevant was served would make queries look harder than they are. A person's grade of a passage
replaces the judge's.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calibration.calibrate import Calibration, Passes, calibrate
from calibration.calibrate_route import Settings
from calibration.compare.paired_differences import Difference, differences
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import QueryMetrics, per_query
from calibration.pool_labels import label
from calibration.retrievers import RecordedRankings
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.metrics import Negative
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import Ranking, Route
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.human import human_verdicts
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.profile.schema import Profile

if TYPE_CHECKING:
    from ctxguard.monitor.store import SampleStore


@dataclass(frozen=True)
class JudgedTraffic:
    """Judged requests that calibration can use.

    Attributes:
        dataset: Their queries, each text once, with the verdicts as labels.
        rankings: What was retrieved, by query text.
        route: The stages that answered all of them.
        left_out: How many judged requests were not used, by reason in words.
    """

    dataset: Dataset
    rankings: Mapping[str, Ranking]
    route: Route
    left_out: Mapping[str, int]


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
    samples = _wholly_judged(store, series, left_out)
    if route is None and samples:
        route = Counter(sample.record.route for sample in samples).most_common(1)[0][0]
    by_text: dict[str, _Graded] = {}
    for sample in samples:
        text = str(sample.record.query)
        if sample.record.route is not route:
            left_out[f"of another route ({sample.record.route.value})"] += 1
        elif text in by_text:
            left_out["whose question is already used"] += 1
        else:
            by_text[text] = sample
    if not by_text or route is None:
        on_route = "" if route is None else f" for route {route.value}"
        reasons = "; ".join([f"{n:,} {reason}" for reason, n in left_out.items()])
        raise CalibrationError(
            f"no judged request can be calibrated on{on_route}: {reasons or 'none is judged'}"
        )
    dataset = Dataset(
        name=f"judged traffic ({series})",
        queries=tuple([Query(sample.query_id, text) for text, sample in by_text.items()]),
        qrels={
            sample.query_id: {
                name: verdict.grade for name, verdict in sample.labels.items() if verdict.judged
            }
            for sample in by_text.values()
        },
        distractors={
            sample.query_id: {
                name: verdict.negative.value
                for name, verdict in sample.labels.items()
                if verdict.negative is not None
            }
            for sample in by_text.values()
        },
        notes=tuple([f"{n:,} judged requests are left out: {why}" for why, n in left_out.items()]),
    )
    rankings = {text: sample.record.ranking() for text, sample in by_text.items()}
    return JudgedTraffic(dataset, rankings, route, left_out)


@dataclass(frozen=True)
class _Graded:
    """A sample with a verdict on each of its candidates, by passage id."""

    sample_id: int
    record: SampleRecord
    labels: Mapping[str, Judgment]

    @property
    def query_id(self) -> str:
        return str(self.sample_id)


def _wholly_judged(store: "SampleStore", series: str, left_out: Counter[str]) -> list[_Graded]:
    """The samples whose whole pool has verdicts, newest first."""
    ids = store.judged(series).sample_ids.tolist()
    verdicts = store.verdicts(series, ids)
    by_people = human_verdicts(store.labels())
    samples = []
    for sample_id, payload in sorted(store.payloads(ids).items(), reverse=True):
        record = SampleRecord.from_bytes(payload)
        labels = _read_verdicts(verdicts.get(sample_id, "{}"))
        if sample_id in by_people:
            labels.update(by_people[sample_id].by_passage)
        if record.query is None:
            left_out["without the query's text"] += 1
        elif not record.full_pool and record.rates.dropped_rate < 1.0:
            left_out["whose pool was judged in part (raise full_pool_rate)"] += 1
        elif not _pool(record) <= labels.keys():
            left_out["with passages that have no verdict"] += 1
        else:
            samples.append(_Graded(sample_id, record, labels))
    return samples


def _note(route: Route, before: Profile) -> str:
    return (
        f"route {route.value} was recalibrated from judged traffic; the others are those of "
        f"profile {before.profile_id}"
    )


def _pool(record: SampleRecord) -> set[str]:
    return {record.passage_ids[place] for place in (*record.served, *record.dropped)}


def _read_verdicts(verdicts: str) -> dict[str, Judgment]:
    return {
        passage_id: Judgment(
            passage_id, int(grade), None if negative is None else Negative(negative), *judged
        )
        for passage_id, (grade, negative, *judged) in json.loads(verdicts or "{}").items()
    }


@dataclass(frozen=True)
class Recalibration:
    """A recalibrated profile beside the one in force.

    Attributes:
        profile: The profile in force with one route replaced.
        calibration: The calibration of that route.
        old, new: Metrics of the old and the new policy on the held-out queries.
        differences: By metric, new less old, paired by query.
        held_out: How many queries are held out.
    """

    profile: Profile
    calibration: Calibration
    old: QueryMetrics
    new: QueryMetrics
    differences: Mapping[str, Difference]
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
        profile: The profile in force; it must have a policy for the route of the traffic.
        settings: How to choose; some queries must be held out. The serving k is that of the
            profile in force.
        passes: Reports progress.
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
    if settings.held_out_share(len(traffic.dataset.answerable)) == 0.0:
        raise CalibrationError(
            f"no query would be held out of {len(traffic.dataset.answerable)} that have a "
            "relevant passage: old and new are compared on queries held out, so judge more "
            "traffic or give a share to hold out"
        )
    route = traffic.route
    before = profile.routes.get(route)
    if before is None:
        raise CalibrationError(
            f"the profile in force has no policy for route {route.value}, which answered; "
            f"it has {', '.join(sorted(each.value for each in profile.routes))}"
        )
    if isinstance(before.safe_policy, RatioPolicy):
        # What was served when the profile was made, which the guard falls back to.
        settings = replace(settings, serving_k=before.safe_policy.k)
    calibration = calibrate(
        RecordedRankings(traffic.rankings),
        traffic.dataset,
        settings,
        fusion=profile.fusion,
        fingerprint=profile.fingerprint,
        passes=passes,
    )
    after = calibration.profile.routes[route]
    held_out = () if calibration.held_out is None else calibration.held_out.queries
    pools = calibration.pools[route].subset([query.query_id for query in held_out])
    labels = label(pools, traffic.dataset, baseline_k=settings.serving_k)

    def measured(policy: Policy) -> QueryMetrics:
        return per_query(pools, labels, policy, settings.utilities)

    old, new = measured(before.policy), measured(after.policy)
    return Recalibration(
        profile=profile.model_copy(
            update={
                "routes": {**profile.routes, route: after},
                "corpus": profile.corpus if corpus_sketch is None else corpus_sketch,
                "provenance": calibration.profile.provenance.model_copy(
                    update={
                        "notes": (
                            *calibration.profile.provenance.notes,
                            _note(route, profile),
                        )
                    }
                ),
            }
        ),
        calibration=calibration,
        old=old,
        new=new,
        differences=differences(new, old, seed=settings.seed),
        held_out=len(pools),
    )
