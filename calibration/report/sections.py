"""Sections of the report that stand by themselves, as HTML: reliability to provenance."""

import html

from calibration.report import charts
from calibration.report.data import Example, Examples, ReportData, RouteReport
from calibration.report.evidence import BARE_K
from calibration.report.markup import (
    baseline_words,
    definitions,
    difference,
    figure,
    number,
    policy_words,
    table,
    value_with_range,
)

_RULES = {
    "none": "no promise: highest strict UDCG",
    "betting": "betting p-values (certifies)",
    "hoeffding_bentkus": "Hoeffding–Bentkus (certifies)",
    "clt": "normal approximation",
    "conformal_risk_control": "conformal risk control",
    "uncorrected": "plain means, no test",
}
_METHODS = {
    "betting": "betting",
    "hoeffding_bentkus": "Hoeffding–Bentkus",
    "clt": "normal approximation",
    "conformal_risk_control": "conformal risk control",
}


def reliability_section(route: RouteReport, name: str) -> str:
    """Whether P(relevant) is true."""
    found = route.reliability
    if found is None:
        return f"<p>{html.escape(route.no_reliability or '')}</p>"
    rows = [
        [
            f"{b.lower:g} – {b.upper:g}",
            number(b.mean_probability),
            value_with_range(b.relevant),
            f"{b.relevant.n:,}",
            f"{b.queries:,}",
        ]
        for b in found.bins
    ]
    return (
        f"<p>Expected calibration error {value_with_range(found.expected_calibration_error)} over "
        f"{found.candidates:,} candidates of {found.expected_calibration_error.n:,} held-out "
        "queries; noise alone keeps it above 0. Of the passages that the policy keeps, the model "
        f"says that a share of {number(found.kept_probability)} is relevant; the labels say "
        f"{value_with_range(found.kept_relevant)} (n = {found.kept_relevant.n:,}).</p>"
        + figure(
            charts.chart(charts.reliability(found), name),
            "Share of candidates that are relevant against the probability that was predicted",
            "On the dashed line the probability is exactly true. Below: candidates in each bin, "
            "on a logarithmic scale.",
        )
        + table(
            ("P", "mean P>", "share relevant>", "candidates>", "queries>"),
            rows,
            "By bin of P. Candidates of one query are alike, and the intervals allow for it.",
        )
    )


def price_section(route: RouteReport, name: str) -> str:
    """What the guarantee costs, and what other methods would have said."""
    found = route.price
    if found is None:
        return "<p>Without answerable queries held out there is nothing to measure a price on.</p>"
    intro = (
        "<p>No promise constrained the choice: the policy of highest strict UDCG was taken, "
        "so the guarantee cost no utility. What it states is how much recall the choice may "
        "have cost.</p>"
    )
    parts = []
    if found.rules:
        intro = (
            "<p>The price is the strict UDCG that is given up against the policy chosen without "
            "any promise, paired on the same held-out queries. Only betting and "
            "Hoeffding–Bentkus give a guarantee; the other rules choose more boldly and keep "
            "their promise less often than they seem to.</p>"
        )
        rows = []
        for rule in found.rules:
            if rule.policy is None or rule.udcg_strict is None or rule.recall_loss is None:
                rows.append([_RULES[rule.rule], "allows no policy", "", "", "", "", ""])
                continue
            rows.append(
                [
                    _RULES[rule.rule],
                    f"{rule.policy.k} / {rule.policy.threshold:.3g}",
                    value_with_range(rule.udcg_strict),
                    value_with_range(rule.recall_loss),
                    "" if rule.tested_recall_loss is None else number(rule.tested_recall_loss),
                    "" if rule.price is None else value_with_range(rule.price, signed=True),
                    f"{rule.udcg_strict.n:,}",
                ]
            )
        drawn = [
            (_RULES[rule.rule], rule.udcg_strict)
            for rule in found.rules
            if rule.udcg_strict is not None
        ]
        parts += [
            figure(
                charts.chart(charts.dots(drawn, "strict UDCG, held out", line_at=None), name),
                "Strict UDCG on held-out queries of what each rule would choose",
                "What each rule would choose, measured on held-out queries.",
            ),
            table(
                (
                    "rule",
                    "k / threshold>",
                    "strict UDCG>",
                    "recall loss>",
                    "recall loss when tested>",
                    "price>",
                    "n>",
                ),
                rows,
                "What each rule would choose of the same candidates. The marked row is in force.",
                marked=next((i for i, rule in enumerate(found.rules) if rule.chosen), None),
            ),
        ]
    bounds = [
        [
            _METHODS[bound.method],
            number(bound.bound),
            "yes" if bound.guaranteed else "no",
        ]
        for bound in found.bounds
    ]
    parts.append(
        table(
            ("method", "mean recall loss at most>", f"true with probability {1 - found.delta:g}"),
            bounds,
            f"Upper bounds of the mean recall loss of the policy in force, whose mean is "
            f"{number(found.observed.value)} on {found.observed.n:,} held-out queries. Conformal "
            "risk control bounds the next query’s loss in expectation only.",
        )
    )
    return intro + "".join(parts)


