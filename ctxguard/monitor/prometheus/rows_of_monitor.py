"""The dashboard's rows on quality, alarms, samples and the judge: what the monitor exports."""

from ctxguard.monitor.prometheus.panels import (
    ESTIMATE,
    LOWER,
    UNCORRECTED,
    UPPER,
    Panel,
    Query,
    Row,
    Shape,
)
from ctxguard.monitor.prometheus.promql import GUARD, MONITOR, fleet, fleet_rate, rate


def _band(metric: str, title: str, description: str) -> Panel:
    chosen = f'{MONITOR},metric="{metric}",window="$window"'
    return Panel(
        title,
        f"{description} The band is its interval; no line where the data do not suffice.",
        (
            Query(f"max (ctxguard_estimate{{{chosen}}})", ESTIMATE),
            Query(f"min (ctxguard_estimate_lower{{{chosen}}})", LOWER),
            Query(f"max (ctxguard_estimate_upper{{{chosen}}})", UPPER),
            Query(f"max (ctxguard_uncorrected_estimate{{{chosen}}})", UNCORRECTED),
        ),
        shape=Shape.BAND,
    )


_WINDOW = f'{MONITOR},window="$window"'

NOW = Row(
    "Now",
    (
        *[
            Panel(
                title,
                f"{title} of live traffic, over the window chosen above.",
                (
                    Query(
                        f'max (ctxguard_estimate{{{MONITOR},metric="{metric}",window="$window"}})',
                        title,
                    ),
                ),
                shape=Shape.FIGURE,
                width=4,
            )
            for metric, title in (("recall", "Recall"), ("mrr", "MRR"), ("udcg", "UDCG"))
        ],
        Panel(
            "Age of the estimates",
            "Since the newest judged request was answered.",
            (Query(fleet("ctxguard_estimate_age_seconds", how="min"), "age"),),
            unit="s",
            shape=Shape.FIGURE,
            width=4,
        ),
        Panel(
            "Requests",
            "Received each second.",
            (Query(rate("ctxguard_received_requests_total", GUARD), "requests"),),
            unit="reqps",
            shape=Shape.FIGURE,
            width=4,
        ),
        Panel(
            "Alerts that fire",
            "No data where none does.",
            (Query('count (ALERTS{alertname=~"Ctxguard.+",alertstate="firing"})', "alerts"),),
            shape=Shape.FIGURE,
            width=4,
        ),
    ),
)

QUALITY = Row(
    "Quality of live traffic",
    (
        _band("recall", "Recall of the pool", "Share of the pools' relevant passages served."),
        _band("mrr", "MRR", "Mean reciprocal rank over requests with a relevant passage."),
        _band("udcg", "UDCG, strict", "Gain less harm, per request; every passage counts."),
        _band("precision", "Precision", "Share of the served passages that are relevant."),
        _band("harm", "Harm", "Negative part of UDCG, per request."),
        _band("recall_loss", "Recall loss", "Against the certificate's baseline."),
        _band(
            "retriever_miss",
            "Missed by the retriever",
            "Relevant passages beyond the pool, from audits; recall knows nothing of them.",
        ),
        Panel(
            "Requests behind each estimate",
            "n: judged requests, or labelled ones where people correct the judge.",
            (
                Query(
                    f"max by (metric) (ctxguard_estimate_requests{{{_WINDOW}}})",
                    "{{metric}}",
                ),
            ),
        ),
        Panel(
            "Requests still needed",
            "About how many it takes, for metrics that have no estimate yet.",
            (
                Query(
                    f"max by (metric) (ctxguard_estimate_requests_needed{{{_WINDOW}}})",
                    "{{metric}}",
                ),
            ),
        ),
        Panel(
            "Age of the estimates",
            "Since the newest judged request was answered.",
            (Query(fleet("ctxguard_estimate_age_seconds", how="min"), "age"),),
            unit="s",
        ),
        Panel(
            "Confidence sequences of the judge, uncorrected",
            "May be watched without end: since the monitor began.",
            (
                Query(fleet("ctxguard_uncorrected_sequence_lower", "metric"), "{{metric}} lower"),
                Query(fleet("ctxguard_uncorrected_sequence_upper", "metric"), "{{metric}} upper"),
            ),
            unit="percentunit",
        ),
        Panel(
            "People's labels",
            "Judged requests that people graded, and passages on which annotators disagree.",
            (
                Query(fleet("ctxguard_labelled_requests"), "labelled requests"),
                Query(fleet("ctxguard_label_disagreements"), "disagreements"),
            ),
        ),
    ),
)

