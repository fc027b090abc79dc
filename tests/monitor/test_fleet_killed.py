"""The accounts of a fleet on PostgreSQL whose writers are killed; on SQLite see tests/chaos."""

import os

import pytest
from fleet_faults import writers_killed

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.parametrize("n", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_killed_fleets_samples_add_up(postgresql_url: str, n: int) -> None:
    assert writers_killed(postgresql_url, n).wrong == ()
