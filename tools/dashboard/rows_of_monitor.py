"""The dashboard's rows on quality, tokens, alarms, samples and the judge, from the monitor."""

from tools.dashboard.panels import ESTIMATE, LOWER, UNCORRECTED, UPPER, Panel, Row, Shape
from tools.dashboard.promql import (
    GUARD,
    MONITOR,
    fleet,
    fleet_rate,
    fleet_sum,
    rate,
    share,
    shown,
)
from tools.dashboard.rows_of_guard import SHARE_ASKED


def _band(metric: str, title: str, description: str, *, of_any_judge: bool = True) -> Panel:
    """Draw an estimate; ``of_any_judge`` unless only a judge without errors can show it."""
    queries = {
        ESTIMATE: f"max ({shown('ctxguard_estimate', metric)})",
        LOWER: f"min ({shown('ctxguard_estimate_lower', metric)})",
        UPPER: f"max ({shown('ctxguard_estimate_upper', metric)})",
    }
    if of_any_judge:
        queries[UNCORRECTED] = f"max ({shown('ctxguard_judge_estimate', metric)})"
    return Panel(
        title,
        f"{description} The band is its 95% interval; no line where the data do not suffice.",
        queries,
        shape=Shape.BAND,
    )


_KEPT, _TODAY = (
    fleet_sum(f"ctxguard_{metric}_total", each, "mode", selector)
    for metric, each, selector in (
        ("candidate_tokens", "judge, mode, fate", 'fate="kept"'),
        ("today_tokens", "judge, mode", ""),
    )
)
OVERVIEW = Row(
    "Overview",
    *[
        Panel(title, description, queries, unit=unit, shape=Shape.FIGURE, width=width)
        for width, unit, title, description, queries in (
            (
                4,
                "percentunit",
                "Verdict in force",
                "Share of requests by mode: enforce, or shadow until judged requests suffice.",
                {
                    "{{mode}}": share(
                        f"({rate('ctxguard_received_requests_total', GUARD, 'mode')} > 0)",
                        rate("ctxguard_received_requests_total", GUARD),
                        "on () group_left () ",
                    )
                },
            ),
            *[
                (
                    3,
                    "short",
                    title,
                    f"{title} of live traffic, over the narrowest window that has an estimate.",
                    {title: f"max ({shown('ctxguard_estimate', metric)})"},
                )
                for metric, title in (("pooled_recall", "Pooled recall"), ("harm", "Harm"))
            ],
            (
                5,
                "percentunit",
                "Tokens saved",
                "Of today's, the retriever's first k; in shadow, what enforcing would save.",
                {"{{mode}}": f"1 - {share(_KEPT, _TODAY)}".replace("$__rate_interval", "$__range")},
            ),
            (
                3,
                "percentunit",
                "Share asked",
                "Share of candidates that an assessor is asked about.",
                {"asked": SHARE_ASKED},
            ),
            (
                3,
                "percentunit",
                "Judging budget",
                "Share of samples that it allows to judge.",
                {"judged": fleet("ctxguard_judging_sampling_probability")},
            ),
            (
                3,
                "short",
                "Alerts that fire",
                "No data where none does.",
                {"alerts": 'count (ALERTS{alertname=~"Ctxguard.+",alertstate="firing"})'},
            ),
        )
    ],
)
TOKENS = Row(
    "Tokens",
    Panel(
        "Tokens a second",
        "Estimated from samples, each standing for 1/π requests. today: the retriever's first k. "
        "kept: in shadow, what enforcing would keep.",
        {"{{mode}}: kept": _KEPT, "{{mode}}: today": _TODAY},
    ),
    Panel(
        "Candidates' tokens a second, by fate",
        "kept + dropped in assembly + dropped by policy = all that the retriever returned.",
        {"{{fate}}": fleet_sum("ctxguard_candidate_tokens_total", "judge, mode, fate", "fate")},
        shape=Shape.STACKED,
    ),
    Panel(
        "Money saved per hour",
        "By the key price-per-million of `ctxguard monitor`; no data without.",
        {
            "{{mode}}": f"3600e-6 * ({_TODAY}\n- {_KEPT})\n* on () group_left () "
            + fleet("ctxguard_price_per_million")
        },
    ),
)
QUALITY = Row(
    "Quality of live traffic",
    _band(
        "pooled_recall",
        "Recall, all pools together",
        "Share of the pools' relevant passages served, all requests together.",
    ),
    _band(
        "served_mrr",
        "MRR of the served",
        "Mean reciprocal rank over requests that were served any passage.",
    ),
    _band("udcg", "UDCG", "Gain less harm, per request; every passage counts."),
    _band(
        "precision",
        "Precision",
        "Share of the served passages that is relevant, mean over non-empty requests.",
    ),
    _band("harm", "Harm", "Negative part of UDCG, per request."),
    _band("recall_loss", "Recall loss", "Against the promise's baseline.", of_any_judge=False),
    Panel(
        "Requests behind each estimate",
        "n: judged requests, or labelled ones where people correct the judge. effective: how many "
        "of equal weight would support the estimate as well.",
        {
            "{{metric}}": f"max by (metric) ({shown('ctxguard_estimate_requests')})",
            "{{metric}}, effective": "max by (metric) "
            f"({shown('ctxguard_estimate_requests_effective')})",
        },
    ),
    Panel(
        "Window of each estimate",
        "The narrowest one that has an estimate; without any, the one with most requests behind "
        "it.",
        {
            "{{metric}}: {{window}}": fleet("ctxguard_estimate_shown", "metric, window"),
        },
    ),
    Panel(
        "Requests and grades still needed",
        "About how many it takes, for metrics that have no estimate yet; and for alarms that learn "
        "the judge's own mean.",
        {
            "{{metric}}": f"max by (metric) ({shown('ctxguard_estimate_requests_needed')})",
            "{{metric}}, grades": f"max by (metric) ({shown('ctxguard_estimate_grades_needed')})",
            "alarm: {{route}} {{quantity}} {{reference}}": fleet(
                "ctxguard_alarm_requests_needed", "route, quantity, reference"
            ),
        },
    ),
    Panel(
        "Age of the estimates",
        "Since the newest judged request was answered.",
        {"age": fleet("ctxguard_estimate_age_seconds", how="min")},
        unit="s",
    ),
    Panel(
        "People's labels",
        "Judged requests that people graded, and passages on which annotators disagree.",
        {
            "labelled requests": fleet("ctxguard_labelled_requests"),
            "disagreements": fleet("ctxguard_label_disagreements"),
        },
    ),
)
ALARMS = Row(
    "Alarms",
    Panel(
        "Active alarms",
        "Alarms that are active; a gap where there is none.",
        {
            "{{kind}} {{route}} {{reference}}": fleet(
                "ctxguard_alarm_active", "kind, route, reference"
            )
        },
        width=12,
    ),
    Panel(
        "Alerts of Prometheus",
        "Pending and firing; a gap where there is none.",
        {
            "{{alertname}} {{alertstate}}": "count by (alertname, alertstate) "
            '(ALERTS{alertname=~"Ctxguard.+"})'
        },
        width=12,
    ),
    Panel(
        "e-value of a rise in judged losses",
        "About 1 or less without one; at 2,000 the alarm is raised and it starts anew. Losses are "
        "compared a day at a time, once it is over. promise: against what the profile promises. "
        "corrected: the same on the scale of a judge that errs, by what people graded. baseline: "
        "against this judge's own mean over its first weeks. No data without --profile, or "
        "before the first day that is compared.",
        {
            "{{route}} {{quantity}} {{reference}}": fleet(
                "ctxguard_alarm_e_value", "route, quantity, reference"
            )
        },
        shape=Shape.LOGARITHMIC,
    ),
    Panel(
        "Targets of judged losses",
        "Mean loss that judged losses are compared with, on the judge's own scale.",
        {
            "{{route}} {{quantity}} {{reference}}": fleet(
                "ctxguard_alarm_target", "route, quantity, reference"
            )
        },
    ),
    Panel(
        "Alarms raised",
        "Since the monitor began, or went on with what the store knew.",
        {"{{kind}}": fleet("ctxguard_alarms_total", "kind")},
    ),
)
SAMPLES = Row(
    "Samples",
    Panel(
        "Sampled, stored, lost",
        "sampled = stored + pending + lost + unaccounted.",
        {
            "sampled": fleet_rate("ctxguard_samples_total"),
            "stored": fleet_rate("ctxguard_stored_samples_total"),
            "lost": f"sum ({fleet_rate('ctxguard_lost_samples_total', 'reason')})",
        },
        unit="reqps",
    ),
    Panel(
        "Lost, by reason",
        "Of all serving processes.",
        {"{{reason}}": fleet_rate("ctxguard_lost_samples_total", "reason")},
        unit="reqps",
        shape=Shape.STACKED,
    ),
    Panel(
        "Waiting",
        "On their way to the store, and in the store for a judge. Unaccounted for: what processes "
        "held when they were killed, in all.",
        {
            "for the store": fleet("ctxguard_pending_samples"),
            "for a judge": fleet("ctxguard_waiting_samples"),
            "labelled, to be judged again": fleet("ctxguard_labelled_waiting_samples"),
            "passages to be asked about again": fleet("ctxguard_failed_passages"),
            "unaccounted for": fleet("ctxguard_unaccounted_samples"),
        },
    ),
    Panel(
        "Oldest that waits",
        "For a judge; a gap where none waits.",
        {"oldest": fleet("ctxguard_oldest_waiting_seconds")},
        unit="s",
    ),
    Panel(
        "Stores and metrics files that fail",
        "1 while a monitor cannot use its store, by error; files of workers that cannot be read.",
        {
            "{{error}}": fleet("ctxguard_store_failing", "error"),
            "bad metrics files": 'sum (ctxguard_multiprocess_bad_files{job=~"$monitor|$guard"})',
        },
    ),
    Panel(
        "Monitors",
        "One owns the store and reports; others wait for it to end.",
        {
            "monitors": f"count (ctxguard_monitor_errors_total{{{MONITOR}}})",
            "reporting": f"count (ctxguard_report_time_seconds{{{MONITOR}}})",
            "errors per second": rate("ctxguard_monitor_errors_total", MONITOR),
        },
    ),
)
JUDGE = Row(
    "Judge",
    Panel(
        "Samples taken up for judging, by outcome",
        "incomplete: a passage got no grade. skipped: to keep to the budget.",
        {
            "{{outcome}}": fleet_sum(
                "ctxguard_judged_samples_total", "judge, route, outcome", "outcome"
            )
        },
        unit="reqps",
        shape=Shape.STACKED,
    ),
    Panel(
        "Grades",
        "Passages submitted to the judge.",
        {
            "submitted": fleet_sum("ctxguard_grades_total", "judge, route"),
            "invalid": fleet_sum("ctxguard_invalid_grades_total", "judge, route"),
        },
        unit="ops",
    ),
    Panel(
        "Invalid grades, by reason",
        "No data for a judge that keeps no accounts.",
        {
            "{{reason}}": fleet_sum("ctxguard_judge_invalid_total", "judge, reason", "reason")
            + " > 0"
        },
        unit="ops",
    ),
    Panel(
        "Calls",
        "Requests to the judge's endpoint.",
        {
            "calls": fleet_sum("ctxguard_judge_calls_total", "judge"),
            "of these, retries": fleet_sum("ctxguard_judge_retries_total", "judge"),
        },
        unit="reqps",
    ),
    Panel(
        "Cost per hour",
        "In the currency of the prices given; no data without prices.",
        {"cost per hour": f"3600 * {fleet_sum('ctxguard_judge_cost_total', 'judge')}"},
    ),
    Panel(
        "Tokens",
        "As the endpoint counts them.",
        {
            "{{direction}}": fleet_sum(
                "ctxguard_judge_tokens_total", "judge, direction", "direction"
            )
        },
        unit="ops",
    ),
    Panel(
        "Judging probability",
        "Probability with which a sample is judged, as the judging budget allows.",
        {"{{instance}}": fleet("ctxguard_judging_sampling_probability", "instance")},
        unit="percentunit",
    ),
    Panel(
        "Grades on passages judged again",
        "Whether the judge says the same of them as before; changed: 1 once it does not.",
        {
            "the same: {{same}}": fleet_rate("ctxguard_canary_grades_total", "same"),
            "changed": fleet("ctxguard_judge_changed"),
        },
    ),
)
