"""The chart of a route: recall against the passages kept, as SVG.

The text is readable where a chart is as narrow as a phone. Colours are names of classes, which the
style sheet of the page sets for a light screen, a dark one and paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from calibration.report.summary import Summary
from ctxguard.core.interval import Interval

WIDTH, HEIGHT = 400, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 392, 8, 238
_MOST_TICKS = 7
_DESCRIPTION = "Recall against the passages kept: today's first passages and the chosen policy"

_SYMBOLS = {
    "circle": "M{x},{y}m-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "square": "M{x},{y}m-4.5,-4.5h9v9h-9z",
    "dot": "M{x},{y}m-2.5,0a2.5,2.5 0 1,0 5,0a2.5,2.5 0 1,0 -5,0z",
    "line": "M{x},{y}m-7,-1h14v2h-14z",
}


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


def recall_by_kept(summary: Summary, recall_of_first: Sequence[float]) -> str:
    """Draw the first k, what is served today, the choice and the other policies.

    Args:
        summary: The policies of a route, with their recall and passages kept.
        recall_of_first: Recall of the retriever's first k passages for k = 1, 2, …
    """
    results = summary.results
    kept, recall = (
        {name: results.of(name, metric).mean for name in results.policies}
        for metric in ("kept", "recall")
    )
    most = max([2.0 * summary.serving_k, *(each.value or 0.0 for each in kept.values())])
    line = [(float(k), own) for k, own in enumerate(recall_of_first, 1) if k <= most]
    x = Axis("passages kept per query", 0.0, 1.06 * most)
    y = _around([*recall.values(), *(_bare(own) for _, own in line)])
    today, chosen, *others = results.policies
    shapes, keys = list[str](), list[str]()

    def add(colour: str, symbol: str, shape: str, name: str) -> None:
        if shape:
            shapes.append(f'<g class="{colour}">{shape}</g>')
            keys.append(_key(colour, symbol, name) if name else "")

    if line:
        path = "L".join(_at(x, y, *point) for point in line)
        add("grey", "line", f'<path class="line" d="M{path}"/>', "first k, for every k")
    for place, policy in enumerate(others):
        shape = _point(x, y, _bare(kept[policy]), _bare(recall[policy]), "dot")
        add("grey", "dot", shape, "" if place else "other policies")
    for policy, colour, symbol, name in (
        (today, "orange", "square", f"today: first {summary.serving_k}"),
        (chosen, "blue", "circle", "chosen policy"),
    ):
        add(colour, symbol, _point(x, y, kept[policy], recall[policy], symbol), name)
    label = f'role="img" aria-label="{escape(_DESCRIPTION)}"'
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{_axes(x, y)}'
        f'{"".join(shapes)}</svg><div class="keys">{"".join(keys)}</div>'
    )


def _bare(value: Interval | float | None) -> Interval:
    """Return a value without its bounds."""
    return Interval(value.value if isinstance(value, Interval) else value, None, None, 0)


def _around(found: Sequence[Interval]) -> Axis:
    """Make the axis of recall, which leaves out the empty part below, as far as it is large."""
    known = [end for each in found for end in (each.value, *(each.bounds or ())) if end is not None]
    low = min(known, default=0.0)
    return Axis("recall", max(round(low - 0.15, 1), 0.0) if low > 0.3 else 0.0, 1.0)


def _point(x: Axis, y: Axis, kept: Interval, recall: Interval, symbol: str) -> str:
    """Draw a point with the intervals that it has; nothing if it has no values."""
    if kept.value is None or recall.value is None:
        return ""
    bars = ""
    if kept.bounds is not None:
        bars += "M" + "L".join(_at(x, y, end, recall.value) for end in kept.bounds)
    if recall.bounds is not None:
        bars += "M" + "L".join(_at(x, y, kept.value, end) for end in recall.bounds)
    left, top = _place(x, y, kept.value, recall.value)
    drawn = _SYMBOLS[symbol].format(x=f"{left:.1f}", y=f"{top:.1f}")
    lines = f'<path class="bars" d="{bars}"/>' if bars else ""
    return f'{lines}<path class="mark" d="{drawn}"/>'


def _key(colour: str, symbol: str, name: str) -> str:
    drawn = _SYMBOLS[symbol].format(x=8, y=8)
    return (
        f'<span><svg class="{colour}" viewBox="0 0 16 16" aria-hidden="true">'
        f'<path class="mark {symbol}" d="{drawn}"/></svg>{escape(name)}</span>'
    )


def _place(x: Axis, y: Axis, kept: float, recall: float) -> tuple[float, float]:
    left = _LEFT + (_RIGHT - _LEFT) * x.share(kept)
    return left, _BOTTOM - (_BOTTOM - _TOP) * y.share(recall)


def _at(x: Axis, y: Axis, kept: float, recall: float) -> str:
    return "{:.1f},{:.1f}".format(*_place(x, y, kept, recall))


def _axes(x: Axis, y: Axis) -> str:
    parts = []
    for value in x.ticks:
        left, _ = _place(x, y, value, y.low)
        parts.append(f'<path class="grid" d="M{left:.1f},{_TOP}V{_BOTTOM}"/>')
        place = f'x="{left:.1f}" y="{_BOTTOM + 15}"'
        parts.append(f'<text {place} text-anchor="middle">{value:g}</text>')
    for value in y.ticks:
        _, top = _place(x, y, x.low, value)
        parts.append(f'<path class="grid" d="M{_LEFT},{top:.1f}H{_RIGHT}"/>')
        place = f'x="{_LEFT - 5}" y="{top + 4:.1f}"'
        parts.append(f'<text {place} text-anchor="end">{value:g}</text>')
    middle_x, middle_y = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}'
        f'</text><text transform="translate(12,{middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)
