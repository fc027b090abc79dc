"""The files for Prometheus and Grafana: rules, alerts, and dashboards.

``rules.yml`` and ``more_rules.yml`` are written by hand; ``dashboard.json`` and
``dashboard_all.json`` are made by the generator in ``tools/dashboard`` (``make dashboard``).
"""

from importlib.resources import files


def rules(*, all_metrics: bool = False) -> str:
    """Write the recording and alerting rules, as YAML for ``rule_files``.

    Args:
        all_metrics: Whether to write all, for processes that export all metrics.
    """
    more = _read("more_rules.yml").partition("groups:\n")[2] if all_metrics else ""
    return "\n".join(filter(None, (_read("rules.yml"), more)))


def dashboard_json(*, all_metrics: bool = False) -> str:
    """Write the dashboard, as JSON for Grafana's import or provisioning.

    Args:
        all_metrics: Whether to write all panels, for processes that export all metrics.
    """
    return _read("dashboard_all.json" if all_metrics else "dashboard.json")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
