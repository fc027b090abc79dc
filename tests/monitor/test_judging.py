"""From grades to what the estimates need: inclusion probabilities, missing grades."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from contexts import make_context
from judged_rows import sums_of

from ctxguard.core.context import Context
from ctxguard.core.types import FloatArray
from ctxguard.measure.metrics import Metric, losses
from ctxguard.measure.rows import FAILED, NO, UNGRADED, YES, Rows
from ctxguard.measure.worth import READERS, STRICT, Negative
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.evidence import Scale, judged_request, with_first
from ctxguard.monitor.labels.samples import GradedSample
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.record import record_of as record_of_sample
from ctxguard.monitor.sampling.sampler import JudgingRates

POOL = [f"p{rank}" for rank in range(10)]
RELEVANT = frozenset({"p0", "p4", "p7"})
NO_HIT = frozenset({"p4", "p7"})
"""Of the first three, which are served, none."""
REPEATS = 1_500


def record_of(rates: JudgingRates, *, request_id: str = "r", k: int = 3) -> SampleRecord:
    context = make_context(POOL, k, request_id=request_id)
    return record_of_sample(context, 1.0, 0.0, rates)


def records_of(
    rates: JudgingRates, n: int = 0, context: Context | None = None
) -> Iterator[SampleRecord]:
    """Many requests, of each of which other passages are judged."""
    context = context or make_context(POOL, 3)
    for i in range(n or REPEATS):
        yield record_of_sample(replace(context, request_id=f"r{i}"), 1.0, 0.0, rates)


SCALE = Scale(READERS, 1)


def rows_of(record: SampleRecord, relevant: frozenset[str] = RELEVANT) -> Rows:
    """As a judge without errors has it, of what it is asked about."""
    grades = grades_of(relevant)
    names = [record.passage_ids[place] for place in record.to_judge(grades)]
    return rows_by(record, {name: grades[name] for name in names})


def rows_by(record: SampleRecord, grades: dict[str, Judgment]) -> Rows:
    return judged_request(GradedSample(1, record, {}, grades), SCALE, probability=1.0)


def grades_of(relevant: frozenset[str]) -> dict[str, Judgment]:
    return {name: Judgment(name, int(name in relevant)) for name in POOL}


def judged(records: Iterable[SampleRecord], relevant: frozenset[str] = RELEVANT) -> Rows:
    return Rows.joined([rows_of(record, relevant) for record in records])


def dropped_relevant(rows: Rows) -> FloatArray:
    """How many of the dropped are relevant by those that were judged, shape (n,)."""
    passages = rows.passages
    is_dropped_hit = (passages["judge_grade"] == YES) & (passages["rank"] == 0)
    return rows.total(is_dropped_hit * passages["size"])


RATES = {
    "one by one": JudgingRates(0.3, 0.0, 0.0, baseline_rate=0.0),
    "whole pools": JudgingRates(0.0, 0.3, 0.3, baseline_rate=0.0),
    "by hit": JudgingRates(0.1, 0.1, 0.7, baseline_rate=0.0),
    "first few": JudgingRates(0.2, 0.05, 0.05, baseline_rate=0.4, baseline_k=6),
    "all of it": JudgingRates(0.2, 0.1, 0.5, baseline_rate=0.3, baseline_k=5),
}
"""The rates of single dropped passages, of whole pools, and of these where nothing was a hit."""
ONLY_SERVED = JudgingRates(0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module", params=RATES.values(), ids=RATES)
def records(request: pytest.FixtureRequest) -> list[SampleRecord]:
    """As many for each of the rates."""
    assert record_of(request.param).served == (0, 1, 2)
    return list(records_of(request.param))


@pytest.mark.parametrize("relevant", [RELEVANT, NO_HIT], ids=["hit", "no hit"])
class TestInclusionProbabilities:
    def test_dropped_are_judged_as_said(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        rates = records[0].rates
        has_hit = relevant is RELEVANT
        pool = rates.full_pool_rate if has_hit else rates.full_pool_rate_if_no_hit
        alone = pool + (1 - pool) * rates.dropped_rate
        counts = dict.fromkeys(records[0].dropped, 0)
        for record in records:
            for place in record.to_judge(grades_of(relevant))[len(record.served) :]:
                counts[place] += 1
        for place, count in counts.items():
            first = rates.baseline_rate if place in records[0].first(rates.baseline_k) else 0.0
            expected = alone + (1 - alone) * first
            spread = (expected * (1 - expected) / REPEATS) ** 0.5
            assert count / REPEATS == pytest.approx(expected, abs=4.5 * spread + 1e-9)
        [chance] = judged(records[:1], relevant).requests["dropped_probability"]
        assert chance == pytest.approx(alone)

    def test_dropped_relevant_count_unbiased(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        truth = len(relevant & {"p3", "p4", "p5", "p6", "p7", "p8", "p9"})
        assert_mean(dropped_relevant(judged(records, relevant)), truth)

    def test_whole_pools_stand_for_all_requests(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        rows = judged(records, relevant)
        whole = ~np.isnan(rows.requests["pool_probability"])
        in_pool = rows.total((rows.passages["judge_grade"] == YES) * 1.0)
        assert (in_pool[whole] == len(relevant)).all()
        assert (rows.requests["n_passages"][whole] == len(POOL)).all()
        rates = records[0].rates
        if chance := rates.full_pool_probability(has_hit=relevant is RELEVANT):
            assert set(rows.requests["pool_probability"][whole]) == {chance}
            assert_mean(whole / chance, 1.0)
        else:
            assert not whole.any()


def assert_mean(values: FloatArray, truth: float) -> None:
    spread = values.std() / len(values) ** 0.5
    assert values.mean() == pytest.approx(truth, abs=4.5 * spread + 1e-9)


def test_mixed_traffic_has_overall_recall() -> None:
    rng = random.Random(2)
    kept = total = 0
    ranks, shares, parts = [], [], []
    for record in records_of(JudgingRates(0.2, 0.1, 0.6, 0.2)):
        right = frozenset(name for name in POOL if rng.random() < 0.15)
        served = [name for name in POOL[:3] if name in right]
        kept, total = kept + len(served), total + len(right)
        ranks.append(1 / (1 + POOL.index(served[0])) if served else 0.0)
        if right:
            shares.append(len(served) / len(right))
        parts.append(rows_of(record, right))
    found = sums_of(Rows.joined(parts))
    for metric, truth in (
        (Metric.POOLED_RECALL, kept / total),
        (Metric.RECALL, sum(shares) / len(shares)),
        (Metric.SERVED_MRR, sum(ranks) / len(ranks)),
    ):
        assert found.ratio(metric).value == pytest.approx(truth, abs=0.03)


def test_pools_whole_when_unserved_show_nothing() -> None:
    """Pools that are whole only where nothing was served show no recall."""
    rows = judged([record_of(JudgingRates(0.0, 0.0, 1.0, 0.0))], NO_HIT)
    assert sums_of(rows).ratio(Metric.RECALL).n == 0
    assert rows.requests["pool_probability"] == 1.0


def loss_of(rows: Rows) -> float | None:
    [loss] = losses(rows)[Metric.RECALL_LOSS]
    return None if np.isnan(loss) else float(loss)


class TestRecallLoss:
    """Known only where the retriever's first few were to be judged whatever was served."""

    FIRST_FIVE = JudgingRates(0.0, 0.0, 0.0, baseline_rate=1.0, baseline_k=5)
    FIRST_EIGHT = JudgingRates(0.0, 0.0, 0.0, baseline_rate=1.0, baseline_k=8)

    @pytest.mark.parametrize(
        ("rates", "relevant", "k", "loss"),
        [
            (FIRST_FIVE, RELEVANT, 3, 1 / 2),
            (FIRST_EIGHT, RELEVANT, 3, 2 / 3),
            (FIRST_EIGHT, RELEVANT, 8, 0.0),
            (JudgingRates(0.0, 1.0, 1.0, 0.0), RELEVANT, 3, 1 / 2),
            (JudgingRates(0.9, 0.0, 0.0, 0.0), RELEVANT, 3, None),
            (FIRST_FIVE, frozenset({"p9"}), 3, None),
        ],
        ids=["first 5", "first 8", "all served", "whole pool", "one by one", "none among them"],
    )
    def test_is_share_of_first_fews_relevant(
        self, rates: JudgingRates, relevant: frozenset[str], k: int, loss: float | None
    ) -> None:
        record = record_of(rates, k=k)
        rows = judged([record], relevant)
        assert loss_of(rows) == loss
        of_another = with_first(rows, record, 1)
        assert loss_of(with_first(of_another, record, rates.baseline_k)) == loss

    def test_pool_without_served_relevance_has_none(self) -> None:
        record = record_of(JudgingRates(0.0, 0.0, 1.0, 0.0))
        assert record.to_judge(grades_of(NO_HIT)) == (*record.served, *record.dropped)
        assert dropped_relevant(judged([record], NO_HIT)).tolist() == [2.0]
        assert loss_of(judged([record], NO_HIT)) is None

    def test_missing_grade_makes_loss_unknown(self) -> None:
        record = record_of(self.FIRST_FIVE)
        grades = {name: Judgment(name, 1) for name in POOL[:4]}
        assert loss_of(rows_by(record, grades)) is None

    def test_mean_of_known_is_of_all(self) -> None:
        """Also where some pools are judged only because nothing relevant was served."""
        rng = random.Random(4)
        truth, parts = [], []
        for record in records_of(JudgingRates(0.1, 0.1, 1.0, 0.2, baseline_k=10)):
            right = frozenset(name for name in POOL if rng.random() < 0.15)
            if right:
                truth.append(len(right - {"p0", "p1", "p2"}) / len(right))
            parts.append(rows_of(record, right))
        found = losses(Rows.joined(parts))[Metric.RECALL_LOSS]
        found = found[~np.isnan(found)]
        assert len(found) == pytest.approx(0.28 * len(truth), rel=0.15)
        assert_mean(found, sum(truth) / len(truth))


