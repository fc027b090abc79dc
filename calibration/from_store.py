"""Calibrate from a store's judged samples, whether ``ctxguard judge`` or traffic wrote them.

Reads the store.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from calibration.asked_questions import WRITTEN
from calibration.calibrate import provenance
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, Query, folded
from calibration.fit import fold_numbers
from calibration.judged_candidates import (
    JudgedCandidates,
    decided,
    decided_by_others,
    difference,
    first_k,
    fitted_policy,
)
from calibration.pools import Pools
from calibration.replay import replay
from calibration.retrievers import RecordedRankings
from calibration.verdict import (
    RISK_PER_SAVED,
    conclude,
    lost_for,
    mean_interval,
    needed_to_reach,
)
from ctxguard._support.words import count, signed
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.passages import passage_tokens
from ctxguard.core.policies import RatioPolicy
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
from ctxguard.monitor.store.database import chunks
from ctxguard.profile.schema import Profile, RouteProfile, RouteVerdict

if TYPE_CHECKING:
    from ctxguard.monitor.store import SampleStore

TOP_GRADE = 3
"""The highest grade of people's scale, which is the judging language model's too."""
_AT_ONCE = 200
"""How many samples' texts are in memory at once."""
SYNTHETIC = (
    "the questions are synthetic, written from passages: they are easier than those of people, so "
    "that figures are optimistic and the verdict stays shadow"
)


