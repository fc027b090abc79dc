"""The rule by which several labels of one passage become one."""

import pytest

from ctxguard.monitor.labels.human import adjudicated
from ctxguard.monitor.store import LabelRow

HARD, DISTRACTOR = "hard_negative", "distractor"
Given = tuple[int, str | None, str, float]

ANN, EARLIER, BEN = (0, None, "ann", 2.0), (3, None, "ann", 1.0), (1, None, "ben", 1.0)


@pytest.mark.parametrize(
    ("labels", "grade", "negative", "is_disputed"),
    [
        ([ANN, EARLIER, BEN], 0, None, True),
        ([ANN, EARLIER], 0, None, False),
        ([(0, None, "ann", 1.0), (2, None, "ann", 1.0)], 2, None, False),
        (
            [(0, HARD, "ann", 3.0), (0, DISTRACTOR, "ben", 1.0), (0, None, "eve", 4.0)],
            0,
            HARD,
            False,
        ),
        (
            [(2, None, "ann", 1.0), (2, None, "ben", 1.0), (0, DISTRACTOR, "eve", 1.0)],
            2,
            None,
            True,
        ),
        ([(0, "damaged", "ann", 1.0)], 0, None, False),
    ],
    ids=["lower median", "latest", "later of one time", "latest kind", "relevant", "damaged"],
)
def test_labels_become_one(
    labels: list[Given], grade: int, negative: str | None, is_disputed: bool
) -> None:
    found, disputed = adjudicated([LabelRow("r", "p", *one) for one in labels])
    assert (found.grade, found.negative, disputed) == (grade, negative, is_disputed)
