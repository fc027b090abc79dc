"""Live estimates over a store of many requests: the published figures against the truth."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from storing import NOW, OpenStore

from ctxguard.core.context import Context
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.live import LiveEstimates, Window, live_estimates
from ctxguard.monitor.estimation.ratio import Precision
from ctxguard.monitor.estimation.terms import JudgedRequest, Metric
from ctxguard.monitor.sampling.inclusion import InclusionDesign, JudgingRates
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import Sample
from ctxguard.monitor.store import (
    WEIGHTED,
    Entry,
    Finished,
    LabelRow,
    SampleStore,
    State,
    WorkerCounts,
)

REQUESTS = 30_000
LABELS = 200
SERVED = 5
SERIES = "erring 1"
BATCH = 2_000
ONLY_SERVED = JudgingRates(0.0, 0.0, 0.0, 0.0)


def judged(grades: FloatArray, session_id: str | None = None) -> JudgedRequest:
    """A request of which what was served was judged, and nothing else."""
    relevant = tuple(grades.astype(int).tolist())
    utilities = tuple(1.0 if grade else -0.5 for grade in relevant)
    return JudgedRequest(1.0, relevant, utilities, None, 0.0, None, 0.0, 0.0, session_id)


def fill(store: SampleStore, record: SampleRecord, requests: Mapping[int, JudgedRequest]) -> None:
    """Store judged requests by their numbers, a second apart."""
    sessions = {request.session_id for request in requests.values()}
    payloads = {one: replace(record, session_id=one).to_bytes() for one in sessions}
    numbers = list(requests)
    for start in range(0, len(numbers), BATCH):
        batch = numbers[start : start + BATCH]
        entries = [
            Entry(f"r{n}", NOW + n, 1.0, None, 0.5, payloads[requests[n].session_id]) for n in batch
        ]
        store.append("w", entries, WorkerCounts(start + len(batch)))
        claimed = store.claim("m", len(batch), lease_seconds=600.0)
        store.finish(
            SERIES,
            [
                Finished(
                    one.sample_id, one.time_seconds, State.JUDGED, summary=requests[n].to_row()
                )
                for n, one in zip(batch, claimed, strict=True)
            ],
        )


def label(store: SampleStore, grades: Mapping[int, FloatArray]) -> None:
    """Label requests, by their numbers."""
    store.add_labels(
        [
            LabelRow(f"r{n}", f"p{rank}", int(grade), None, "ann", NOW)
            for n, of_served in grades.items()
            for rank, grade in enumerate(of_served.tolist())
        ]
    )


def estimated(store: SampleStore, window_seconds: float = REQUESTS / 3) -> LiveEstimates:
    return live_estimates(
        store,
        SERIES,
        exact=False,
        now_seconds=NOW + REQUESTS,
        window_seconds=window_seconds,
        utilities=DEFAULT_UTILITIES,
        max_grade=1,
        precision=Precision(),
    )


@pytest.fixture(scope="module")
def record(make_context: Callable[..., Context]) -> SampleRecord:
    """A sample of which only what was served is judged; it serves for every request."""
    context = make_context([f"p{rank}" for rank in range(SERVED)], SERVED)
    return record_of(Sample(context, 1.0, NOW), InclusionDesign(ONLY_SERVED))


@pytest.fixture(scope="module")
def truth() -> FloatArray:
    """Relevance of what was served, shape (n, 5): its precision falls from 0.8 to 0.4."""
    precision = np.linspace(0.8, 0.4, REQUESTS)
    return (np.random.default_rng(1).random((REQUESTS, SERVED)) < precision[:, None]) * 1.0


@pytest.fixture(scope="module")
def judged_store(
    truth: FloatArray, record: SampleRecord, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A SQLite file with all requests, graded by a judge of 0.85 sensitivity, 0.9 specificity."""
    luck = np.random.default_rng(2).random(truth.shape)
    verdicts = np.where(truth > 0, luck < 0.85, luck < 0.1) * 1.0
    path = tmp_path_factory.mktemp("store") / "samples.db"
    with SampleStore.open(f"sqlite:///{path}") as store:
        fill(store, record, {n: judged(grades) for n, grades in enumerate(verdicts)})
    return path


