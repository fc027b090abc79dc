"""The charts of a calibration report, as plotly figures of ``ReportData``.

The style sheet of the page sets the colours of text, grid and background, for a light screen, a
dark one and paper.
"""

import html
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from calibration.report.data import (
    MetricComparison,
    Price,
    Reliability,
    RouteReport,
    Segments,
)
from ctxguard._support.extras import require
from ctxguard.profile.schema import Interval

BLUE, ORANGE, GREEN, RED, GREY = "#3f87c9", "#d9822b", "#2a9d6f", "#d1495b", "#8a8f98"

_LABEL_WIDTH = 20
_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}
_UNITLESS = ("recall", "precision", "mrr", "ndcg", "udcg", "udcg_strict", "harm", "recall_loss")


def library() -> str:
    """The source of plotly.js, which the page holds once.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    source: str = require("plotly.offline", "report").get_plotlyjs()
    return source


def chart(figure: Any, name: str) -> str:
    """A figure as an HTML element with this id, without the library."""
    rendered: str = require("plotly.io", "report").to_html(
        figure, full_html=False, include_plotlyjs=False, div_id=name, config=_CONFIG
    )
    return rendered


def _figure(height: int, **layout: Any) -> Any:
    objects = require("plotly.graph_objects", "report")
    figure = objects.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 16, "t": 16, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
        **layout,
    )
    figure.update_xaxes(automargin=True, zeroline=False, title_standoff=8)
    figure.update_yaxes(automargin=True, zeroline=False, title_standoff=8)
    return figure


def _spread(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Error bars of intervals; no bar where an interval has no bounds."""
    values = [interval.value or 0.0 for interval in intervals]
    bounds = {
        "array": [interval.upper for interval in intervals],
        "arrayminus": [interval.lower for interval in intervals],
    }
    lengths = {
        side: [0.0 if b is None else abs(b - v) for b, v in zip(ends, values, strict=True)]
        for side, ends in bounds.items()
    }
    return {"type": "data", "symmetric": False, "thickness": 1.5, "width": 4, **lengths}


def differences(comparison: Sequence[MetricComparison], bare_k: int) -> Any:
    """Chosen policy minus each of the two others, by metric, with paired intervals."""
    rows = [row for name in _UNITLESS for row in comparison if row.metric == name][::-1]
    arrows = {"higher": "↑", "lower": "↓", None: ""}
    figure = _figure(60 + 42 * len(rows), scattermode="group", scattergap=0.6)
    for name, colour, intervals in (
        ("against 3 and 70%", ORANGE, [row.against_seed_rule for row in rows]),
        (f"against the first {bare_k}", BLUE, [row.against_first_k for row in rows]),
    ):
        figure.add_scatter(
            x=[interval.value for interval in intervals],
            y=[f"{row.metric} {arrows[row.better_when]} " for row in rows],
            orientation="h",
            offsetgroup=name,
            error_x=_spread(intervals),
            mode="markers",
            name=name,
            marker={"color": colour, "size": 9},
            hovertemplate="%{y}: %{x:+.3f}<extra>" + name + "</extra>",
        )
    figure.add_vline(x=0, line={"color": GREY, "width": 1, "dash": "dash"})
    figure.update_layout(legend_traceorder="reversed")
    figure.update_xaxes(title="difference per query")
    return figure


def udcg_by_k(route: RouteReport) -> Any:
    """Gain and harm of the first k passages, and strict UDCG of them and of the policy."""
    figure = _figure(400, barmode="relative", bargap=0.35)
    ks = [row.k for row in route.by_k]
    for name, colour, values in (
        ("gain, first k", GREEN, [row.gain.value or 0.0 for row in route.by_k]),
        ("harm, first k", RED, [-(row.harm.value or 0.0) for row in route.by_k]),
    ):
        figure.add_bar(x=ks, y=values, name=name, marker={"color": colour, "opacity": 0.45})
    for name, colour, intervals in (
        ("UDCG, first k", GREY, [row.first_k for row in route.by_k]),
        ("UDCG, chosen policy at this k", BLUE, [row.chosen for row in route.by_k]),
    ):
        figure.add_scatter(
            x=ks,
            y=[interval.value for interval in intervals],
            error_y=_spread(intervals),
            mode="lines+markers",
            name=name,
            line={"color": colour, "width": 2.5},
            marker={"size": 6},
        )
    figure.add_vline(x=route.policy.k, line={"color": BLUE, "width": 1, "dash": "dot"})
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(
        title="k, the most passages in the context",
        range=[ks[0] - 0.6, ks[-1] + 0.6],
        tickformat="d",
        tickangle=0,
    )
    figure.update_yaxes(title="strict UDCG per query")
    return figure