def segments_section(route: RouteReport, name: str) -> str:
    """The policy by segment of the queries."""
    found = route.segments
    if found is None:
        return f"<p>Left out. {html.escape(route.no_segments or '')}</p>"
    rows = [
        [
            html.escape(row.segment),
            f"{row.queries:,}",
            "its own" if row.own_policy else "the route’s",
            value_with_range(row.udcg_strict),
            difference(row.against_first_k, "higher"),
            f"{value_with_range(row.recall)} n = {row.recall.n:,}",
            value_with_range(row.kept),
        ]
        for row in found.rows
    ]
    drawn = [(row.segment, row.against_first_k) for row in found.rows]
    return (
        f"<p>By the queries’ column <code>{html.escape(found.column)}</code>. Many small segments "
        "are many chances for one to look good or bad by luck: read the intervals.</p>"
        + figure(
            charts.chart(
                charts.dots(drawn, f"strict UDCG, chosen − first {BARE_K}", line_at=0.0), name
            ),
            f"Difference in strict UDCG from the first {BARE_K} passages, by segment",
            "Right of the dashed line the policy is better than the bare retriever.",
        )
        + table(
            (
                "segment",
                "queries>",
                "policy",
                "strict UDCG>",
                f"chosen − first {BARE_K}>",
                "recall>",
                "kept>",
            ),
            rows,
            "Means per query with intervals; recall is defined on answerable queries only.",
        )
    )


def dropped_section(data: ReportData, route: RouteReport) -> str:
    """What was kept out and what was lost, with examples."""
    return (
        "<h4>Kept out: irrelevant passages</h4>"
        + _examples(
            route.dropped_irrelevant,
            f"passages not labelled relevant among the bare first {BARE_K}",
            "known distractors first, then judged ones, then by the retriever’s rank",
        )
        + "<h4>Lost: relevant passages</h4>"
        + _examples(
            route.dropped_relevant,
            f"relevant passages among {baseline_words(data.baseline)}",
            "highest grade first, then by the retriever’s rank",
        )
    )


def _examples(found: Examples, what: str, order: str) -> str:
    if not found.total:
        return f"<p>There were no {what}.</p>"
    head = (
        f"<p>Of {found.total:,} {what}, the policy dropped {found.dropped:,}, a share of "
        f"{value_with_range(found.share)} (n = {found.share.n:,} queries)."
    )
    if not found.shown:
        return head + "</p>"
    shown = "".join(_example(example) for example in found.shown)
    return f"{head} Examples, not a random sample: at most one of a query, {order}.</p>{shown}"


def _example(example: Example) -> str:
    figures = [example.label]
    if example.probability is not None:
        figures.append(f"P = {example.probability:.3f}")
    elif example.relative_score is not None:
        figures.append(f"r = {example.relative_score:.3f}")
    figures.append(f"rank {example.rank} for the policy, {example.retrieved_rank} as retrieved")
    kept_if = " and ".join(
        f"{row.setting} ≥ {row.value:.0f}"
        if row.setting == "k"
        else f"{row.setting} ≤ {row.value:g}"
        for row in example.kept_if
    )
    if kept_if:
        figures.append(f"would have been kept with {kept_if}")
    title = f" · {html.escape(example.title)}" if example.title else ""
    snippet = ""
    if example.snippet is not None:
        snippet = f"<blockquote>{html.escape(example.snippet) or '(no text)'}</blockquote>"
    return (
        f'<article class="example"><p><strong>{html.escape(example.query)}</strong> '
        f'<span class="soft">query <code>{html.escape(example.query_id)}</code></span></p>'
        f"<p><code>{html.escape(example.passage_id)}</code>{title}</p>{snippet}"
        f'<p class="soft">{html.escape(" · ".join(figures))}</p></article>\n'
    )