ALARMS = Row(
    "Alarms and evidence",
    (
        Panel(
            "Active alarms",
            "Alarms that nobody has acknowledged; a gap where there is none.",
            (
                Query(
                    fleet("ctxguard_alarm_active", "kind, severity, route, signal"),
                    "{{severity}}: {{kind}} {{route}} {{signal}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Alerts of Prometheus",
            "Pending and firing; a gap where there is none.",
            (
                Query(
                    'count by (alertname, alertstate) (ALERTS{alertname=~"Ctxguard.+"})',
                    "{{alertname}} {{alertstate}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Evidence against the profile's promises",
            "About 1 or less while a promise holds; the alarm rings at 10,000 and it starts anew. "
            "No data without --profile.",
            (Query(fleet("ctxguard_alarm_evidence", "route, quantity"), "{{route}} {{quantity}}"),),
            shape=Shape.LOGARITHMIC,
        ),
        Panel(
            "Promises watched",
            "Mean loss that the certificate or the held-out evidence allows.",
            (Query(fleet("ctxguard_alarm_target", "route, quantity"), "{{route}} {{quantity}}"),),
        ),
        Panel(
            "Alarms raised",
            "Since the monitor began, or went on with what the store knew.",
            (Query(f"sum by (kind) (ctxguard_alarms_total{{{MONITOR}}})", "{{kind}}"),),
        ),
    ),
)

SAMPLES = Row(
    "Samples",
    (
        Panel(
            "Sampled, stored, lost",
            "sampled = stored + pending + lost.",
            (
                Query(fleet_rate("ctxguard_samples_total"), "sampled"),
                Query(fleet_rate("ctxguard_stored_samples_total"), "stored"),
                Query(f"sum ({fleet_rate('ctxguard_lost_samples_total', 'reason')})", "lost"),
            ),
            unit="reqps",
        ),
        Panel(
            "Lost, by reason",
            "Of all serving processes.",
            (Query(fleet_rate("ctxguard_lost_samples_total", "reason"), "{{reason}}"),),
            unit="reqps",
            shape=Shape.STACKED,
        ),
        Panel(
            "Waiting",
            "On their way to the store, and in the store for a judge.",
            (
                Query(fleet("ctxguard_pending_samples"), "for the store"),
                Query(fleet("ctxguard_waiting_samples"), "for a judge"),
            ),
        ),
        Panel(
            "Oldest that waits",
            "For a judge; a gap where none waits.",
            (Query(fleet("ctxguard_oldest_waiting_seconds"), "oldest"),),
            unit="s",
        ),
        Panel(
            "Damaged stores and metrics files",
            "1 where a damaged store lies aside; files of workers that cannot be read.",
            (
                Query(fleet("ctxguard_store_quarantined"), "store set aside"),
                Query(
                    'sum (ctxguard_multiprocess_bad_files{job=~"$monitor|$guard"})',
                    "bad metrics files",
                ),
            ),
        ),
        Panel(
            "Monitors",
            "Of which one leads: it cleans the store and settles accounts.",
            (
                Query(f"count (ctxguard_monitor_leads{{{MONITOR}}})", "monitors"),
                Query(f"sum (ctxguard_monitor_leads{{{MONITOR}}})", "leading"),
                Query(rate("ctxguard_monitor_errors_total", MONITOR), "errors per second"),
            ),
        ),
    ),
)

JUDGE = Row(
    "Judge",
    (
        Panel(
            "Samples taken up, by outcome",
            "incomplete: a served passage got no valid verdict. skipped: to keep to the budget.",
            (Query(rate("ctxguard_judged_samples_total", MONITOR, "outcome"), "{{outcome}}"),),
            unit="reqps",
            shape=Shape.STACKED,
        ),
        Panel(
            "Verdicts",
            "Passages that the judge was asked about.",
            (
                Query(rate("ctxguard_verdicts_total", MONITOR), "asked"),
                Query(rate("ctxguard_invalid_verdicts_total", MONITOR), "invalid"),
            ),
            unit="ops",
        ),
        Panel(
            "Invalid verdicts, by reason",
            "No data for a judge that keeps no accounts.",
            (
                Query(
                    rate("ctxguard_judge_invalid_total", MONITOR, "reason") + " > 0",
                    "{{reason}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            "Calls",
            "Requests to the judge's endpoint.",
            (
                Query(rate("ctxguard_judge_calls_total", MONITOR), "calls"),
                Query(rate("ctxguard_judge_retries_total", MONITOR), "of these, retries"),
            ),
            unit="reqps",
        ),
        Panel(
            "Cost per hour",
            "In the currency of the prices given; no data without prices.",
            (
                Query(
                    f"3600 * {rate('ctxguard_judge_cost_total', MONITOR)}",
                    "cost per hour",
                ),
            ),
        ),
        Panel(
            "Tokens",
            "As the endpoint counts them.",
            (Query(rate("ctxguard_judge_tokens_total", MONITOR, "direction"), "{{direction}}"),),
            unit="ops",
        ),
        Panel(
            "Judging share",
            "Probability with which a sample is taken up within the budget.",
            (Query(fleet("ctxguard_judging_share", "instance"), "{{instance}}"),),
            unit="percentunit",
        ),
        Panel(
            "Users' reactions in the store",
            "They see only what was served: no judgments, and in no estimate.",
            (Query(fleet("ctxguard_feedback", "kind"), "{{kind}}"),),
        ),
    ),
)
