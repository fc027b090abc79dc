"""What the dashboard is made of: rows of panels, and the queries of each. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

ESTIMATE, LOWER, UPPER, UNCORRECTED = ("estimate", "lower", "upper", "judge alone, uncorrected")
"""The series of a band."""


class Shape(Enum):
    """How a panel draws its queries."""

    LINES = auto()
    STACKED = auto()
    LOGARITHMIC = auto()
    BAND = auto()
    """An estimate between the ends of its interval."""
    FIGURE = auto()
    """The last value, large."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: Shown above it.
        description: What it shows, and where no data is to be expected.
        queries: PromQL by name of its series; ``{{label}}`` in a name stands for a label's value.
        unit: Grafana's name of the unit: ``percentunit`` for a share in [0, 1], ``s``, ``reqps``.
        shape: How the queries are drawn.
        width: In 24ths of the page.
    """

    title: str
    description: str
    queries: Mapping[str, str]
    unit: str = "short"
    shape: Shape = Shape.LINES
    width: int = 8


class Row:
    """A titled row of panels."""

    def __init__(self, title: str, *panels: Panel) -> None:
        self.title = title
        self.panels = panels
