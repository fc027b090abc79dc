"""Calibrate from a store's judged samples, whether ``ctxguard judge`` or traffic wrote them.

`judged_store` reads the store; the calibration itself is pure. Needs the extras `calibrate` and
`monitor`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from calibration.asked_questions import WRITTEN
from calibration.calibrate import provenance
from calibration.data.dataset import Dataset, Query, folded
from calibration.fit import fold_numbers
from calibration.judged_requests import (
    BY_K,
    JudgedRequests,
    decided,
    decided_by_others,
    fitted_policy,
)
from calibration.pools import Pools
from calibration.replay import replay
from calibration.retrievers import RecordedRankings
from calibration.settings import Settings
from calibration.verdict import RISK_PER_SAVED, conclude, lost_for, needed_to_reach
from ctxguard._support.words import count, signed
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.passages import TOKENS, passage_tokens
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import FloatArray, Mode, Ranking
from ctxguard.errors import CalibrationError
from ctxguard.measure.corrected import stands_for
from ctxguard.measure.interval import Interval
from ctxguard.measure.metrics import Metric, failed_in_words
from ctxguard.measure.rows import (
    FAILED,
    FAR,
    MISSING,
    PASSAGE,
    UNGRADED,
    YES,
    IntArray,
    Rows,
    session_number,
)
from ctxguard.measure.worth import Utilities
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.labels.evidence import Scale, judged_request
from ctxguard.monitor.labels.samples import GradedSample, graded_samples
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store.database import chunks
from ctxguard.profile.schema import Profile, RouteEvidence, RouteProfile, RouteVerdict

if TYPE_CHECKING:
    from ctxguard.monitor.store import SampleStore

TOP_GRADE = 3
"""The highest grade on people's scale, and on that of a language model that judges."""
_AT_ONCE = 200
"""How many samples' texts are in memory at once."""
SYNTHETIC = (
    "the questions are synthetic, written from passages: they are easier than people's questions, "
    "so the figures are optimistic and the verdict stays shadow"
)


class _Sample(NamedTuple):
    """A judged sample without its texts, but with estimates of their tokens, NaN if not kept.

    ``request`` is its row in the store, a ``REQUEST``.
    """

    sample: GradedSample
    tokens: FloatArray
    request: np.void

    @property
    def record(self) -> SampleRecord:
        return self.sample.record

    @property
    def name(self) -> str:
        return str(self.sample.sample_id)

    @property
    def question(self) -> str:
        return folded(self.record.query) if self.record.query else self.name

    @property
    def ranking(self) -> Ranking:
        """The sample's ranking without metadata signals, which profiles compute from columns."""
        ranking = self.record.ranking()
        own = {name: values for name, values in ranking.signals.items() if ":" not in name}
        return replace(ranking, signals={**own, TOKENS: self.tokens})


def judged_store(store: "SampleStore", series: str, utilities: Utilities) -> JudgedRequests:
    """Read a judge's samples from the most common route, with people's grades.

    Raises:
        CalibrationError: no sample can be used.
    """
    samples = list(_samples(store, series))
    routes = Counter([each.record.route for each in samples]).most_common()
    route = routes[0][0] if routes else None
    left_out = Counter({f"of another route ({other.value})": n for other, n in routes[1:]})
    own = [each for each in samples if each.record.route is route and each.record.passage_ids]
    if not own or route is None:
        raise CalibrationError(
            f"no sample judged by {series!r} can be used; judge some with `ctxguard "
            "judge`, or `ctxguard monitor`"
        )
    by_name = {each.name: each for each in own}
    pools = replay(
        RecordedRankings({name: each.ranking for name, each in by_name.items()}),
        [Query(name, name) for name in by_name],
        depth=max([len(each.record.passage_ids) for each in own]),
    )
    if pools.skipped:
        left_out["for which the decision cannot be made again"] += len(pools.skipped)
    if pools.tokens is not None:
        is_unknown = pools.retrieved & np.isnan(pools.tokens)
        tokens = np.where(is_unknown, np.nanmean(pools.tokens), pools.tokens)
        pools = replace(pools, tokens=tokens)
    used = [by_name[name] for name in pools.query_ids]
    bare = [
        len(each.record.served)
        for each in used
        if each.record.mode is not Mode.ENFORCE or each.record.profile_id is None
    ]
    rows = _rows(used, pools, utilities, store.top_grade() or TOP_GRADE)
    requests, passages = rows.requests, rows.passages
    is_exact = series.startswith(f"{LabelJudge.name} ")
    if is_exact:
        # As in live figures, a passage without a label counts as not relevant.
        is_known = (passages["judge_grade"] != FAILED) & (passages["size"] > 0.0)
        passages["people_grade"] = np.where(is_known, passages["judge_grade"] == YES, UNGRADED)
        passages["people_worth"], passages["asked_probability"] = passages["worth"], is_known
        requests["draw"], requests["is_run"], requests["run_probability"] = 1, True, 1.0
    else:
        # The draws whose grades stand for all that they could have asked about.
        draws = store.draws(series, [s.sample.sample_id for s in samples if s.sample.people])
        counts = np.isin(requests["draw"], list(draws))
        requests["draw"][~counts] = 0
        passages["asked_probability"][~counts[rows.request]] = 0.0
    first_pick = requests["first_pick"]
    is_synthetic = any(each.record.request_id.startswith(WRITTEN) for each in used)
    notes = [SYNTHETIC] if is_synthetic else []
    n_failed = int(np.count_nonzero(passages["judge_grade"] == FAILED))
    if n_failed:
        _, all_judged = rows.without_failed
        notes.append(failed_in_words(int(np.count_nonzero(~all_judged)), n_failed))
    notes += [f"{count(n, 'judged sample')} left out: {why}" for why, n in left_out.items()]
    questions = tuple([Query(each.name, each.record.query or "") for each in used])
    return JudgedRequests(
        rows=rows,
        fold=fold_numbers([each.question for each in used]),
        stands_for=stands_for(first_pick, requests["draw"] > 0, Counter(first_pick.tolist())),
        pools=pools,
        is_exact=is_exact,
        utilities=utilities,
        questions=Dataset(
            f"judged requests ({series})",
            questions,
            {query.query_id: {} for query in questions},
            notes=tuple(notes),
        ),
        is_synthetic=is_synthetic,
        serving_k=max(bare, default=None),
    )


