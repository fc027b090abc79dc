"""The dashboard's rows on context, requests and stages: what the request path exports."""

from ctxguard.monitor.prometheus.panels import Panel, Query, Row, Shape
from ctxguard.monitor.prometheus.promql import GUARD, quantiles, rate, share

_REQUESTS = rate("ctxguard_requests_total", GUARD)
CONTEXT = Row(
    "Context",
    (
        Panel(
            "Kept per request",
            "Candidates that the decision and assembly kept.",
            (
                Query(
                    share(rate("ctxguard_kept_candidates_total", GUARD), _REQUESTS),
                    "kept",
                ),
            ),
        ),
        Panel(
            "Dropped per request, by reason",
            "Candidates that did not reach the context.",
            (
                Query(
                    share(
                        rate("ctxguard_dropped_candidates_total", GUARD, "reason"),
                        _REQUESTS,
                        "on () group_left () ",
                    ),
                    "{{reason}}",
                ),
            ),
            shape=Shape.STACKED,
        ),
        Panel(
            "Empty contexts",
            "Share of answers without a passage: abstentions and empty retrievals.",
            (
                Query(
                    share(
                        rate("ctxguard_context_passages_bucket", GUARD, selector='le="0.0"'),
                        rate("ctxguard_context_passages_count", GUARD),
                    ),
                    "empty",
                ),
                Query(
                    share(
                        rate("ctxguard_flags_total", GUARD, selector='flag="empty_retrieval"'),
                        _REQUESTS,
                    ),
                    "the retriever found nothing",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

TRAFFIC = Row(
    "Requests",
    (
        Panel(
            "By outcome",
            "received = ok + degraded + failed + shed, once none is under way.",
            (
                Query(rate("ctxguard_requests_total", GUARD, "outcome"), "{{outcome}}"),
                Query(rate("ctxguard_failed_requests_total", GUARD), "failed"),
                Query(rate("ctxguard_shed_requests_total", GUARD), "shed"),
            ),
            unit="reqps",
            shape=Shape.STACKED,
        ),
        Panel(
            "By route",
            "Which stages answered, in which mode.",
            (
                Query(
                    rate("ctxguard_requests_total", GUARD, "route, mode") + " > 0",
                    "{{route}} {{mode}}",
                ),
            ),
            unit="reqps",
            shape=Shape.STACKED,
        ),
        Panel(
            "Failed, by cause",
            "unavailable: no stage was left. refused and cancelled are the caller's.",
            (Query(rate("ctxguard_failed_requests_total", GUARD, "cause") + " > 0", "{{cause}}"),),
            unit="reqps",
        ),
        Panel(
            "Flags, share of answers",
            "Why an answer is not an ordinary one; one answer may carry several.",
            (
                Query(
                    share(
                        rate("ctxguard_flags_total", GUARD, "flag"),
                        _REQUESTS,
                        "on () group_left () ",
                    )
                    + " > 0",
                    "{{flag}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Time that the guard adds",
            "Validate, decide, assemble, count; without the retriever.",
            quantiles("ctxguard_guard_seconds", 0.5, 0.9, 0.99),
            unit="s",
            shape=Shape.LOGARITHMIC,
        ),
        Panel(
            "Time that the retriever takes",
            "All its stages together.",
            quantiles("ctxguard_retrieve_seconds", 0.5, 0.9, 0.99),
            unit="s",
            shape=Shape.LOGARITHMIC,
        ),
    ),
)

STAGES = Row(
    "Stages, circuit breakers, reloads",
    (
        Panel(
            "Stages left out",
            "By stage and cause.",
            (
                Query(
                    rate("ctxguard_stage_failures_total", GUARD, "stage, cause") + " > 0",
                    "{{stage}} {{cause}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            "Open circuits",
            "Breakers that leave their stage out now, over all processes.",
            (Query(f"sum by (stage) (ctxguard_open_circuits{{{GUARD}}})", "{{stage}}"),),
        ),
        Panel(
            "Circuits that opened and closed",
            "In the interval of one point.",
            (
                Query(
                    f"sum by (stage, state) (increase(ctxguard_circuit_changes_total{{{GUARD}}}"
                    "[$__rate_interval])) > 0",
                    "{{stage}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Reloads that fail",
            "Watchers whose file cannot be taken up: what was there before serves on.",
            (
                Query(f"sum (ctxguard_profile_reload_failing{{{GUARD}}})", "profile"),
                Query(f"sum (ctxguard_index_reload_failing{{{GUARD}}})", "index"),
            ),
        ),
        Panel(
            "Attempts to reload",
            "By outcome.",
            (
                Query(
                    rate("ctxguard_profile_reloads_total", GUARD, "outcome") + " > 0",
                    "profile {{outcome}}",
                ),
                Query(
                    rate("ctxguard_index_reloads_total", GUARD, "outcome") + " > 0",
                    "index {{outcome}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            "Faults that cost no answer, and filters violated",
            "Observers are the sampler and telemetry. A violated filter fails its request.",
            (
                Query(rate("ctxguard_observer_failures_total", GUARD, "observer"), "{{observer}}"),
                Query(rate("ctxguard_filter_violations_total", GUARD), "filter violations"),
            ),
            unit="ops",
        ),
    ),
)
