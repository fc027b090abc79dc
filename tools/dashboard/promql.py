"""PromQL for rates, shares and quantiles.

``$monitor`` and ``$guard`` are the jobs of the monitor and of the serving processes. Nothing is
filled in: no data is a gap. What every monitor of a store exports alike is not added up; what each
process did is. Pure.
"""

MONITOR = 'job="$monitor"'
GUARD = 'job="$guard"'


def rate(metric: str, job: str, by: str = "", selector: str = "") -> str:
    """What all processes of a job did each second."""
    chosen = ",".join(filter(None, (job, selector)))
    return f"sum{_grouped(by)} (rate({metric}{{{chosen}}}[$__rate_interval]))"


def fleet_rate(metric: str, by: str = "", selector: str = "") -> str:
    """A count that is of the whole store, whichever monitor exports it."""
    chosen = ",".join(filter(None, (MONITOR, selector)))
    return f"max{_grouped(by)} (rate({metric}{{{chosen}}}[$__rate_interval]))"


def fleet_sum(metric: str, each: str, by: str = "", selector: str = "") -> str:
    """The sum over labels of counts that are of the whole store, such as over routes."""
    return f"sum{_grouped(by)} ({fleet_rate(metric, each, selector)})"


def fleet(metric: str, by: str = "", selector: str = "", how: str = "max") -> str:
    """A figure that is of the whole store, whichever monitor exports it."""
    return f"{how}{_grouped(by)} ({metric}{{{','.join(filter(None, (MONITOR, selector)))}}})"


def shown(name: str, metric: str = "") -> str:
    """What is exported of estimates, of the window to show of each metric, or of one metric."""
    of_metric = f',metric="{metric}"' if metric else ""
    chosen = f"{name}{{{MONITOR}{of_metric}}}"
    on = "and on (job, instance, judge, metric, window)"
    return f"{chosen} {on} ctxguard_estimate_shown{{{MONITOR}}}"


def share(part: str, whole: str, joining: str = "") -> str:
    """A ratio that is absent where its whole is 0."""
    return f"{part}\n/ {joining}({whole} > 0)"


def quantiles(metric: str, *levels: float) -> dict[str, str]:
    """Quantiles of a histogram of the serving processes, by name."""
    buckets = rate(f"{metric}_bucket", GUARD, "le")
    return {f"p{level * 100:g}": f"histogram_quantile({level}, {buckets}) >= 0" for level in levels}


def _grouped(labels: str) -> str:
    return f" by ({labels})" if labels else ""