def _samples(store: "SampleStore", series: str) -> Iterator[_Sample]:
    """Yield the judged samples whose text is kept."""
    for rows in store.judged_pages(series):
        judged = dict(zip(rows.requests["sample_id"].tolist(), rows.requests, strict=True))
        for ids in chunks(list(judged), _AT_ONCE):
            picked = store.picked(None, ids)
            for sample_id, sample in graded_samples(store, series, ids, picked).items():
                record = sample.record
                tokens = np.full(len(record.passage_ids), np.nan)
                for position, passage in record.passages.items():
                    tokens[position] = passage_tokens(passage) or np.nan
                bare = replace(sample, record=replace(record, passages={}))
                yield _Sample(bare, tokens, judged[sample_id])


def _rows(samples: Sequence[_Sample], pools: Pools, utilities: Utilities, top_grade: int) -> Rows:
    """Read the samples' rows again, with these utilities and their places in the pools."""
    of_judge = [one.grade for each in samples for one in each.sample.judge.values()]
    of_people = [one.grade for each in samples for one in each.sample.people.values()]
    scale = Scale(utilities, max([1, *of_judge]), max([top_grade, *of_people]))
    requests, passages = [], []
    for at, each in enumerate(samples):
        record, sample, columns = each.record, each.sample, _columns(each.record, pools, at)
        own = judged_request(sample, scale, probability=float(each.request["probability"]))
        judged = own.passages[np.isin(own.passages["position"], list(columns))].copy()
        judged["position"] = [columns[one] for one in judged["position"].tolist()]
        # The first of several served copies stands for all of them.
        judged = judged[np.sort(np.unique(judged["position"], return_index=True)[1])]
        chances = record.judging_chances(sample.judge)
        could_be = {columns[one] for one, chance in chances.items() if chance and one in columns}
        rest = sorted({*range(int(pools.lengths[at]))} - could_be)
        never = np.zeros(len(rest), PASSAGE)
        never["position"], never["worth"] = rest, utilities.unjudged
        never["group"], never["judge_grade"], never["people_grade"] = FAR, MISSING, UNGRADED
        own.requests["first_pick"] = each.request["first_pick"]
        own.requests["session"] = session_number(record.session_id or f"\0{each.question}")
        own.requests["n_passages"] = len(judged) + len(never)
        requests.append(own.requests)
        passages += [judged, never]
    return Rows.of(np.concatenate(requests), np.concatenate(passages))


def _columns(record: SampleRecord, pools: Pools, row: int) -> dict[int, int]:
    """Return the column of each candidate in the pools, by its position in the sample."""
    place = {name: column for column, name in reversed(list(enumerate(pools.passage_ids[row])))}
    for column, names in pools.copies[row].items() if pools.copies else ():
        place |= dict.fromkeys(names, column)
    return {at: place[name] for at, name in enumerate(record.passage_ids) if name in place}


