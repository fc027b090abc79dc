"""Which samples a person should label after an alarm, so that the labels tell most.

Pure: no I/O, no clock, no logging.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ctxguard.errors import ConfigurationError
from ctxguard.types import Route


class JudgedSample(NamedTuple):
    """What is known of a judged sample.

    Attributes:
        loss: What the judge made of it, in the unit of the alarm: recall loss, or harm. ≥ 0.
        served: How many passages were served: what labelling it costs.
        disagreement: How far judges or labels are apart on it, ≥ 0; None where only one spoke.
    """

    sample_id: str
    route: Route
    loss: float
    served: int
    disagreement: float | None = None


def where_labels_tell_most(samples: Iterable[JudgedSample], n: int) -> list[str]:
    """Choose samples for human labels after an alarm.

    The alarm rests on the largest losses, so they come first: if the judge is wrong, it is wrong
    there. Of equal ones those on which judges disagree most, then those with least to read. The
    routes take turns. **Not a random sample**: labels of these confirm or refute an alarm, and
    must never enter an estimate (``ctxguard.monitor.ppi`` presumes a random one).

    Args:
        samples: Recent judged samples, one route's or several'. Of one id the last is taken.
        n: How many to choose, ≥ 0.

    Returns:
        Up to ``n`` different sample ids, most telling first.

    Raises:
        ConfigurationError: n below 0.

    >>> where_labels_tell_most([
    ...     JudgedSample("a", Route.HYBRID, loss=0.2, served=3),
    ...     JudgedSample("b", Route.HYBRID, loss=1.0, served=3),
    ...     JudgedSample("c", Route.LEXICAL, loss=0.5, served=3),
    ... ], 2)
    ['b', 'c']
    """
    if n < 0:
        raise ConfigurationError(f"n {n!r} must be at least 0: it is how many to choose")
    by_route: dict[Route, list[JudgedSample]] = {}
    for sample in sorted({each.sample_id: each for each in samples}.values(), key=_telling):
        by_route.setdefault(sample.route, []).append(sample)
    turns = [
        (turn, _telling(sample), sample.sample_id)
        for own in by_route.values()
        for turn, sample in enumerate(own)
    ]
    return [sample_id for _, _, sample_id in sorted(turns)[:n]]


def _telling(sample: JudgedSample) -> tuple[float, float, int, str]:
    """Smaller tells more."""
    return -sample.loss, -(sample.disagreement or 0.0), sample.served, sample.sample_id
