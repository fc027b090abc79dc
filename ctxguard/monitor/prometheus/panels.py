"""What a dashboard is made of: rows of panels, and the queries behind each. Pure data."""

from dataclasses import dataclass
from enum import Enum


class Shape(Enum):
    """How a panel draws its queries."""

    LINES = "lines"
    STACKED = "stacked"
    LOGARITHMIC = "logarithmic"
    BAND = "band"
    """An estimate between its ends; its queries are named by ``BAND``."""
    FIGURE = "figure"
    """The last value, large."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression.

    Attributes:
        legend: Name of its series; ``{{label}}`` stands for a label's value.
    """

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        description: What it means, and where no data is to be expected.
        unit: As Grafana names it: ``percentunit`` for a share in [0, 1], ``s``, ``reqps``.
        width: In 24ths of the page.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    shape: Shape = Shape.LINES
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


ESTIMATE, LOWER, UPPER, UNCORRECTED = BAND = (
    "estimate",
    "lower",
    "upper",
    "judge alone, uncorrected",
)
"""The names of a band's series."""