def calibrate_from_store(
    found: JudgedRequests,
    settings: Settings,
    in_force: Profile | None = None,
    *,
    fusion: Fusion | None = None,
    fingerprint: Mapping[str, str] | None = None,
    corpus_sketch: CorpusSketch | None = None,
) -> Profile:
    """Fit the policy with the highest expected utility at the wanted cost of context, on one route.

    The verdict holds its gain over the first ``serving_k`` in recall and UDCG, each request decided
    by a policy that was fitted without its question; the evidence is of these contexts, or of
    today's where they stay. A text not kept counts as the mean of the others.

    Args:
        found: The result of `judged_store`.
        settings: ``context``, ``serving_k``, ``min_keep``, ``tolerance`` and ``max_loss`` are used;
            ``utilities`` are those of the samples.
        in_force: The profile in force, whose other routes stay; None for none.
        fusion: How the legs of the system that answered are fused; None for the default.
        fingerprint: Identifies that system; without one the profile is unverified.
        corpus_sketch: A sketch of the corpus it searches.

    Raises:
        CalibrationError: people graded too little to correct the judge.
    """
    if found.lacking:
        raise CalibrationError(
            f"people graded {count(int(found.is_graded.sum()), 'passage')} of "
            f"{count(found.n_graded, 'request')}, but at least about {found.lacking:,} more, "
            "some of dropped passages, are needed to measure the judge's errors: a policy based "
            "only on the judge's grades promises gains that do not exist"
        )
    settings = settings.model_copy(
        update={"depth": found.pools.scores.shape[1], "utilities": found.utilities}
    )
    policy: Policy = fitted_policy(found, settings)
    today = RatioPolicy(k=settings.serving_k)
    new, old = decided_by_others(found, settings), decided(found.pools, today)
    gain = found.gain(new, old)
    verdict = _verdict(found, gain, found.tokens_differ(new, old), old, settings)
    if verdict.decision == "keep":
        policy, new = today, old
    estimates = found.estimates(new)
    metrics = {metric.value: estimates[metric] for metric in BY_K.values()}
    why = f"{found.in_words}; UDCG {_in_words(gain['udcg'])} over the first {today.k}"
    route = RouteProfile(
        policy=policy,
        score_kind=found.pools.kind,
        why=why,
        verdict=verdict,
        evidence=RouteEvidence(queries=len(found.pools), metrics=metrics | found.sizes(new)),
        safe_policy=today,
    )
    pools = {found.pools.route: found.pools}
    return Profile(
        routes={**({} if in_force is None else in_force.routes), found.pools.route: route},
        fusion=Fusion() if fusion is None else fusion,
        utilities=found.utilities,
        fingerprint=dict(fingerprint or {}),
        corpus=corpus_sketch,
        signal_columns=() if in_force is None else in_force.signal_columns,
        provenance=provenance(found.questions, settings, pools, fingerprint or {}, [why]),
    )


def _verdict(
    found: JudgedRequests,
    gain: Mapping[str, Interval],
    tokens: Interval,
    today: IntArray,
    settings: Settings,
) -> RouteVerdict:
    """Judge the policy as with labels, by its estimated differences from today's context."""
    tolerance, max_loss = settings.tolerance, settings.max_loss
    verdict = RouteVerdict(
        decision="shadow",
        n=found.n_graded,
        serving_k=settings.serving_k,
        tolerance=tolerance,
        max_loss=max_loss,
        shown_by="folds" if found.is_exact else "grades",
    )
    recall, udcg = gain["recall"], gain["udcg"]
    if recall.value is None or recall.lower is None or udcg.lower is None:
        return verdict
    todays = found.estimates(today)[Metric.UDCG].value or 0.0
    limits = [(recall, -max_loss), (udcg, -max_loss * max(todays, 1.0))]
    is_kept = recall.value >= -tolerance
    risk = RISK_PER_SAVED if settings.context in ("balanced", "richer") else math.inf
    most_lost = lost_for(tokens, risk)
    verdict = conclude(
        verdict.model_copy(update={**gain, "tokens": tokens}),
        safe=is_kept and all((each.lower or 0.0) >= least for each, least in limits),
        gained=udcg.lower > 0.0 or recall.lower > 0.0 or recall.lower >= -most_lost,
        lost=any((each.upper or 0.0) < -tolerance for each, _ in limits),
        for_a_gain=[needed_to_reach(udcg), needed_to_reach(recall)],
        for_safety=[needed_to_reach(*limit) if is_kept else None for limit in limits],
    )
    if found.is_synthetic and verdict.decision == "enforce":
        return verdict.model_copy(update={"decision": "shadow"})
    return verdict


def _in_words(gain: Interval) -> str:
    if gain.value is None or gain.bounds is None:
        return "unknown"
    return "{} [{}, {}]".format(*map(signed, (gain.value, *gain.bounds)))
