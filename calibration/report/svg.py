"""Charts as SVG: axes, lines, and points with intervals.

The text is readable where a chart is as narrow as a phone. Colours are names of classes, which the
style sheet of the page sets for a light screen, a dark one and paper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ctxguard.core.interval import Interval

WIDTH, HEIGHT = 400, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 392, 8, 238
_MOST_TICKS = 7

_SYMBOLS = {
    "circle": "M{x},{y}m-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "square": "M{x},{y}m-4.5,-4.5h9v9h-9z",
    "dot": "M{x},{y}m-2.5,0a2.5,2.5 0 1,0 5,0a2.5,2.5 0 1,0 -5,0z",
    "line": "M{x},{y}m-7,-1h14v2h-14z",
}

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``.

    >>> Axis("share", 0.0, 1.0).ticks
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """

    label: str
    low: float
    high: float

    @property
    def ticks(self) -> tuple[float, ...]:
        """Round values, at most 7, in steps of 1, 2 or 5 times a power of ten."""
        span = self.high - self.low
        scale = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
        step = next(n * scale for n in (1, 2, 5, 10, 20) if span / (n * scale) <= _MOST_TICKS - 1)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return tuple(round(n * step, 10) for n in range(first, last + 1))

    def share(self, value: float) -> float:
        """Place a value between the ends, clipped to them."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def spanning(label: str, values: Iterable[float | None]) -> Axis:
    """Make an axis that holds 0 and all values, with a little room beyond them."""
    known = [0.0, *[value for value in values if value is not None]]
    low, high = min(known), max(known)
    room = 0.06 * (high - low) or 0.5
    return Axis(label, low - room if low < 0.0 else low, high + room)


class Chart:
    """One chart; what is drawn first lies below.

    Args:
        x: The horizontal axis.
        y: The vertical axis.
        description: For those who do not see it.
    """

    def __init__(self, x: Axis, y: Axis, description: str) -> None:
        self._x, self._y, self._description = x, y, description
        self._marks: list[str] = []
        self._keys: list[tuple[str, str, str]] = []

    def line(self, points: Sequence[Point], colour: str, name: str = "") -> None:
        """Draw a line through points."""
        if points:
            path = "L".join(self._at(*point) for point in points)
            self._add(colour, f'<path class="line" d="M{path}"/>', "line", name)

    def point(
        self,
        at: Sequence[Interval | float | None],
        colour: str,
        symbol: str = "circle",
        name: str = "",
    ) -> None:
        """Draw a point at (x, y) with the intervals that it has; nothing if it has no values."""
        x, y = (
            each if isinstance(each, Interval) else Interval(each, None, None, 0) for each in at
        )
        if x.value is None or y.value is None:
            return
        bars = ""
        if x.bounds is not None:
            bars += "M" + "L".join(self._at(end, y.value) for end in x.bounds)
        if y.bounds is not None:
            bars += "M" + "L".join(self._at(x.value, end) for end in y.bounds)
        left, top = self._place(x.value, y.value)
        drawn = _SYMBOLS[symbol].format(x=f"{left:.1f}", y=f"{top:.1f}")
        lines = f'<path class="bars" d="{bars}"/>' if bars else ""
        self._add(colour, f'{lines}<path class="mark" d="{drawn}"/>', symbol, name)

    def level(self, y: float) -> None:
        """Draw a dashed line across the chart."""
        path = f"M{self._at(self._x.low, y)}L{self._at(self._x.high, y)}"
        self._add("grey", f'<path class="level" d="{path}"/>', "line", "")

    def render(self) -> str:
        """Write the chart with its legend, as HTML."""
        label = f'role="img" aria-label="{escape(self._description)}"'
        keys = "".join(
            f'<span><svg class="{colour}" viewBox="0 0 16 16" aria-hidden="true"><path '
            f'class="mark {symbol}" d="{_SYMBOLS[symbol].format(x=8, y=8)}"/></svg>'
            f"{escape(name)}</span>"
            for colour, symbol, name in self._keys
        )
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{self._axes()}'
            f'{"".join(self._marks)}</svg><div class="keys">{keys}</div>'
        )

    def _add(self, colour: str, shape: str, symbol: str, name: str) -> None:
        self._marks.append(f'<g class="{colour}">{shape}</g>')
        if name:
            self._keys.append((colour, symbol, name))

    def _place(self, x: float, y: float) -> Point:
        left = _LEFT + (_RIGHT - _LEFT) * self._x.share(x)
        return left, _BOTTOM - (_BOTTOM - _TOP) * self._y.share(y)

    def _at(self, x: float, y: float) -> str:
        return "{:.1f},{:.1f}".format(*self._place(x, y))

    def _axes(self) -> str:
        parts = []
        for value in self._x.ticks:
            left, _ = self._place(value, self._y.low)
            parts.append(f'<path class="grid" d="M{left:.1f},{_TOP}V{_BOTTOM}"/>')
            place = f'x="{left:.1f}" y="{_BOTTOM + 15}"'
            parts.append(f'<text {place} text-anchor="middle">{_words(value)}</text>')
        for value in self._y.ticks:
            _, top = self._place(self._x.low, value)
            parts.append(f'<path class="grid" d="M{_LEFT},{top:.1f}H{_RIGHT}"/>')
            place = f'x="{_LEFT - 5}" y="{top + 4:.1f}"'
            parts.append(f'<text {place} text-anchor="end">{_words(value)}</text>')
        middle_x, middle_y = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
        parts.append(
            f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self._x.label)}'
            f'</text><text transform="translate(12,{middle_y}) rotate(-90)" text-anchor="middle">'
            f"{escape(self._y.label)}</text>"
        )
        return "".join(parts)


def _words(value: float) -> str:
    return f"{value:g}".replace("-", "−")
