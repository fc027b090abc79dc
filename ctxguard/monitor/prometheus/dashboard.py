"""Makes the Grafana dashboard with Grafana's own types.

``python -m ctxguard.monitor.prometheus.dashboard > ctxguard/monitor/prometheus/dashboard.json``
"""

import json
import sys
from typing import TYPE_CHECKING

from ctxguard._extras import require
from ctxguard.monitor.prometheus.panels import (
    ESTIMATE,
    LOWER,
    UNCORRECTED,
    UPPER,
    Panel,
    Query,
    Shape,
)
from ctxguard.monitor.prometheus.rows_of_guard import CONTEXT, STAGES, TRAFFIC
from ctxguard.monitor.prometheus.rows_of_monitor import ALARMS, JUDGE, NOW, QUALITY, SAMPLES

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import prometheus, stat, timeseries
    from grafana_foundation_sdk.cog.builder import Builder
    from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableModel

UID = "ctxguard"
NO_DATA = "no data"

ROWS = (NOW, QUALITY, ALARMS, CONTEXT, TRAFFIC, STAGES, SAMPLES, JUDGE)
"""The page from top to bottom."""

_HEIGHT = 8
_FIGURE_HEIGHT = 4


def dashboard() -> str:
    """The dashboard as JSON; the same bytes each time.

    Raises:
        MissingExtraError: grafana-foundation-sdk is not installed.
    """
    require("grafana_foundation_sdk", "dev")
    from grafana_foundation_sdk.builders import dashboard as dashboards
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    made = (
        dashboards.Dashboard("Ctxguard")
        .uid(UID)
        .description(
            "What the context that language models get is worth: quality of live traffic with "
            "intervals, alarms, and the request path."
        )
        .tags(["ctxguard", "rag"])
        .timezone("browser")
        .time("now-24h", "now")
        .refresh("1m")
    )
    for variable in _variables():
        made = made.with_variable(variable)
    number = 0
    for row in ROWS:
        number += 1
        made = made.with_row(dashboards.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            drawn = _figure(panel) if panel.shape is Shape.FIGURE else _lines(panel)
            made = made.with_panel(drawn.id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variables() -> "list[Builder[VariableModel]]":
    from grafana_foundation_sdk.builders import dashboard as dashboards
    from grafana_foundation_sdk.models.dashboard import (
        VariableOption,
        VariableRefresh,
        VariableSort,
    )

    def job(name: str, label: str, metric: str) -> dashboards.QueryVariable:
        return (
            dashboards.QueryVariable(name)
            .label(label)
            .datasource(_source())
            .query({"query": f"label_values({metric}, job)", "refId": name})
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(False)
            .include_all(False)
        )

    def option(value: str, selected: bool) -> VariableOption:
        return VariableOption(text=value, value=value, selected=selected)

    return [
        dashboards.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        job("monitor", "Job of the monitor", "ctxguard_monitor_leads"),
        job("guard", "Job of the serving processes", "ctxguard_received_requests_total"),
        dashboards.CustomVariable("window")
        .label("Window of the estimates")
        .values("kept,recent")
        .current(option("kept", True))
        .options([option("kept", True), option("recent", False)]),
    ]


def _source() -> "DataSourceRef":
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid="${datasource}")


def _query(query: Query, place: int) -> "prometheus.Dataquery":
    from grafana_foundation_sdk.builders import prometheus

    return (
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + place))
    )


def _figure(panel: Panel) -> "stat.Panel":
    from grafana_foundation_sdk.builders import common, stat
    from grafana_foundation_sdk.models.common import BigValueColorMode, BigValueGraphMode

    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_source())
        .unit(panel.unit)
        .no_value(NO_DATA)
        .color_mode(BigValueColorMode.NONE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["last"]))
        .span(panel.width)
        .height(_FIGURE_HEIGHT)
    )
    for place, query in enumerate(panel.queries):
        # Of this instant: a range would show its last figure, however old.
        made = made.with_target(_query(query, place).instant())
    return made


def _lines(panel: Panel) -> "timeseries.Panel":
    from grafana_foundation_sdk.builders import common, timeseries
    from grafana_foundation_sdk.models.common import (
        LegendDisplayMode,
        LegendPlacement,
        ScaleDistribution,
        StackingMode,
        TooltipDisplayMode,
        VisibilityMode,
    )

    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_source())
        .unit(panel.unit)
        .no_value(NO_DATA)
        .span_nulls(False)
        .show_points(VisibilityMode.AUTO)
        .line_width(1)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .span(panel.width)
        .height(_HEIGHT)
    )
    if panel.shape is Shape.STACKED:
        made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    elif panel.shape is Shape.LOGARITHMIC:
        made = made.scale_distribution(
            common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)
        )
    elif panel.shape is Shape.BAND:
        made = _as_band(made)
    for place, query in enumerate(panel.queries):
        made = made.with_target(_query(query, place).range())
    return made


def _as_band(panel: "timeseries.Panel") -> "timeseries.Panel":
    from grafana_foundation_sdk.models.dashboard import DynamicConfigValue

    def chosen(**properties: object) -> list[DynamicConfigValue]:
        return [DynamicConfigValue(f"custom.{name}", value) for name, value in properties.items()]

    return (
        panel.override_by_name(ESTIMATE, chosen(lineWidth=2))
        .override_by_name(LOWER, chosen(lineWidth=0, showPoints="never"))
        .override_by_name(
            UPPER, chosen(lineWidth=0, showPoints="never", fillBelowTo=LOWER, fillOpacity=20)
        )
        .override_by_name(
            UNCORRECTED, chosen(lineStyle={"fill": "dash", "dash": [6, 6]}, showPoints="never")
        )
    )


if __name__ == "__main__":
    sys.stdout.write(dashboard())
