"""From verdicts to what the estimates need: inclusion probabilities, missing verdicts."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from contexts import make_context
from judged_rows import ratio_sums

from ctxguard.core.context import Context
from ctxguard.core.metrics import DEFAULT_UTILITIES, Negative
from ctxguard.monitor.estimation.reduce import judged_request
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric, table_of
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import InclusionDesign, JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.record import record_of as record_of_sample
from ctxguard.monitor.sampling.sampler import Sample

POOL = [f"p{rank}" for rank in range(10)]
RELEVANT = frozenset({"p0", "p4", "p7"})
NO_HIT = frozenset({"p4", "p7"})
"""Of the first three, which are served, none."""
REPEATS = 3_000


def record_of(rates: JudgingRates, *, request_id: str = "r", k: int = 3) -> SampleRecord:
    context = make_context(POOL, k, request_id=request_id)
    return record_of_sample(Sample(context, 1.0, 0.0), InclusionDesign(rates))


def records_of(
    rates: JudgingRates, n: int = 0, context: Context | None = None
) -> Iterator[SampleRecord]:
    """Many requests, of each of which other passages are judged."""
    design, context = InclusionDesign(rates), context or make_context(POOL, 3)
    for i in range(n or REPEATS):
        yield record_of_sample(Sample(replace(context, request_id=f"r{i}"), 1.0, 0.0), design)


def judged(record: SampleRecord, relevant: frozenset[str] = RELEVANT) -> JudgedRequest:
    """As a judge without errors has it, of what it is asked about."""
    has_hit = any(record.passage_ids[place] in relevant for place in record.served)
    to_judge = (*record.served, *record.to_judge(has_hit=has_hit))
    names = [record.passage_ids[place] for place in to_judge]
    verdicts = {name: Judgment(name, int(name in relevant)) for name in names}
    return judged_request(record, verdicts, utilities=DEFAULT_UTILITIES, max_grade=1)


RATES = {
    "one by one": JudgingRates(0.3, 0.0, 0.0, baseline_rate=0.0),
    "whole pools": JudgingRates(0.0, 0.3, 0.3, baseline_rate=0.0),
    "by hit": JudgingRates(0.1, 0.1, 0.7, baseline_rate=0.0),
    "first few": JudgingRates(0.2, 0.05, 0.05, baseline_rate=0.4, baseline_k=6),
    "all of it": JudgingRates(0.2, 0.1, 0.5, baseline_rate=0.3, baseline_k=5),
}
"""The rates of single dropped passages, of whole pools, and of these where nothing was a hit."""
ONLY_SERVED = JudgingRates(0.0, 0.0, 0.0, 0.0)


@pytest.fixture(params=RATES.values(), ids=RATES)
def records(request: pytest.FixtureRequest) -> list[SampleRecord]:
    """As many for each of the rates."""
    assert record_of(request.param).served == (0, 1, 2)
    return list(records_of(request.param))


@pytest.mark.parametrize("relevant", [RELEVANT, NO_HIT], ids=["hit", "no hit"])
class TestInclusionProbabilities:
    def test_each_dropped_passage_is_judged_as_often_as_is_said(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        rates = records[0].rates
        has_hit = relevant is RELEVANT
        pool = rates.full_pool_rate if has_hit else rates.full_pool_rate_if_no_hit
        alone = pool + (1 - pool) * rates.dropped_rate
        counts = dict.fromkeys(records[0].dropped, 0)
        for record in records:
            for place in record.to_judge(has_hit=has_hit):
                counts[place] += 1
        for place, count in counts.items():
            first = rates.baseline_rate if place in records[0].in_baseline else 0.0
            expected = alone + (1 - alone) * first
            spread = (expected * (1 - expected) / REPEATS) ** 0.5
            assert count / REPEATS == pytest.approx(expected, abs=4.5 * spread + 1e-9)
        assert judged(records[0], relevant).dropped_probability == pytest.approx(alone)

    def test_the_dropped_relevant_are_counted_without_bias(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        truth = len(relevant & {"p3", "p4", "p5", "p6", "p7", "p8", "p9"})
        found = [judged(record, relevant).dropped_relevant for record in records]
        assert None not in found
        assert_mean([float(one or 0.0) for one in found], truth)

    def test_pool_counts_stand_for_all_requests(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        requests = [judged(record, relevant) for record in records]
        whole = [one for one in requests if one.pool_relevant is not None]
        assert all(one.pool_relevant == len(relevant) for one in whole)
        assert {one.partial_pool_relevant for one in requests} == {None}
        probability = requests[0].full_pool_probability
        weights = [0.0 if one.pool_relevant is None else 1.0 / probability for one in requests]
        if probability:
            assert_mean(weights, 1.0)
        else:
            assert not whole

    def test_recall_by_the_hajek_ratio_is_the_truth(
        self, records: Sequence[SampleRecord], relevant: frozenset[str]
    ) -> None:
        sums = ratio_sums(Metric.POOLED_RECALL, [judged(record, relevant) for record in records])
        truth = len(relevant & {"p0", "p1", "p2"}) / len(relevant)
        assert sums.a / sums.b == pytest.approx(truth, abs=0.03)


def assert_mean(values: Sequence[float], truth: float) -> None:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    assert mean == pytest.approx(truth, abs=4.5 * (variance / len(values)) ** 0.5 + 1e-9)


def test_mixed_traffic_has_the_recall_and_mrr_of_all_of_it() -> None:
    rng = random.Random(2)
    kept = total = 0
    ranks, shares, requests = [], [], []
    for record in records_of(JudgingRates(0.2, 0.1, 0.6, 0.2)):
        right = frozenset(name for name in POOL if rng.random() < 0.15)
        served = [name for name in POOL[:3] if name in right]
        kept, total = kept + len(served), total + len(right)
        ranks.append(1 / (1 + POOL.index(served[0])) if served else 0.0)
        if right:
            shares.append(len(served) / len(right))
        requests.append(judged(record, right))
    found = {metric: ratio_sums(metric, requests) for metric in Metric}
    for metric, truth in (
        (Metric.POOLED_RECALL, kept / total),
        (Metric.RECALL, sum(shares) / len(shares)),
        (Metric.SERVED_MRR, sum(ranks) / len(ranks)),
    ):
        assert found[metric].a / found[metric].b == pytest.approx(truth, abs=0.03)


def test_recall_is_the_mean_of_requests_and_pooled_recall_the_ratio_of_all() -> None:
    whole = JudgingRates(1.0, 1.0, 1.0, 0.0)
    few = judged(record_of(whole), frozenset({"p0"}))
    many = judged(record_of(whole), frozenset({"p0", "p3", "p4", "p5"}))
    none = judged(record_of(whole), frozenset())
    found = [ratio_sums(m, [few, many, none]) for m in (Metric.RECALL, Metric.POOLED_RECALL)]
    assert [sums.a / sums.b for sums in found] == [(1 + 1 / 4) / 2, 2 / 5]
    assert [sums.n for sums in found] == [2, 2]


def test_pools_that_are_whole_only_where_nothing_was_served_show_no_recall() -> None:
    assert judged(record_of(JudgingRates(0.0, 0.0, 1.0, 0.0)), NO_HIT).recall is None


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
    def test_it_is_the_share_of_the_first_fews_relevant_that_was_not_served(
        self, rates: JudgingRates, relevant: frozenset[str], k: int, loss: float | None
    ) -> None:
        assert judged(record_of(rates, k=k), relevant).recall_loss == loss

    def test_a_pool_judged_because_nothing_served_was_relevant_has_none(self) -> None:
        record = record_of(JudgingRates(0.0, 0.0, 1.0, 0.0))
        assert record.to_judge(has_hit=False) == record.dropped
        assert judged(record, NO_HIT).pool_relevant == 2
        assert judged(record, NO_HIT).recall_loss is None

    def test_with_a_verdict_missing_among_the_first_few_it_is_unknown(self) -> None:
        record = record_of(self.FIRST_FIVE)
        verdicts = {name: Judgment(name, 1) for name in POOL[:4]}
        found = judged_request(record, verdicts, utilities=DEFAULT_UTILITIES, max_grade=1)
        assert found.recall_loss is None

    def test_the_mean_of_those_that_have_it_is_that_of_all(self) -> None:
        """Also where some pools are judged only because nothing relevant was served."""
        rng = random.Random(4)
        truth, found = [], []
        for record in records_of(JudgingRates(0.1, 0.1, 1.0, 0.2, baseline_k=10)):
            right = frozenset(name for name in POOL if rng.random() < 0.15)
            if right:
                truth.append(len(right - {"p0", "p1", "p2"}) / len(right))
            loss = judged(record, right).recall_loss
            if loss is not None:
                found.append(loss)
        assert len(found) == pytest.approx(0.28 * len(truth), rel=0.15)
        assert_mean(found, sum(truth) / len(truth))


class TestMissingVerdicts:
    def request(self, missing: frozenset[str], **rates: float) -> JudgedRequest:
        record = record_of(JudgingRates(**rates))
        verdicts = {
            name: Judgment(name, int(name in RELEVANT)) for name in POOL if name not in missing
        }
        return judged_request(record, verdicts, utilities=DEFAULT_UTILITIES, max_grade=1)

    def test_those_with_a_verdict_stand_for_those_without(self) -> None:
        found = self.request(frozenset({"p3", "p5", "p8"}), dropped_rate=1.0)
        assert found.dropped_relevant == pytest.approx(2 * 7 / 4)
        assert found.dropped_probability == pytest.approx(4 / 7)

    def test_a_pool_with_a_gap_is_none_but_says_what_was_found(self) -> None:
        found = self.request(frozenset({"p3"}), dropped_rate=1.0)
        assert (found.pool_relevant, found.partial_pool_relevant) == (None, 3)

    def test_where_no_dropped_passage_has_one_nothing_is_known_of_them(self) -> None:
        found = self.request(frozenset(POOL[3:]), dropped_rate=1.0)
        assert found.dropped_relevant is None

    def test_a_served_passage_without_one_is_told_from_one_that_is_not_relevant(self) -> None:
        """People's grades say what such passages are; the request is not dropped for it."""
        (row,) = table_of(self.request(frozenset({"p1"})).to_row())
        assert (row["missing"], row["yes"] & row["missing"]) == (1 << 1, 0)


def test_where_nothing_was_dropped_the_pool_is_whole() -> None:
    found = judged(record_of(ONLY_SERVED, k=10))
    assert (found.dropped_relevant, found.dropped_probability) == (0.0, 1.0)
    assert (found.pool_relevant, found.full_pool_probability) == (3, 1.0)


def test_where_nothing_dropped_may_be_judged_nothing_is_known_of_it() -> None:
    found = judged(record_of(ONLY_SERVED))
    assert found.dropped_relevant is None
    assert found.pool_relevant is None


def test_utilities_are_strict_and_grades_count_by_the_judges_scale() -> None:
    record = record_of(ONLY_SERVED)
    verdicts = {
        "p0": Judgment("p0", 3),
        "p1": Judgment("p1", 0, Negative.DISTRACTOR),
        "p2": Judgment("p2", 1),
    }
    found = judged_request(record, verdicts, utilities=DEFAULT_UTILITIES, max_grade=3)
    assert found.grades == (3, 0, 1)
    assert found.utilities == (1.0, -1.0, 0.5)
