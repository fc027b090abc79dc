"""One value with its interval and its n: the type of every estimate in the project."""

from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        value: The estimate; None where it is undefined, or must not be shown.
        lower: Lower end of its interval; None without one.
        upper: Upper end, as ``lower``.
        n: Observations on which the value is defined, usually queries; at least 0.
    """

    value: float | None
    lower: float | None
    upper: float | None
    n: int

    @classmethod
    def undefined(cls, n: int = 0) -> Self:
        """Return an estimate without a value."""
        return cls(None, None, None, n)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends; None unless there are two.

        >>> Interval(0.5, 0.25, 0.75, 9).bounds
        (0.25, 0.75)
        """
        return None if self.lower is None or self.upper is None else (self.lower, self.upper)

    @property
    def side(self) -> Literal["higher", "lower"] | None:
        """The side of 0 on which the whole interval lies; None if it holds 0, or has no ends.

        >>> Interval(0.5, 0.25, 0.75, 9).side, Interval(0.1, -0.2, 0.4, 9).side
        ('higher', None)
        """
        if self.bounds is None or self.bounds[0] <= 0.0 <= self.bounds[1]:
            return None
        return "higher" if self.bounds[0] > 0.0 else "lower"