@dataclass(frozen=True, kw_only=True)
class JudgedStore(JudgedCandidates):
    """The judged samples of a store that calibration can use, all answered by the same stages.

    Attributes:
        series: The judge's series, as the store names it.
        utilities: The worth of a passage.
        serving_k: How many passages the first k were, of those that no policy cut; None where a
            policy served every request.
        queries: Their questions.
        is_synthetic: Whether a model wrote some of the questions.
        left_out: How many judged samples were not used, by reason in words.
    """

    series: str
    utilities: Utilities
    serving_k: int | None
    queries: tuple[Query, ...]
    is_synthetic: bool
    left_out: Mapping[str, int]

    def size(self, ranks: IntArray) -> Mapping[str, float | None]:
        """Return the mean passages and tokens of contexts, weighting requests by 1/π."""
        weight, kept = 1.0 / self.rows.requests["probability"], ranks > 0
        sizes = self.pools.tokens
        tokens = None if sizes is None else np.where(kept, sizes, 0.0).sum(axis=1)
        return {
            name: None if each is None else float(weight @ each / weight.sum())
            for name, each in (("passages", kept.sum(axis=1)), ("tokens", tokens))
        }

    def tokens_differ(self, new: IntArray, old: IntArray) -> Interval:
        """Estimate by how much tokens of contexts differ, as a share of the old ones'.

        Passages are counted if no text was kept.
        """
        weight = 1.0 / self.rows.requests["probability"]
        of_new, of_old = (
            np.where(ranks > 0, self.pools.sizes, 0.0).sum(axis=1) for ranks in (new, old)
        )
        return mean_interval(weight * (of_new - of_old) * weight.size / float(weight @ of_old))

    @property
    def n_judged(self) -> int:
        """Number of candidates that were to be judged."""
        return int(np.count_nonzero(self.rows.passages["size"]))

    @property
    def n_failed(self) -> int:
        """Number of candidates without a grade, because a call of the judge failed."""
        return int(np.count_nonzero(self.rows.passages["judge_grade"] == FAILED))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the samples for a reader, one line each."""
        notes = [SYNTHETIC] if self.is_synthetic else []
        if self.n_failed:
            _, all_judged = self.rows.without_failed
            notes.append(failed_in_words(int(np.count_nonzero(~all_judged)), self.n_failed))
        left_out = (f"{n:,} judged samples are left out: {why}" for why, n in self.left_out.items())
        return (*notes, *left_out)


class _Sample(NamedTuple):
    """One judged sample without its texts, but with estimates of their tokens.

    It was stored and judged with this probability; ``first_pick`` is as in ``JudgedRows``.
    """

    sample: GradedSample
    tokens: Mapping[str, int]
    probability: float
    first_pick: int

    @property
    def name(self) -> str:
        return str(self.sample.sample_id)

    @property
    def question(self) -> str:
        text = self.sample.record.query
        return folded(text) if text else self.name


def judged_store(store: "SampleStore", series: str, utilities: Utilities) -> JudgedStore:
    """Read a judge's samples of the commonest route, with people's grades of them.

    Raises:
        CalibrationError: no sample can be used.
    """
    samples = list(_samples(store, series))
    routes = Counter([each.sample.record.route for each in samples]).most_common()
    route = routes[0][0] if routes else None
    left_out = Counter({f"of another route ({other.value})": n for other, n in routes[1:]})
    own = [
        each
        for each in samples
        if each.sample.record.route is route and each.sample.record.passage_ids
    ]
    if not own or route is None:
        raise CalibrationError(
            f"no sample judged by {series!r} can be used; judge some with `ctxguard "
            "judge`, or `ctxguard monitor`"
        )
    records = {each.name: each.sample.record for each in own}
    pools = replay(
        RecordedRankings({name: _of_system(record.ranking()) for name, record in records.items()}),
        [Query(name, name) for name in records],
        depth=max([len(record.passage_ids) for record in records.values()]),
    )
    if pools.skipped:
        left_out["that cannot be decided on again"] += len(pools.skipped)
    by_name = {each.name: each for each in own}
    used = [by_name[name] for name in pools.query_ids]
    pools = replace(pools, tokens=_tokens(used, pools))
    bare = [
        len(each.sample.record.served)
        for each in used
        if each.sample.record.mode is not Mode.ENFORCE or each.sample.record.profile_id is None
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
    first_pick = np.array([each.first_pick for each in used])
    return JudgedStore(
        rows=rows,
        fold=fold_numbers([each.question for each in used]),
        stands_for=stands_for(first_pick, requests["draw"] > 0, Counter(first_pick.tolist())),
        pools=pools,
        is_exact=is_exact,
        series=series,
        utilities=utilities,
        serving_k=max(bare, default=None),
        queries=tuple([Query(each.name, each.sample.record.query or "") for each in used]),
        is_synthetic=any(each.sample.record.request_id.startswith(WRITTEN) for each in used),
        left_out=left_out,
    )


def _tokens(samples: Sequence[_Sample], pools: Pools) -> FloatArray | None:
    """Estimate tokens, the mean standing in for texts not kept; None if there are none."""
    tokens = np.full(pools.scores.shape, np.nan)
    for row, (each, ids) in enumerate(zip(samples, pools.passage_ids, strict=True)):
        tokens[row, : len(ids)] = [each.tokens.get(passage_id, np.nan) for passage_id in ids]
    if not np.nansum(tokens):
        return None
    return np.where(pools.retrieved & np.isnan(tokens), np.nanmean(tokens), tokens)


def _samples(store: "SampleStore", series: str) -> Iterator[_Sample]:
    """Yield the judged samples whose text is kept."""
    for page in store.judged_pages(series):
        probability = page.rows.requests["probability"]
        place = {sample_id: at for at, sample_id in enumerate(page.sample_ids.tolist())}
        for ids in chunks(list(place), _AT_ONCE):
            picked = store.picked(None, ids)
            for sample_id, sample in graded_samples(store, series, ids, picked).items():
                at, record = place[sample_id], sample.record
                tokens = {
                    record.passage_ids[position]: passage_tokens(passage)
                    for position, passage in record.passages.items()
                }
                bare = replace(sample, record=replace(record, passages={}))
                yield _Sample(bare, tokens, float(probability[at]), int(page.first_pick[at]))


def _of_system(ranking: Ranking) -> Ranking:
    """Leave out the signals of metadata, which a profile computes from columns that it names."""
    own = {name: values for name, values in ranking.signals.items() if ":" not in name}
    return replace(ranking, signals=own)


def _rows(samples: Sequence[_Sample], pools: Pools, utilities: Utilities, top_grade: int) -> Rows:
    """Read the rows of the samples again, by these utilities and by the places in the pools."""
    of_judge = [one.grade for each in samples for one in each.sample.judge.values()]
    of_people = [one.grade for each in samples for one in each.sample.people.values()]
    scale = Scale(utilities, max([1, *of_judge]), max([top_grade, *of_people]))
    requests, passages = [], []
    for at, (sample, _, probability, _) in enumerate(samples):
        record, columns = sample.record, _columns(samples[at], pools, at)
        own = judged_request(
            record,
            sample.judge,
            scale,
            probability=probability,
            people=sample.people,
            picked=sample.picked,
        )
        judged = own.passages[
            [each in columns for each in own.passages["position"].tolist()]
        ].copy()
        judged["position"] = [columns[each] for each in judged["position"].tolist()]
        # The first of several served copies stands for all of them.
        judged = judged[np.sort(np.unique(judged["position"], return_index=True)[1])]
        chances = record.judging_chances(sample.judge)
        could_be = {columns[each] for each, chance in chances.items() if chance and each in columns}
        rest = [each for each in range(int(pools.lengths[at])) if each not in could_be]
        never = np.zeros(len(rest), PASSAGE)
        never["position"], never["worth"] = rest, utilities.unjudged
        never["group"], never["judge_grade"], never["people_grade"] = FAR, MISSING, UNGRADED
        own.requests["session"] = session_number(record.session_id or f"\0{samples[at].question}")
        own.requests["n_passages"] = len(judged) + len(never)
        requests.append(own.requests)
        passages += [judged, never]
    return Rows.of(np.concatenate(requests), np.concatenate(passages))


def _columns(each: _Sample, pools: Pools, row: int) -> dict[int, int]:
    """Return the column of each candidate in the pools, by its position in the sample."""
    place = {name: column for column, name in reversed(list(enumerate(pools.passage_ids[row])))}
    for column, names in pools.copies[row].items() if pools.copies else ():
        place |= dict.fromkeys(names, column)
    names = each.sample.record.passage_ids
    return {at: place[name] for at, name in enumerate(names) if name in place}


@dataclass(frozen=True)
class StoreCalibration:
    """A profile from judged samples.

    Attributes:
        profile: The file that the guard loads.
        gain: Gain of its policy over the first ``serving_k`` in recall and UDCG, each request
            decided by a policy that was fitted without its question.
        in_force: The same for the profile in force; None without one.
        size: Mean passages and tokens of a context by its policy, likewise; a text not kept counts
            as the mean, and tokens are None if none was kept.
        today: Mean passages and tokens of the first ``serving_k``.
    """

    profile: Profile
    gain: Mapping[str, Interval]
    in_force: Mapping[str, Interval] | None
    size: Mapping[str, float | None]
    today: Mapping[str, float | None]


def calibrate_from_store(
    found: JudgedStore,
    settings: Settings,
    in_force: Profile | None = None,
    *,
    fusion: Fusion | None = None,
    fingerprint: Mapping[str, str] | None = None,
    corpus_sketch: CorpusSketch | None = None,
) -> StoreCalibration:
    """Fit a policy of the highest expected utility in a context of the wanted cost, for one route.

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
            f"{count(found.n_graded, 'request')}, and at least about {found.lacking:,} more, "
            "some of dropped passages, are needed to measure the judge's errors: a policy from its "
            "grades alone promises gains that do not exist"
        )
    settings = settings.model_copy(
        update={"depth": found.pools.scores.shape[1], "utilities": found.utilities}
    )
    today = RatioPolicy(k=settings.serving_k)
    first = first_k(found.pools, settings.serving_k)
    by_others = decided_by_others(found, settings)
    gain = difference(found, by_others, first)
    policy = fitted_policy(found, settings)
    tokens = found.tokens_differ(by_others, first)
    verdict = _verdict(found, gain, tokens, first, settings)
    why = f"{found.in_words}; UDCG {_in_words(gain['udcg'])} over the first {today.k}"
    route = RouteProfile(
        policy=today if verdict.decision == "keep" else policy,
        score_kind=found.pools.kind,
        why=why,
        verdict=verdict,
        safe_policy=today,
    )
    before = None if in_force is None else in_force.routes.get(found.pools.route)
    dataset = Dataset(
        f"judged requests ({found.series})",
        found.queries,
        {query.query_id: {} for query in found.queries},
        notes=found.notes,
    )
    profile = Profile(
        routes={**({} if in_force is None else in_force.routes), found.pools.route: route},
        fusion=Fusion() if fusion is None else fusion,
        utilities=found.utilities,
        fingerprint=dict(fingerprint or {}),
        corpus=corpus_sketch,
        signal_columns=() if in_force is None else in_force.signal_columns,
        provenance=provenance(
            dataset, settings, {found.pools.route: found.pools}, fingerprint or {}, [why]
        ),
    )
    old = None
    if before is not None:
        old = difference(found, decided(found.pools, before.policy), first)
    return StoreCalibration(profile, gain, old, found.size(by_others), found.size(first))


