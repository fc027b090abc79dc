"""Whatever a surface is given, it returns or raises an error of ctxguard's own.

A few inputs, the same everywhere and without measuring; `make fuzz` tries many more.
"""

from pathlib import Path

import pytest

from tests.fuzz.measured_run import run
from tests.fuzz.surface import SLOW, SURFACES


@pytest.mark.parametrize("name", SURFACES)
def test_surface_returns_or_raises_own_error(name: str, tmp_path: Path) -> None:
    n_inputs = 15 if name in SLOW else 60
    report = run(name, n_inputs, tmp_path, measure=False)
    assert (report.failures, report.inputs) == ([], n_inputs)