def test_short_pools_stand_alone() -> None:
    """Where only the first few are judged, pools of no more say nothing of longer ones."""
    first_ten = JudgingRates(0.0, 0.0, 0.0, 1.0, len(POOL))
    rows = judged([record_of(first_ten)])
    assert len(rows.passages) == len(POOL)
    assert rows.requests["dropped_probability"].tolist() == [0.0]


class TestMissingGrades:
    def rows(self, missing: frozenset[str]) -> Rows:
        grades = {
            name: Judgment(name, int(name in RELEVANT)) for name in POOL if name not in missing
        }
        record = record_of(JudgingRates(dropped_rate=1.0))
        return rows_by(record, grades)

    def test_failed_dropped_passages_are_rows(self) -> None:
        """Each with the chance of being judged that the sample holds, as if it had a grade."""
        rows, whole = self.rows(frozenset({"p3", "p5"})), self.rows(frozenset())
        assert rows.passages["judge_grade"][[3, 5]].tolist() == [FAILED, FAILED]
        for name in ("position", "rank", "group", "size"):
            assert rows.passages[name].tolist() == whole.passages[name].tolist()

    def test_figures_leave_failed_requests_out(self) -> None:
        """Each figure those that lack a grade which it needs."""
        dropped, served = (sums_of(self.rows(frozenset({one}))) for one in ("p3", "p1"))
        assert dropped.ratio(Metric.PRECISION).n == 1
        for metric in (Metric.RECALL, Metric.POOLED_RECALL, Metric.RECALL_LOSS):
            assert dropped.ratio(metric).n == 0
        assert {served.ratio(metric).n for metric in Metric} == {0}

    def test_failed_is_not_irrelevant(self) -> None:
        """People's grades say what such passages are; the request is not dropped for it."""
        rows = self.rows(frozenset({"p1"}))
        assert rows.passages["judge_grade"][:3].tolist() == [YES, FAILED, NO]

    def test_whole_pool_waits_for_the_served(self) -> None:
        """Pools that are judged where nothing served is relevant: not before that is certain."""
        record = record_of(JudgingRates(0.0, 0.0, 1.0, 0.0))
        known = {name: Judgment(name, 0) for name in POOL[:3]}
        assert not record.has_hit(known)
        del known["p2"]
        assert record.has_hit(known)
        rows = rows_by(record, known)
        assert rows.requests["n_passages"].tolist() == [3]


