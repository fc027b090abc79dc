"""The dashboard's rows on context, requests and stages: what processes that serve export."""

from tools.dashboard.panels import Panel, Row, Shape
from tools.dashboard.promql import GUARD, quantiles, rate, share

_REQUESTS = rate("ctxguard_requests_total", GUARD)
CONTEXT = Row(
    "Context",
    Panel(
        "Kept per request",
        "Candidates that the decision and assembly kept.",
        {"kept": share(rate("ctxguard_kept_candidates_total", GUARD), _REQUESTS)},
    ),
    Panel(
        "Dropped per request, by reason",
        "Candidates that did not reach the context.",
        {
            "{{reason}}": share(
                rate("ctxguard_dropped_candidates_total", GUARD, "reason"),
                _REQUESTS,
                "on () group_left () ",
            )
        },
        shape=Shape.STACKED,
    ),
    Panel(
        "Empty and insufficient contexts",
        "Empty: abstentions and empty retrievals. Insufficient: probably nothing kept is relevant.",
        {
            "empty": share(
                rate("ctxguard_context_passages_bucket", GUARD, selector='le="0.0"'),
                rate("ctxguard_context_passages_count", GUARD),
            ),
            "the retriever found nothing": share(
                rate("ctxguard_flags_total", GUARD, selector='flag="empty_retrieval"'), _REQUESTS
            ),
            "insufficient": share(
                rate(
                    "ctxguard_context_sufficiency_total", GUARD, selector='context="insufficient"'
                ),
                rate("ctxguard_context_sufficiency_total", GUARD),
            ),
        },
        unit="percentunit",
    ),
)
_ASKED = rate("ctxguard_assessed_candidates_total", GUARD, selector='outcome!="over_budget"')
_CANDIDATES = (
    f"({rate('ctxguard_kept_candidates_total', GUARD)}"
    f" + {rate('ctxguard_dropped_candidates_total', GUARD)})"
)
SHARE_ASKED = share(_ASKED, _CANDIDATES)
"""Share of candidates that an assessor is asked about."""
ASSESSOR = Row(
    "Assessor",
    Panel(
        "Candidates worth asking about, by outcome",
        "cached: answered for an earlier request. over_budget: not asked.",
        {
            "{{outcome}}": rate("ctxguard_assessed_candidates_total", GUARD, "outcome"),
        },
        unit="ops",
        shape=Shape.STACKED,
    ),
    Panel(
        "Requests that ask, and whose decision that changes",
        "Share of requests. recorded: in shadow, the change is not served.",
        {
            "ask": share(rate("ctxguard_assessed_requests_total", GUARD), _REQUESTS),
            "changed, {{answers}}": share(
                rate("ctxguard_changed_decisions_total", GUARD, "answers"),
                _REQUESTS,
                "on () group_left () ",
            ),
        },
        unit="percentunit",
    ),
    Panel(
        "Cost of asking per hour",
        "In the currency of the assessor's prices; 0 without prices.",
        {"cost per hour": f"3600 * {rate('ctxguard_assessor_cost_total', GUARD)}"},
    ),
)
TRAFFIC = Row(
    "Requests",
    Panel(
        "By outcome",
        "received = ok + degraded + failed + shed, once none is under way.",
        {
            "{{outcome}}": rate("ctxguard_requests_total", GUARD, "outcome"),
            "failed": rate("ctxguard_failed_requests_total", GUARD),
            "shed": rate("ctxguard_shed_requests_total", GUARD),
        },
        unit="reqps",
        shape=Shape.STACKED,
    ),
    Panel(
        "By route",
        "Which stages answered, in which mode.",
        {"{{route}} {{mode}}": rate("ctxguard_requests_total", GUARD, "route, mode") + " > 0"},
        unit="reqps",
        shape=Shape.STACKED,
    ),
    Panel(
        "Failed, by cause",
        "unavailable: no stage was left. invalid_request and cancelled are the caller's.",
        {"{{cause}}": rate("ctxguard_failed_requests_total", GUARD, "cause") + " > 0"},
        unit="reqps",
    ),
    Panel(
        "Flags, share of answers",
        "Why an answer is not an ordinary one; one answer may carry several.",
        {
            "{{flag}}": share(
                rate("ctxguard_flags_total", GUARD, "flag"), _REQUESTS, "on () group_left () "
            )
            + " > 0"
        },
        unit="percentunit",
    ),
    Panel(
        "HTTP requests, by outcome",
        "Of `ctxguard serve`; received = the sum of the outcomes, once none is under way.",
        {
            "received": rate("ctxguard_http_received_requests_total", GUARD),
            "{{outcome}}": rate("ctxguard_http_requests_total", GUARD, "outcome") + " > 0",
        },
        unit="reqps",
    ),
    Panel(
        "Time of HTTP requests",
        "By endpoint of `ctxguard serve`, 99th percentile.",
        {
            "{{endpoint}}": "histogram_quantile(0.99, "
            + rate("ctxguard_http_request_seconds_bucket", GUARD, "le, endpoint")
            + ") >= 0"
        },
        unit="s",
        shape=Shape.LOGARITHMIC,
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
)
STAGES = Row(
    "Stages, circuit breakers, reloads",
    Panel(
        "Stages left out",
        "By stage and cause.",
        {
            "{{stage}} {{cause}}": rate("ctxguard_stage_failures_total", GUARD, "stage, cause")
            + " > 0"
        },
        unit="reqps",
    ),
    Panel(
        "Open circuits",
        "Breakers that leave their stage out now, over all processes.",
        {"{{stage}}": f"sum by (stage) (ctxguard_open_circuits{{{GUARD}}})"},
    ),
    Panel(
        "Circuits that opened and closed",
        "In the interval of one point.",
        {
            "{{stage}} {{state}}": "sum by (stage, state) (increase("
            f"ctxguard_circuit_changes_total{{{GUARD}}}[$__rate_interval])) > 0"
        },
    ),
    Panel(
        "Reloads that fail",
        "Watchers whose file cannot be loaded: the one before stays in force.",
        {
            "profile": f"sum (ctxguard_profile_reload_failing{{{GUARD}}})",
            "index": f"sum (ctxguard_index_reload_failing{{{GUARD}}})",
        },
    ),
    Panel(
        "Attempts to reload",
        "By outcome.",
        {
            "profile {{outcome}}": rate("ctxguard_profile_reloads_total", GUARD, "outcome")
            + " > 0",
            "index {{outcome}}": rate("ctxguard_index_reloads_total", GUARD, "outcome") + " > 0",
        },
        unit="ops",
    ),
    Panel(
        "Faults that cost no answer, and filters violated",
        "Observers are the sampler and telemetry. A violated filter fails its request.",
        {
            "{{observer}}": rate("ctxguard_observer_failures_total", GUARD, "observer"),
            "filter violations": rate("ctxguard_filter_violations_total", GUARD),
        },
        unit="ops",
    ),
)
