"""Makes the Grafana dashboards: ``make dashboard`` writes them to ctxguard/monitor/export.

The default has twelve panels in four rows, and reads the metrics that are exported by default.

The rows are plain data in ``rows_of_guard`` and ``rows_of_monitor``; this module lays them out as
Grafana's JSON. A test reads that with Grafana's own types, and another runs every query.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from tools.dashboard.panels import ESTIMATE, LOWER, UNCORRECTED, UPPER, Panel, Row, Shape
from tools.dashboard.rows_of_guard import ASSESSOR, CONTEXT, STAGES, TRAFFIC
from tools.dashboard.rows_of_monitor import ALARMS, JUDGE, OVERVIEW, QUALITY, SAMPLES, TOKENS

ROWS = (OVERVIEW, QUALITY, TOKENS, ALARMS, CONTEXT, ASSESSOR, TRAFFIC, STAGES, SAMPLES, JUDGE)
"""All panels there are."""
_DEFAULT = {
    "Overview": ("Verdict in force", "Tokens saved", "Alerts that fire"),
    "Quality of live traffic": (
        "Recall, all pools together",
        "MRR of the served",
        "UDCG",
        "Requests and grades still needed",
    ),
    "Requests": ("By outcome", "Stages left out", "Time that the guard adds"),
    "Samples and the judge": (
        "Sampled, stored, lost",
        "Samples taken up for judging, by outcome",
    ),
}
"""The panels of the default, by row."""

_WIDTH = 24
_HEIGHT, _FIGURE_HEIGHT = 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_BAND: dict[str, dict[str, Any]] = {
    ESTIMATE: {"lineWidth": 2},
    LOWER: {"lineWidth": 0, "showPoints": "never"},
    UPPER: {"lineWidth": 0, "showPoints": "never", "fillBelowTo": LOWER, "fillOpacity": 20},
    UNCORRECTED: {"lineStyle": {"fill": "dash", "dash": [6, 6]}, "showPoints": "never"},
}
"""How the series of a band are drawn."""


def dashboard(*, all_metrics: bool = False) -> str:
    """The dashboard as JSON, of the default panels or of all; the same bytes each time."""
    panels = {panel.title: panel for row in ROWS for panel in row.panels}
    rows = [Row(title, *(panels[each] for each in titles)) for title, titles in _DEFAULT.items()]
    return _page(ROWS if all_metrics else tuple(rows))


def _page(rows: tuple[Row, ...]) -> str:
    document: dict[str, Any] = {
        "uid": "ctxguard",
        "title": "Ctxguard",
        "description": "What the context that language models get is worth: quality of live "
        "traffic with intervals, alarms, and the request path.",
        "tags": ["ctxguard", "rag"],
        "timezone": "browser",
        "time": {"from": "now-24h", "to": "now"},
        "refresh": "1m",
        "editable": True,
        "schemaVersion": 36,
        "templating": {"list": _variables()},
        "panels": list(_laid_out(rows)),
    }
    # A line for each panel, for who reads a change of it.
    panels = document.pop("panels")
    lines = ",\n".join(json.dumps(panel, sort_keys=True) for panel in panels)
    return json.dumps(document, sort_keys=True)[:-1] + f', "panels": [\n{lines}\n]}}\n'


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Prometheus",
            "query": "prometheus",
        },
        _job("monitor", "Job of the monitor", "ctxguard_monitor_errors_total"),
        _job("guard", "Job of the serving processes", "ctxguard_received_requests_total"),
    ]


def _job(name: str, label: str, metric: str) -> dict[str, Any]:
    """A variable with the jobs that export a metric."""
    on_time_range_changed, alphabetical = 2, 1
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _SOURCE,
        "query": {"query": f"label_values({metric}, job)", "refId": name},
        "refresh": on_time_range_changed,
        "sort": alphabetical,
    }


def _laid_out(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Rows and panels with their numbers and places, from left to right and top to bottom."""
    number = y = 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        yield {
            "type": "row",
            "id": number,
            "title": row.title,
            "gridPos": place,
            "collapsed": False,
            "panels": [],
        }
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            number += 1
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            drawn = _figure(panel) if panel.shape is Shape.FIGURE else _lines(panel)
            own = _FIGURE_HEIGHT if panel.shape is Shape.FIGURE else _HEIGHT
            place = {"x": x, "y": y, "w": panel.width, "h": own}
            yield {**drawn, "id": number, "gridPos": place}
            x, height = x + panel.width, max(height, own)
        y += height


def _drawn(panel: Panel, kind: str, defaults: dict[str, Any], **target: bool) -> dict[str, Any]:
    return {
        "type": kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "noValue": "no data", **defaults},
            "overrides": [],
        },
        "targets": [
            {"expr": expr, "legendFormat": legend, "refId": chr(ord("A") + place), **target}
            for place, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def _figure(panel: Panel) -> dict[str, Any]:
    # Of this instant: a range would show its last figure, however old.
    return {
        **_drawn(panel, "stat", {}, instant=True, range=False),
        "options": {
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["last"]},
            "textMode": "value_and_name" if "{{mode}}" in panel.queries else "value",
        },
    }


def _lines(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "showPoints": "auto", "spanNulls": False}
    if panel.shape is Shape.STACKED:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    elif panel.shape is Shape.LOGARITHMIC:
        custom |= {"scaleDistribution": {"type": "log", "log": 10}}
    drawn = _drawn(panel, "timeseries", {"custom": custom}, instant=False, range=True)
    if panel.shape is Shape.BAND:
        drawn["fieldConfig"]["overrides"] = [
            {
                "matcher": {"id": "byName", "options": series},
                "properties": [
                    {"id": f"custom.{name}", "value": value} for name, value in looks.items()
                ],
            }
            for series, looks in _BAND.items()
        ]
    drawn["options"] = {
        "legend": {
            "calcs": [],
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "asc"},
    }
    return drawn


if __name__ == "__main__":
    sys.stdout.write(dashboard(all_metrics=sys.argv[1:] == ["all"]))