@pytest.fixture
def published(
    judged_store: Path, truth: FloatArray, tmp_path: Path, open_store: OpenStore
) -> Callable[[int], LiveEstimates]:
    """The estimates once people have labelled a random sample, by its seed."""

    def with_labels(seed: int) -> LiveEstimates:
        path = tmp_path / f"{seed}.db"
        shutil.copy(judged_store, path)
        store = open_store(f"sqlite:///{path}")
        numbers = np.random.default_rng(seed).choice(REQUESTS, LABELS, replace=False)
        label(store, {n: truth[n] for n in numbers.tolist()})
        return estimated(store)

    return with_labels


def test_labels_of_the_whole_window_correct_all_of_its_judgments(
    published: Callable[[int], LiveEstimates], truth: FloatArray
) -> None:
    """Also where the quality has fallen, and far more was judged than is labelled."""
    found = [published(seed).estimates for seed in range(8)]
    for window, first in ((Window.ALL_RETAINED, 0), (Window.RECENT, REQUESTS * 2 // 3)):
        expected = float(truth[first:].mean())
        precision = [estimates[window][Metric.PRECISION] for estimates in found]
        assert sum(one.lower <= expected <= one.upper for one in precision) >= 7
        mean = sum(one.value for one in precision) / len(precision)
        assert mean == pytest.approx(expected, abs=0.02)
        assert max(one.upper - one.lower for one in precision) < 0.2


def test_the_requests_of_a_labelled_session_that_have_no_labels_are_left_out(
    truth: FloatArray, record: SampleRecord, open_store: OpenStore
) -> None:
    sessions = {n: judged(truth[n], f"s{n // 2}") for n in range(400)}
    labels = {n: truth[n] for n in range(0, 160, 2)}
    partners = {n + 1 for n in labels}
    found = []
    for left_out in (set(), partners):
        store = open_store("sqlite://")
        fill(store, record, {n: one for n, one in sessions.items() if n not in left_out})
        label(store, labels)
        found.append(estimated(store, window_seconds=REQUESTS * 2).estimates[Window.ALL_RETAINED])
    assert found[0][Metric.PRECISION].n == 80
    assert found[0][Metric.PRECISION].value is not None
    for metric in Metric:
        assert astuple(found[0][metric]) == pytest.approx(astuple(found[1][metric]))


def test_a_session_with_labels_picked_at_different_weights_fails_no_report(
    truth: FloatArray, record: SampleRecord, open_store: OpenStore
) -> None:
    store = open_store("sqlite://")
    fill(store, record, {n: judged(truth[n], f"s{n // 2}") for n in range(400)})
    labels = {n: truth[n] for n in range(160)}
    first = [int(truth[n][0]) for n in labels]
    assert any(one != other for one, other in zip(first[::2], first[1::2], strict=True))
    ids = [store.find(f"r{n}")[0] for n in labels]
    store.queue_labels(ids, reason=WEIGHTED)
    label(store, labels)
    found = estimated(store).estimates[Window.ALL_RETAINED][Metric.PRECISION]
    assert found.n == 80
    assert found.lower <= truth[:400].mean() <= found.upper


def test_all_labels_before_the_recent_window_leave_it_without_an_estimate(
    truth: FloatArray, record: SampleRecord, open_store: OpenStore
) -> None:
    store = open_store("sqlite://")
    fill(store, record, {n: judged(truth[n]) for n in range(0, REQUESTS, 100)})
    label(store, {n: truth[n] for n in range(0, 10_000, 100)})
    found = estimated(store).estimates
    assert found[Window.ALL_RETAINED][Metric.PRECISION].n == 100
    assert found[Window.RECENT][Metric.PRECISION].value is None
    assert found[Window.RECENT][Metric.PRECISION].n == 0
