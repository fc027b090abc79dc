"""The calibration report as one HTML page: words, tables and charts from ``ReportData``.

Everything that comes from labels, passages or settings is escaped, and the page allows no
request to anywhere.
"""

import html
from importlib.resources import files

from calibration.report import charts
from calibration.report.data import MetricComparison, ReportData, RouteReport
from calibration.report.evidence import BARE_K
from calibration.report.markup import (
    baseline_words,
    bounds,
    difference,
    figure,
    number,
    policy_words,
    table,
    value_with_range,
    verdict,
)
from calibration.report.sections import (
    choice_words,
    dropped_section,
    labels_section,
    price_section,
    provenance_section,
    reliability_section,
    segments_section,
    words_section,
)

_SECURITY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
"""What a browser may do with the page: run what is in it, fetch nothing."""

_ON_PAPER = """
addEventListener("beforeprint", () => {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    Plotly.relayout(chart, {width: Math.min(chart.clientWidth, 660)});
  }
});
addEventListener("afterprint", () => {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    Plotly.relayout(chart, {width: null, autosize: true});
  }
});
"""

_PARTS = (
    ("before-after", "Before and after"),
    ("k", "UDCG against k"),
    ("frontier", "Recall loss and harm"),
    ("reliability", "Is P(relevant) true?"),
    ("price", "Price of the guarantee"),
    ("segments", "Segments"),
    ("dropped", "Dropped passages"),
)