def _verdict(
    found: JudgedStore,
    gain: Mapping[str, Interval],
    tokens: Interval,
    today: IntArray,
    settings: Settings,
) -> RouteVerdict:
    """Judge the policy as with labels, by the estimated differences from today."""
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
    needed = [needed_to_reach(each, least) for each, least in limits]
    risk = RISK_PER_SAVED if settings.context in ("balanced", "richer") else math.inf
    most_lost = lost_for(tokens, risk)
    verdict = conclude(
        verdict.model_copy(update={**gain, "tokens": tokens}),
        safe=is_kept and all((each.lower or 0.0) >= least for each, least in limits),
        gained=udcg.lower > 0.0 or recall.lower > 0.0 or recall.lower >= -most_lost,
        lost=any((each.upper or 0.0) < -tolerance for each, _ in limits),
        for_a_gain=min(
            filter(None, [needed_to_reach(udcg), needed_to_reach(recall)]), default=None
        ),
        for_safety=max(filter(None, needed)) if is_kept and None not in needed else None,
    )
    if found.is_synthetic and verdict.decision == "enforce":
        return verdict.model_copy(update={"decision": "shadow"})
    return verdict


def _in_words(gain: Interval) -> str:
    if gain.value is None or gain.bounds is None:
        return "unknown"
    return "{} [{}, {}]".format(*map(signed, (gain.value, *gain.bounds)))