@pytest.mark.parametrize(("k", "n"), [(10, 1), (3, 0)], ids=["nothing dropped", "nothing judged"])
def test_undropped_pool_is_whole(k: int, n: int) -> None:
    """Where nothing was dropped the pool is whole and else unknown if none is judged."""
    found = sums_of(judged([record_of(ONLY_SERVED, k=k)]))
    assert [found.ratio(one).n for one in (Metric.RECALL, Metric.POOLED_RECALL)] == [n, n]


def test_grades_count_by_their_scale() -> None:
    """Also those of people, who may have another one than the judge."""
    grades = {
        "p0": Judgment("p0", 3, score=0.75),
        "p1": Judgment("p1", 0, Negative.DISTRACTOR),
        "p2": Judgment("p2", 1),
    }
    given = {"p0": Judgment("p0", 1), "p2": Judgment("p2", 0)}
    scale = Scale(STRICT, 3, 1)
    sample = GradedSample(1, record_of(ONLY_SERVED), given, grades)
    rows = judged_request(sample, scale, probability=1.0)
    passages = rows.passages
    assert passages["judge_grade"].tolist() == [YES, NO, YES]
    assert passages["worth"].tolist() == [1.0, -1.0, 0.5]
    assert passages["score"] == pytest.approx([np.log(3.0), 0.0, 0.0])
    assert passages["people_grade"].tolist() == [1, UNGRADED, 0]
    assert passages["people_worth"].tolist() == [1.0, 0.0, -0.5]
    # No draw asked for them.
    assert (passages["asked_probability"].tolist(), rows.requests["draw"].tolist()) == (
        [0.0] * 3,
        [0],
    )
