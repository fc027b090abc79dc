"""Draws the chart of a route: recall against tokens, as SVG. Pure.

The text stays readable on a screen as narrow as a phone's. Colours are names of classes, which the
style sheet of the page sets for a light screen, a dark one and paper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from calibration.report.content import RouteReport
from calibration.report.dial import DialStop
from calibration.settings import SIZES
from ctxguard.measure.interval import Interval

WIDTH, HEIGHT = 400, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 392, 8, 238
_MOST_TICKS = 7
_LETTER = 6.6
"""A generous width of a letter at the size of a chart's text."""
_DESCRIPTION = "Recall against {}: the first k for every k, today's context, leaner and richer ones"

_SYMBOLS = {
    "circle": "M{x},{y}m-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "square": "M{x},{y}m-4.5,-4.5h9v9h-9z",
    "dot": "M{x},{y}m-2.5,0a2.5,2.5 0 1,0 5,0a2.5,2.5 0 1,0 -5,0z",
    "ring": "M{x},{y}m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "line": "M{x},{y}m-7,-1h14v2h-14z",
}


def frontier(route: RouteReport, stops: Sequence[DialStop] = ()) -> str:
    """Draw today's context, leaner and richer ones, and the first k for every k, by tokens.

    Passages are counted where tokens are not known. The stops are sizes between, which a script
    marks as the dial turns.
    """
    summary, results, has_tokens = route.summary, route.summary.results, bool(route.tokens_of_first)
    metric = "tokens" if has_tokens else "kept"
    sizes, recall = (
        {name: results.of(name, each).mean for name in results.policies}
        for each in (metric, "recall")
    )
    first = route.tokens_of_first or range(1, len(route.recall_of_first) + 1)
    known = [each.value or 0.0 for each in sizes.values()]
    most = max([*known, *(getattr(stop, metric) or 0.0 for stop in stops)], default=1.0) or 1.0
    line = [
        (float(size), own)
        for size, own in zip(first, route.recall_of_first, strict=True)
        if size <= 1.1 * most
    ]
    placed = [
        (stop, (float(size), stop.recall))
        for stop in stops
        if (size := getattr(stop, metric)) is not None and stop.recall is not None
    ]
    # Stops stand in the order of passages, a line in that of its axis; today's is no policy.
    policies = sorted(place for stop, place in placed if stop.names[:1] != ("today",))
    ends = [end for each in recall.values() for end in (each.value, *(each.bounds or ()))]
    ends += [own for _, own in (*line, *(place for _, place in placed))]
    low = min((end for end in ends if end is not None), default=0.0)
    # Without the empty part below, if that is large.
    plot = _Plot(1.15 * most, max(round(low - 0.15, 1), 0.0) if low > 0.3 else 0.0)
    across = "tokens a question" if has_tokens else "passages a question"
    shapes, keys, marks = list[str](), list[str](), list[tuple[str, float, float]]()

    def add(colour: str, symbol: str, shape: str, name: str) -> None:
        shapes.append(f'<g class="{colour}">{shape}</g>')
        keys.append(_key(colour, symbol, name) if name else "")

    def add_policy(row: str, name: str, colour: str, symbol: str, key: str) -> None:
        size, own = sizes[name], recall[name]
        if size.value is not None and own.value is not None:
            place = plot.place(size.value, own.value)
            bars = "" if symbol == "ring" else plot.bars(size, own)
            add(colour, "circle" if symbol == "ring" else symbol, bars + _mark(place, symbol), key)
            marks.append((row, *place))

    if line:
        dots = "".join(_mark(plot.place(*point), "dot") for point in line)
        path = f'<path class="line" d="{plot.path(line)}"/>'
        add("grey", "line", path + dots, "first k, for every k")
    if placed:
        places = [plot.place(*place) for _, place in placed]
        rings = [f'<circle class="stop" cx="{at:.1f}" cy="{top:.1f}" r="7"/>' for at, top in places]
        path = f'<path class="line thin" d="{plot.path(policies)}"/>'
        add("blue", "line", path + "".join(rings), "sizes of context")
    today = results.reference
    for row, name in summary.by_size.items():
        if name == today or not set(row.split(", ")) <= {"chosen", *SIZES}:
            continue
        if row == summary.chosen:
            add_policy(row, name, "blue", "circle", "chosen")
        else:
            add_policy(row, name, "blue", "ring", "")
    first_row = next(iter(summary.by_size))
    add_policy(first_row, today, "orange", "square", f"today: first {summary.serving_k}")
    label = f'role="img" aria-label="{escape(_DESCRIPTION.format(across))}"'
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{plot.axes(across)}'
        f'{"".join(shapes)}{_labels(marks)}</svg><div class="keys">{"".join(keys)}</div>'
    )