def page(data: ReportData) -> str:
    """The whole report as one HTML document; the same data gives the same text.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    css = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    title = f"Calibration of {html.escape(data.dataset)}"
    head = (
        f"<h1>{title}</h1>\n"
        f'<p class="soft">Profile <code>{html.escape(data.profile_id)}</code> · brackets are '
        f"{data.confidence:.0%} intervals · n counts queries unless said otherwise</p>\n"
    )
    sections = [
        head,
        _summary(data),
        _contents(data),
        _choices(data),
        *(_route(data, route) for route in data.routes),
        labels_section(data),
        provenance_section(data),
        words_section(data),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>\n{css}</style>\n"
        f"<script>{charts.library()}</script>\n</head>\n<body>\n<main>\n{''.join(sections)}"
        f"</main>\n<script>{_ON_PAPER}</script>\n</body>\n</html>\n"
    )


def _anchor(route: RouteReport, part: str = "") -> str:
    name = f"route-{route.route.value.replace('+', '-')}"
    return f"{name}-{part}" if part else name


def _summary(data: ReportData) -> str:
    route = data.routes[0]
    shown = [
        ("Strict UDCG per query", route.metric("udcg_strict")),
        ("Harm per query", route.metric("harm")),
        ("Recall", route.metric("recall")),
        ("Passages per context", route.metric("kept")),
    ]
    udcg, harm, recall = (row for _, row in shown[:3])
    where = "held-out queries" if route.held_out else "queries, the ones that chose it"
    caution = ""
    if not route.held_out:
        caution = (
            '<p class="notice">No query was held out: every figure was measured on the queries '
            "that chose the policy, and is optimistic.</p>\n"
        )
    tiles = "".join(f"<div><dt>{title}</dt><dd>{_tile(row)}</dd></div>" for title, row in shown)
    return (
        f"<p>The policy of route <code>{route.route.value}</code> keeps "
        f"{html.escape(policy_words(route.policy))}. On {route.queries:,} {where}, against the "
        f"bare retriever’s first {BARE_K} passages, its strict UDCG is "
        f"{_compared(udcg, 'higher', 'lower')}, its harm {_compared(harm, 'higher', 'lower')}, "
        f"its recall {_compared(recall, 'higher', 'lower')}.</p>\n{caution}"
        f'<dl class="tiles">{tiles}</dl>\n'
    )


def _tile(row: MetricComparison) -> str:
    change = row.against_first_k
    return (
        f'<span class="figure">{number(row.chosen.value)}</span><br>'
        f'first {BARE_K}: {number(row.first_k.value)}<br><span class="soft">difference '
        f"{number(change.value, signed=True)} {bounds(change, signed=True)}, "
        f"n = {change.n:,}</span>"
    )


def _compared(row: MetricComparison, above: str, below: str) -> str:
    change = row.against_first_k
    found = verdict(change, row.better_when)
    if found is None or change.value is None:
        return "the same within the noise"
    return f'<span class="{found}">{above if change.value > 0.0 else below}</span>'


def _contents(data: ReportData) -> str:
    routes = "".join(
        f'<li><a href="#{_anchor(route)}">Route {route.route.value}</a><ul>'
        + "".join(f'<li><a href="#{_anchor(route, key)}">{title}</a></li>' for key, title in _PARTS)
        + "</ul></li>"
        for route in data.routes
    )
    return (
        '<nav aria-label="Contents"><strong>Contents</strong><ul>'
        f'<li><a href="#choice">What was chosen, and what proves it</a></li>{routes}'
        '<li><a href="#labels">Labels</a></li><li><a href="#provenance">Provenance</a></li>'
        '<li><a href="#words">What the words mean</a></li></ul></nav>\n'
    )


def _choices(data: ReportData) -> str:
    parts = ['<h2 id="choice">What was chosen, and what proves it</h2>\n']
    if len(data.routes) > 1:
        parts.append(
            "<p>Each route, that is each set of stages that may answer, has a policy of its own, "
            "because scores do not transfer. The first serves while every stage is alive, the "
            "others when a stage is down.</p>\n"
        )
    parts += [f"<h3>Route {r.route.value}</h3>\n{choice_words(r)}" for r in data.routes]
    return "".join(parts)


def _route(data: ReportData, route: RouteReport) -> str:
    where = f"{route.queries:,} held-out queries ({route.answerable:,} answerable)"
    if not route.held_out:
        where = (
            f"the {route.queries:,} queries that chose the policy ({route.answerable:,} "
            "answerable), so these figures are optimistic"
        )
    sections = (
        _before_after(route),
        _by_k(route),
        _frontier(data, route),
        reliability_section(route, _anchor(route, "chart-reliability")),
        price_section(route, _anchor(route, "chart-price")),
        segments_section(route, _anchor(route, "chart-segments")),
        dropped_section(data, route),
    )
    head = (
        f'<h2 id="{_anchor(route)}">Route {route.route.value}</h2>\n<p>Keeps '
        f"{html.escape(policy_words(route.policy))}. Measured on {where}; scores are of kind "
        f"<code>{route.score_kind.value}</code>.</p>\n"
    )
    return head + "".join(
        f'<h3 id="{_anchor(route, key)}">{title}</h3>\n{section}'
        for (key, title), section in zip(_PARTS, sections, strict=True)
    )


def _before_after(route: RouteReport) -> str:
    rows = [
        [
            row.metric,
            value_with_range(row.first_k),
            value_with_range(row.seed_rule),
            value_with_range(row.chosen),
            difference(row.against_first_k, row.better_when),
            difference(row.against_seed_rule, row.better_when),
            f"{row.against_first_k.n:,}",
        ]
        for row in route.comparison
    ]
    heads = (
        "metric",
        f"first {BARE_K}>",
        "3 and 70%>",
        "chosen>",
        f"chosen − first {BARE_K}>",
        "chosen − 3 and 70%>",
        "n>",
    )
    return (
        "<p>The chosen policy beside two that need no calibration: the bare retriever’s first "
        f"{BARE_K} passages, and at most 3 passages with at least 70% of the best score. A "
        "difference whose interval holds 0 is inside the noise.</p>\n"
        + figure(
            charts.chart(
                charts.differences(route.comparison, BARE_K), _anchor(route, "chart-before-after")
            ),
            "Differences of the chosen policy from both others, by metric, with intervals",
            "Chosen policy minus the other, paired by query. ↑: right of 0 is better; ↓: left of "
            "0 is better.",
        )
        + table(heads, rows, "Means per query with intervals, and paired differences.")
    )


def _by_k(route: RouteReport) -> str:
    best = max(route.by_k, key=lambda row: row.first_k.value or 0.0)
    rows = [
        [
            f"{row.k}",
            value_with_range(row.gain),
            value_with_range(row.harm),
            value_with_range(row.first_k),
            value_with_range(row.chosen),
            f"{row.first_k.n:,}",
        ]
        for row in route.by_k
    ]
    return (
        "<p>Each further passage adds gain where it is relevant and harm where it is not. Of "
        f"fixed sizes, k = {best.k} does best here, at {value_with_range(best.first_k)}; the "
        "chosen policy may also stop early where a query has nothing good left. The dotted line "
        f"is its k = {route.policy.k}.</p>\n"
        + figure(
            charts.chart(charts.udcg_by_k(route), _anchor(route, "chart-k")),
            "Strict UDCG by size of context, with gain and harm apart",
            "Bars: gain and harm of the bare first k. Lines: their sum, and the chosen policy "
            "with its threshold as it is and k set to each value.",
        )
        + table(
            ("k>", "gain>", "harm>", "UDCG, first k>", "UDCG, chosen policy>", "n>"),
            rows,
            "Strict UDCG per query by size of context. The marked row is the chosen k.",
            marked=next((i for i, at in enumerate(route.by_k) if at.k == route.policy.k), None),
        )
    )


def _frontier(data: ReportData, route: RouteReport) -> str:
    found, chosen, certificate = route.frontier, route.frontier.chosen, route.certificate
    rows = [
        [
            f"{row.k}",
            number(row.threshold),
            value_with_range(row.recall_loss),
            value_with_range(row.harm),
            value_with_range(row.udcg_strict),
        ]
        for row in (*found.front, chosen)
    ]
    if certificate is None:
        certified = "Nothing is certified here, so no region is shaded."
    else:
        harm = "" if certificate.beta is None else f" and mean harm of at most {certificate.beta:g}"
        certified = (
            "The shaded region is what the certificate promises of the chosen policy, and of no "
            f"other dot in it: mean recall loss of at most {certificate.alpha:g}{harm}."
        )
    where = "on held-out queries" if route.held_out else "on the same queries"
    threshold = "P" if route.policy.kind == "expected_utility" else "r"
    return (
        f"<p>{found.n_candidates:,} policies were weighed on the queries that chose. Dropping more "
        "saves harm and costs recall; on the front no policy does less harm at the same loss. "
        f"Recall loss is relative to {baseline_words(data.baseline)}. {certified}</p>\n"
        + figure(
            charts.chart(charts.frontier(route, BARE_K), _anchor(route, "chart-frontier")),
            "Recall loss against harm for every candidate policy",
            "Small dots: candidate policies on the choosing queries. Star: the chosen settings "
            f"there. Diamond, circle and square: measured {where}, with intervals.",
        )
        + table(
            ("k>", f"least {threshold} kept>", "recall loss>", "harm>", "strict UDCG>"),
            rows,
            "The front, thinned, and last the chosen settings, on the choosing queries (n = "
            f"{chosen.harm.n:,}; recall loss: n = {chosen.recall_loss.n:,}).",
            marked=len(rows) - 1,
        )
    )
