"""Time limits: which values are refused."""

import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.resilience import Deadlines


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["total_seconds", "dense_seconds"])
def test_what_is_no_duration_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.* must be finite and > 0"):
        Deadlines(**{name: seconds})