@dataclass(frozen=True)
class _Plot:
    """The plot area: sizes from 0 to ``most`` across, recall from ``least`` to 1 upwards."""

    most: float
    least: float

    def place(self, size: float, recall: float) -> tuple[float, float]:
        across = min(max(size / self.most, 0.0), 1.0)
        up = min(max((recall - self.least) / (1.0 - self.least), 0.0), 1.0)
        return _LEFT + (_RIGHT - _LEFT) * across, _BOTTOM - (_BOTTOM - _TOP) * up

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join("{:.1f},{:.1f}".format(*self.place(*point)) for point in points)

    def bars(self, size: Interval, recall: Interval) -> str:
        """Draw a point's intervals, if it has any."""
        at, own = size.value or 0.0, recall.value or 0.0
        drawn = self.path([(end, own) for end in size.bounds]) if size.bounds else ""
        drawn += self.path([(at, end) for end in recall.bounds]) if recall.bounds else ""
        return f'<path class="bars" d="{drawn}"/>' if drawn else ""

    def axes(self, across: str) -> str:
        parts = []
        for value in _ticks(0.0, self.most):
            left, _ = self.place(value, self.least)
            parts.append(f'<path class="grid" d="M{left:.1f},{_TOP}V{_BOTTOM}"/>')
            place = f'x="{left:.1f}" y="{_BOTTOM + 15}"'
            parts.append(f'<text {place} text-anchor="middle">{value:,.6g}</text>')
        for value in _ticks(self.least, 1.0):
            _, top = self.place(0.0, value)
            parts.append(f'<path class="grid" d="M{_LEFT},{top:.1f}H{_RIGHT}"/>')
            place = f'x="{_LEFT - 5}" y="{top + 4:.1f}"'
            parts.append(f'<text {place} text-anchor="end">{value:g}</text>')
        middle_x, middle_y = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
        parts.append(
            f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}'
            f'</text><text transform="translate(12,{middle_y}) rotate(-90)" text-anchor="middle">'
            "recall</text>"
        )
        return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return round values, at most 7, in steps of 1, 2 or 5 times a power of ten.

    >>> _ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    scale = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    step = next(
        n * scale for n in (1, 2, 5, 10, 20) if (high - low) / (n * scale) <= _MOST_TICKS - 1
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def _mark(place: tuple[float, float], symbol: str) -> str:
    left, top = place
    drawn = _SYMBOLS[symbol].format(x=f"{left:.1f}", y=f"{top:.1f}")
    return f'<path class="mark" d="{drawn}"/>'


def _key(colour: str, symbol: str, name: str) -> str:
    drawn = _SYMBOLS[symbol].format(x=8, y=8)
    return (
        f'<span><svg class="{colour}" viewBox="0 0 16 16" aria-hidden="true">'
        f'<path class="mark {symbol}" d="{drawn}"/></svg>{escape(name)}</span>'
    )


def _labels(marks: Sequence[tuple[str, float, float]]) -> str:
    """Write names beside points, each where it covers no other name or point."""
    taken = [(at - 6, top - 6, at + 6, top + 6) for _, at, top in marks]
    written = []
    for name, at, top in marks:
        width = _LETTER * len(name)
        places = [
            (left, base)
            for far in (0, 14, 28, 42)
            for left, base in (
                (at - 9 - width, top - 6 - far),
                (at + 9, top + 16 + far),
                (at + 9, top - 6 - far),
                (at - 9 - width, top + 16 + far),
            )
            if left >= _LEFT and left + width <= _RIGHT and _TOP + 11 <= base <= _BOTTOM - 3
        ]
        boxes = [(left, base - 11, left + width, base + 3) for left, base in places]
        free = [box for box in boxes if not any(_overlap(box, other) for other in taken)]
        if boxes:
            box = (free or boxes)[0]
            taken.append(box)
            written.append(f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}">{escape(name)}</text>')
    return "".join(written)


_Box = tuple[float, float, float, float]


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