def frontier(route: RouteReport, bare_k: int) -> Any:
    """All candidate policies by recall loss and harm, with the certified region."""
    figure = _figure(460)
    candidates, chosen = route.frontier.candidates, route.frontier.chosen
    if route.certificate is not None:
        top = max([harm for _, harm, _ in candidates], default=1.0) * 1.05
        figure.add_shape(
            type="rect",
            x0=0,
            x1=route.certificate.alpha,
            y0=0,
            y1=top if route.certificate.beta is None else route.certificate.beta,
            fillcolor=GREEN,
            opacity=0.13,
            line={"width": 0},
            layer="below",
        )
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name="certified region",
            marker={"symbol": "square", "size": 12, "color": GREEN, "opacity": 0.3},
        )
    figure.add_scatter(
        x=[loss for loss, _, _ in candidates],
        y=[harm for _, harm, _ in candidates],
        mode="markers",
        name="candidate policies",
        marker={
            "size": 4,
            "color": [udcg for _, _, udcg in candidates],
            "colorscale": "Viridis",
            "opacity": 0.6,
            "colorbar": {"title": {"text": "strict<br>UDCG"}, "thickness": 10, "len": 0.8},
        },
        hovertemplate="recall loss %{x:.3f}, harm %{y:.3f}, UDCG %{marker.color:.3f}"
        "<extra></extra>",
    )
    figure.add_scatter(
        x=[loss for loss, _ in route.frontier.front_line],
        y=[harm for _, harm in route.frontier.front_line],
        mode="lines",
        name="Pareto front",
        line={"color": GREY, "width": 2, "shape": "hv"},
    )
    loss, harm = route.metric("recall_loss"), route.metric("harm")
    where = "held out" if route.held_out else "same queries"
    for name, symbol, colour, x, y in (
        ("chosen, on the choosing queries", "star", BLUE, chosen.recall_loss, chosen.harm),
        (f"chosen, {where}", "diamond", BLUE, loss.chosen, harm.chosen),
        (f"first {bare_k}, {where}", "circle", ORANGE, loss.first_k, harm.first_k),
        (f"3 and 70%, {where}", "square", RED, loss.seed_rule, harm.seed_rule),
    ):
        figure.add_scatter(
            x=[x.value],
            y=[y.value],
            error_x=_spread([x]),
            error_y=_spread([y]),
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 13, "color": colour},
        )
    figure.update_xaxes(title="mean recall loss", rangemode="tozero")
    figure.update_yaxes(title="mean harm per query", rangemode="tozero")
    return figure


def reliability(data: Reliability) -> Any:
    """Share relevant against P(relevant), with the number of candidates below."""
    figure = _figure(460)
    bins = [b for b in data.bins if b.mean_probability is not None]
    figure.add_scatter(
        x=[0, 1],
        y=[0, 1],
        mode="lines",
        name="perfectly calibrated",
        line={"color": GREY, "width": 1, "dash": "dash"},
    )
    figure.add_scatter(
        x=[b.mean_probability for b in bins],
        y=[b.relevant.value for b in bins],
        error_y=_spread([b.relevant for b in bins]),
        mode="markers",
        name="held-out candidates",
        marker={"size": 8, "color": BLUE},
        customdata=[b.relevant.n for b in bins],
        hovertemplate="P %{x:.3f}, relevant %{y:.3f}, n %{customdata}<extra></extra>",
    )
    figure.add_bar(
        x=[(b.lower + b.upper) / 2 for b in data.bins],
        y=[b.relevant.n or None for b in data.bins],
        width=[b.upper - b.lower for b in data.bins],
        name="candidates",
        marker={"color": GREY, "opacity": 0.6},
        yaxis="y2",
    )
    figure.update_layout(
        yaxis={"domain": [0.32, 1.0], "range": [-0.02, 1.02], "title": "share relevant"},
        yaxis2={
            "domain": [0.0, 0.22],
            "type": "log",
            "title": "candidates",
            "anchor": "x",
            "automargin": True,
            "dtick": 1,
        },
        xaxis={"anchor": "y2", "range": [-0.01, 1.01], "title": "P(relevant)"},
    )
    return figure


def rules(price: Price, names: Mapping[str, str]) -> Any:
    """Strict UDCG of what each rule would choose."""
    rows = [(names[rule.rule], rule.udcg_strict) for rule in price.rules if rule.udcg_strict]
    return _dots(rows, "strict UDCG, held out")


def segments(data: Segments, bare_k: int) -> Any:
    """Chosen policy minus the first ``bare_k`` passages, by segment."""
    rows = [(row.segment, row.against_first_k) for row in data.rows]
    figure = _dots(rows, f"strict UDCG, chosen − first {bare_k}")
    # Plotly's own range would leave out a line that no dot is near.
    bounds = (bound for _, i in rows for bound in (i.lower, i.value, i.upper))
    values = [0.0, *(bound for bound in bounds if bound is not None)]
    margin = 0.05 * (max(values) - min(values)) or 1.0
    figure.update_xaxes(range=[min(values) - margin, max(values) + margin])
    figure.add_vline(x=0.0, line={"color": GREY, "width": 1, "dash": "dash"})
    return figure


def _dots(rows: Sequence[tuple[str, Interval]], title: str) -> Any:
    """One dot with its interval for each row, the first at the top; names may hold any text."""
    figure = _figure(70 + 34 * len(rows), showlegend=False)
    intervals = [interval for _, interval in rows][::-1]
    # Plotly reads a little HTML in its labels. Long ones would leave a phone no room for the dots.
    # White space is kept, so that different names stay different rows.
    names = [
        "<br>".join(map(html.escape, wrap(name, _LABEL_WIDTH, drop_whitespace=False)))
        for name, _ in rows
    ][::-1]
    figure.add_scatter(
        x=[interval.value for interval in intervals],
        y=[f"{name} " for name in names],
        error_x=_spread(intervals),
        mode="markers",
        marker={"color": BLUE, "size": 9},
        hovertemplate="%{x:.3f}<extra></extra>",
    )
    figure.update_xaxes(title=title)
    figure.update_yaxes(type="category")
    return figure
