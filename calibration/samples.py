"""Judged traffic as calibration data: the loop from live samples back to a profile.

Only requests whose whole pool was judged are used, and only those whose pool was chosen whatever
was served: a candidate that nobody judged would teach that it is irrelevant, and pools that were
judged because nothing relevant was served would teach that queries are hard. Where people have
graded a passage, their word replaces the judge's.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibration.calibrate import Calibration, Passes, calibrate
from calibration.certify import Settings
from calibration.comparing.differences import Difference, differences
from calibration.evaluate import QueryMetrics, per_query
from calibration.labelling.labels import Dataset, Query
from calibration.losses import label
from ctxguard.errors import CalibrationError, ConfigurationError, QueryError
from ctxguard.metrics import Negative
from ctxguard.monitor.labels import HUMAN, resolve
from ctxguard.monitor.records import Record
from ctxguard.policy import Policy
from ctxguard.profile import Profile
from ctxguard.types import DEFAULT_DEPTH, Ranking, Route

if TYPE_CHECKING:
    from ctxguard.monitor.store import LabelRow, SampleStore


class RecordedRankings:
    """What production retrieved for each query, in the place of a retriever.

    Args:
        rankings: By query text.
    """

    def __init__(self, rankings: Mapping[str, Ranking]) -> None:
        self._rankings = rankings

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking:
        """The recorded candidates, all of them: they are as deep as production looked.

        Raises:
            QueryError: a query that was not recorded.
        """
        del depth
        try:
            return self._rankings[query]
        except KeyError:
            raise QueryError("this query is not among the recorded ones") from None


@dataclass(frozen=True)
class JudgedTraffic:
    """Judged requests that calibration can use.

    Attributes:
        dataset: Their queries, each text once, with the verdicts as labels.
        rankings: What was retrieved for each.
        route: The stages that answered all of them.
        left_out: Judged requests that were not used, by reason, in words.
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
        series: Whose judgments.
        route: The stages that answered; the commonest unless given.

    Raises:
        CalibrationError: no request can be used.
    """
    left_out: Counter[str] = Counter()
    found = _wholly_judged(store, series, left_out)
    if route is None and found:
        route = Counter(one.record.route for one in found).most_common(1)[0][0]
    if not found or route is None:
        reasons = "; ".join([f"{n:,} {reason}" for reason, n in left_out.items()])
        raise CalibrationError(
            f"no judged request can be calibrated on: {reasons or 'none is judged'}"
        )
    by_text: dict[str, _Graded] = {}
    for one in found:
        text = str(one.record.query)
        if one.record.route is not route:
            left_out[f"of another route ({one.record.route.value})"] += 1
        elif text in by_text:
            left_out["that ask what another one asks"] += 1
        else:
            by_text[text] = one
    if not by_text:
        reasons = "; ".join([f"{n:,} {reason}" for reason, n in left_out.items()])
        raise CalibrationError(
            f"no judged request can be calibrated on for route {route.value}: {reasons}"
        )
    dataset = Dataset(
        name=f"judged traffic ({series})",
        queries=tuple([Query(str(one.sample_id), text) for text, one in by_text.items()]),
        qrels={
            str(one.sample_id): {name: grade for name, (grade, _) in one.words.items()}
            for one in by_text.values()
        },
        distractors={
            str(one.sample_id): {
                name: negative.value
                for name, (_, negative) in one.words.items()
                if negative is not None
            }
            for one in by_text.values()
        },
        notes=tuple([f"{n:,} judged requests are left out: {why}" for why, n in left_out.items()]),
    )
    rankings = {text: one.record.ranking() for text, one in by_text.items()}
    return JudgedTraffic(dataset, rankings, route, left_out)


@dataclass(frozen=True)
class _Graded:
    """A sample with a word on each of its candidates."""

    sample_id: int
    record: Record
    words: Mapping[str, tuple[int, Negative | None]]


def _wholly_judged(store: "SampleStore", series: str, left_out: Counter[str]) -> list[_Graded]:
    """The samples whose whole pool has verdicts, newest first."""
    ids = store.judged(series).sample_ids.tolist()
    verdicts = store.verdicts(series, ids)
    said: dict[int, list[LabelRow]] = {}
    for sample_id, given in store.labels():
        if given.source == HUMAN:
            said.setdefault(sample_id, []).append(given)
    found = []
    for sample_id, payload in sorted(store.payloads(ids).items(), reverse=True):
        record = Record.from_bytes(payload)
        words = _grades(verdicts.get(sample_id, "{}"))
        for passage_id, verdict in resolve(said.get(sample_id, [])).verdicts.items():
            words[passage_id] = (verdict.grade, verdict.negative)
        if record.query is None:
            left_out["without the query's text"] += 1
        elif not record.whole and record.rates.dropped < 1.0:
            left_out["whose pool was judged in part (raise the rate `pool`)"] += 1
        elif not _pool(record) <= words.keys():
            left_out["with passages that got no verdict"] += 1
        else:
            found.append(_Graded(sample_id, record, words))
    return found


def _note(route: Route, before: Profile) -> str:
    return (
        f"route {route.value} was recalibrated from judged traffic; the others are those of "
        f"profile {before.profile_id}"
    )


def _pool(record: Record) -> set[str]:
    return {record.passage_ids[place] for place in (*record.served, *record.dropped)}


def _grades(verdicts: str) -> dict[str, tuple[int, Negative | None]]:
    return {
        passage_id: (int(grade), None if negative is None else Negative(negative))
        for passage_id, (grade, negative) in json.loads(verdicts or "{}").items()
    }


@dataclass(frozen=True)
class Recalibration:
    """A profile made anew from judged traffic, beside the one in force.

    Attributes:
        profile: The one in force with the recalibrated route replaced.
        calibration: Of the recalibrated route.
        old, new: What each achieves on the queries that took no part in the choice.
        differences: New less old, paired by query.
        held_out: How many queries those are.
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
) -> Recalibration:
    """Choose a policy on one part of judged traffic, and run it in shadow on the other.

    Nothing is put in force: the profile that results is for a person to promote.

    Args:
        traffic: From ``judged_traffic``.
        profile: The one in force; it must know the traffic's route.
        settings: What is asked of the choice; some queries must be held out.
        passes: Shown what is under way.

    Raises:
        ConfigurationError: the settings hold nothing out.
        CalibrationError: the profile does not know the route, or the labels cannot support a
            choice.
    """
    if settings.held_out == 0.0:
        raise ConfigurationError(
            "held_out 0.0 must be above 0: old and new are compared on queries held out"
        )
    route = traffic.route
    before = profile.routes.get(route)
    if before is None:
        raise CalibrationError(
            f"the profile in force has no policy for route {route.value}, which answered; "
            f"it has {', '.join(sorted(known.value for known in profile.routes))}"
        )
    found = calibrate(
        RecordedRankings(traffic.rankings),
        traffic.dataset,
        settings,
        fusion=profile.fusion,
        fingerprint=profile.fingerprint,
        passes=passes,
    )
    after = found.profile.routes[route]
    held_out = () if found.held_out is None else found.held_out.queries
    pools = found.pools[route].subset([query.query_id for query in held_out])
    labels = label(pools, traffic.dataset, baseline_k=settings.baseline_k)

    def measured(policy: Policy) -> QueryMetrics:
        return per_query(pools, labels, policy, settings.utilities)

    old, new = measured(before.policy), measured(after.policy)
    return Recalibration(
        profile=profile.model_copy(
            update={
                "routes": {**profile.routes, route: after},
                "provenance": found.profile.provenance.model_copy(
                    update={
                        "notes": (
                            *found.profile.provenance.notes,
                            _note(route, profile),
                        )
                    }
                ),
            }
        ),
        calibration=found,
        old=old,
        new=new,
        differences=differences(new, old, seed=settings.seed),
        held_out=len(pools),
    )
