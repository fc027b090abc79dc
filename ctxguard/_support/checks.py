"""Checks settings given by name; None passes, because it disables a limit. Pure."""

import math

from ctxguard.errors import ConfigurationError


def check_at_least(least: int, **values: float | None) -> None:
    """Refuse values below a minimum with a `ConfigurationError`."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigurationError(f"{name} {value!r} must be at least {least}")


def check_positive(**values: float | None) -> None:
    """Refuse durations and rates that are not finite or not positive.

    >>> check_positive(deadline_seconds=None, leg_seconds=0.0)
    Traceback (most recent call last):
    ctxguard.errors.ConfigurationError: leg_seconds 0.0 must be finite and > 0
    """
    for name, value in values.items():
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigurationError(f"{name} {value!r} must be finite and > 0")