def labels_section(data: ReportData) -> str:
    """How many labels there are, and how much of what is retrieved they cover."""
    counts, routes = data.labels, data.routes
    grades = ", ".join(f"grade {grade}: {n:,}" for grade, n in counts.grades.items())
    negatives = ", ".join(f"{k.replace('_', ' ')}: {n:,}" for k, n in counts.negatives.items())
    facts = [
        ("queries", f"{counts.queries:,}"),
        ("answerable", f"{counts.answerable:,}: at least one passage is labelled relevant"),
        (
            "unanswerable",
            f"{counts.unanswerable:,}: whatever is kept for them is harm, and recall is undefined",
        ),
        ("chose the policies", f"{counts.chosen_on[0]:,} ({counts.chosen_on[1]:,} answerable)"),
        ("held out", f"{counts.held_out[0]:,} ({counts.held_out[1]:,} answerable)"),
        ("judged passages", grades or "none"),
        ("known to mislead", negatives or "none labelled"),
    ]
    rows = [
        [
            f"first {share.k}",
            *(value_with_range(route.judged[row].share) for route in routes),
            f"{share.share.n:,}",
        ]
        for row, share in enumerate(routes[0].judged)
    ]
    recall = [value_with_range(route.recall_at_depth) for route in routes]
    rows.append(["recall of the pool", *recall, f"{routes[0].recall_at_depth.n:,}"])
    return (
        '<h2 id="labels">Labels</h2>\n'
        + definitions(facts)
        + table(
            ("retrieved", *(f"{route.route.value}>" for route in routes), "n>"),
            rows,
            "Share of the retriever’s first passages for which any label exists, and recall of "
            "the whole pool, over all queries. A passage without a label counts as irrelevant in "
            "every figure of this report: the lower the share, the more pessimistic they are.",
        )
    )


def provenance_section(data: ReportData) -> str:
    """How the profile was made, so that it can be made again."""
    made, worth = data.provenance, data.utilities
    fusion: str = data.fusion.method
    if data.fusion.method == "convex":
        fusion += f", {data.fusion.weight:g} of the dense leg"
    worths = (
        f"relevant {worth.relevant:g}, lower grades {worth.partial:g}, irrelevant "
        f"{worth.irrelevant:g}, hard negative {worth.hard_negative:g}, distractor "
        f"{worth.distractor:g}"
    )
    facts = [
        ("profile", data.profile_id),
        ("labels", f"{made.dataset}, SHA-256 {made.dataset_digest}"),
        ("seed", str(made.seed)),
        ("depth", f"{made.depth} candidates per query"),
        ("fusion", fusion),
        ("recall loss", f"relative to {baseline_words(data.baseline)}"),
        ("utilities", worths),
        *sorted(made.versions.items()),
        *((f"system: {key}", value) for key, value in sorted(data.fingerprint.items())),
    ]
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in made.notes)
    return (
        '<h2 id="provenance">Provenance</h2>\n'
        + definitions(facts)
        + (f"<h3>Notes on the labels</h3><ul>{notes}</ul>" if notes else "")
    )


def words_section(data: ReportData) -> str:
    """What the words mean."""
    facts = [(row.metric, row.description) for row in data.routes[0].comparison]
    facts += [
        ("interval", "percentile bootstrap over queries; differences are paired by query"),
        ("P", "calibrated probability that a passage is relevant"),
        ("r", "relative score: a passage’s score against the best of its own ranking, in (0, 1]"),
        ("3 and 70%", "at most 3 passages, each with r ≥ 0.7; only k applies to rank-only scores"),
        ("k / threshold", "the most passages kept, and the least P or r that is kept"),
    ]
    return '<h2 id="words">What the words mean</h2>\n' + definitions(facts)


def choice_words(route: RouteReport) -> str:
    """The choice of a route and its certificate, in words."""
    keeps = (
        f"<p>Keeps <strong>{html.escape(policy_words(route.policy))}</strong>. Why this kind of "
        f"policy: {html.escape(route.why)}.</p>\n"
    )
    if route.certificate is None:
        words, mark = route.no_certificate or "", " none"
    else:
        words, mark = route.certificate.statement, ""
    proof = f'<p class="certificate{mark}"><strong>Certificate.</strong> {html.escape(words)}</p>\n'
    if route.without_promise == route.policy or route.certificate is None:
        return keeps + proof
    freely = html.escape(policy_words(route.without_promise))
    return f"{keeps}{proof}<p>Without the promise it would keep {freely}.</p>\n"
