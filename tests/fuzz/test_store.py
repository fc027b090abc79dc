"""Whatever a row of the sample store holds, it is read or refused by an error of ctxguard's own."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice

import pytest
import sqlalchemy as sa

from ctxguard.core.types import Hit, Passage, ScoreKind
from ctxguard.errors import CtxguardError
from ctxguard.guard import ContextGuard
from ctxguard.monitor.alarms import AlarmState
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import FeedbackRow, LabelDepth, LabelRow, SampleStore, schema
from tests.core.test_profile import PROFILE
from tests.fuzz.mutations import EXAMPLES, damaged, handled

NOW = 1_000_000.0
HITS = [Hit("a", 2.0, "one"), Hit("b", 1.0, "two")]


class Judge:
    """Grades every passage 1."""

    name, version, max_grade, exact = "fuzz", "1", 3, False

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        return [Judgment(passage.passage_id, 1) for passage in passages]


@dataclass
class Watched:
    """A monitor and its store, in which every table holds rows."""

    store: SampleStore
    monitor: Monitor

    def read(self) -> None:
        """Everything that reads rows, each whatever the others raise."""
        store, series = self.store, self.monitor.series
        calls: list[Callable[[], object]] = [
            *(self.monitor.step, self.monitor.maintain, self.monitor.restore_alarms),
            *(store.accounts, store.states, store.label_queue),
            *(store.feedback_counts, store.fold_accounts),
            lambda: store.feedback([1, 2]),
            lambda: store.labels([1, 2]),
            lambda: store.samples_of("r0"),
            lambda: store.verdicts(series, [1, 2]),
            lambda: store.graded(series),
            lambda: store.next_for_labels(series, 3, depth=LabelDepth.POOL),
        ]
        for call in calls:
            with suppress(CtxguardError):
                call()


@pytest.fixture(scope="module")
def watched() -> Watched:
    store = SampleStore.open("sqlite://", clock=lambda: NOW)
    sampler = Sampler(1.0)
    guard = ContextGuard(lambda query, depth: HITS, score_kind=ScoreKind.RATIO, k=1)
    writer = SampleWriter(sampler, store)
    alarms = AlarmState(PROFILE)
    monitor = Monitor(store, Judge(), alarms=alarms, clock=lambda: NOW)
    for n in range(4):
        sampler.offer(guard.retrieve("q", request_id=f"r{n}"), 0.5, NOW)
    writer.flush()
    monitor.step()
    store.pick_for_labels(monitor.series, 2)
    labelled = [LabelRow(f"r{n}", name, 1, None, "me", NOW) for n in range(4) for name in "ab"]
    store.add_labels(labelled)
    store.add_feedback([FeedbackRow("r0", "cited", ("a",), NOW)])
    store.queue_labels([1], reason="why")
    for n in range(4, 6):
        sampler.offer(guard.retrieve("q", request_id=f"r{n}"), 0.5, NOW)
    writer.flush()
    monitor.maintain()
    return Watched(store, monitor)


COLUMNS = [
    (table.name, column.name)
    for table in schema.metadata.sorted_tables
    for column in table.columns
    if isinstance(column.type, sa.Text | sa.LargeBinary) and not column.primary_key
]


def test_damaged_values_are_read_or_refused(watched: Watched) -> None:
    connection = watched.store._database._current().raw_connection().driver_connection
    whole = connection.serialize()
    inputs = []
    for table, column in COLUMNS:
        row = connection.execute(f"SELECT {column} FROM {table}").fetchone()  # noqa: S608
        (value,) = row or ("",)
        content = value if isinstance(value, bytes) else str(value).encode()
        inputs.append((table, column, isinstance(value, bytes), damaged(content)))
    for table, column, is_bytes, changes_of in islice(cycle(inputs), EXAMPLES):
        changed = next(changes_of)
        given = changed if is_bytes else changed.decode("utf-8", "replace")
        connection.execute(f"UPDATE {table} SET {column} = ?", [given])  # noqa: S608
        connection.commit()
        try:
            with handled(changed):
                watched.read()
        finally:
            connection.deserialize(whole)
