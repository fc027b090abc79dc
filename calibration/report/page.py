"""The calibration report as one HTML page, from ``ReportData`` and the templates beside this file.

Everything that comes from labels, passages or settings is escaped, and the page makes no request.
"""

from calibration.report import charts
from calibration.report.data import AtK, Direction, ReportData, RouteReport
from ctxguard._support.extras import require
from ctxguard.profile.schema import Interval

NO_DATA = "no data"

_RULE_NAMES = {
    "none": "no promise: highest strict UDCG",
    "betting": "betting p-values (certifies)",
    "uncorrected": "plain means, no test",
}


def page(data: ReportData) -> str:
    """The whole report as one HTML document; the same data gives the same text.

    Raises:
        MissingExtraError: plotly or Jinja2 is not installed.
    """
    jinja2 = require("jinja2", "report")
    markup = require("markupsafe", "report").Markup
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("calibration.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "anchor": _anchor,
        "best_k": _best_k,
        "chart": lambda figure, name: markup(charts.chart(figure, name)),
        "count": "{:,}".format,
        "number": number,
        "verdict": verdict,
    }
    text: str = templates.get_template("page.html.j2").render(
        data=data,
        bare_k=data.serving_k,
        charts=charts,
        plotly_js=markup(charts.library()),
        rule_names=_RULE_NAMES,
    )
    return text


def _anchor(route: RouteReport) -> str:
    return f"route-{route.route.value.replace('+', '-')}"


def _best_k(rows: tuple[AtK, ...]) -> AtK:
    return max(rows, key=lambda row: row.first_k.value or 0.0)


def number(value: float | None, *, signed: bool = False) -> str:
    """A value with three decimals, or ``no data``.

    >>> number(0.12345), number(-0.0001, signed=True), number(None)
    ('0.123', '0.000', 'no data')
    """
    if value is None:
        return NO_DATA
    rounded = round(value, 3) or 0.0
    return (f"{rounded:+.3f}" if signed and rounded else f"{rounded:.3f}").replace("-", "−")


def verdict(difference: Interval, better_when: Direction | None) -> str | None:
    """``good`` or ``bad`` if the interval excludes 0 and either direction is better, else None.

    >>> verdict(Interval(value=0.2, lower=0.1, upper=0.3, n=9), "lower")
    'bad'
    """
    if better_when is None or difference.lower is None or difference.upper is None:
        return None
    if difference.lower <= 0.0 <= difference.upper:
        return None
    return "good" if (difference.lower > 0.0) == (better_when == "higher") else "bad"
