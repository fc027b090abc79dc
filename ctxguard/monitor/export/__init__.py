"""Holds the files for Prometheus and Grafana: rules, alerts, and dashboards.

``rules.yml`` and ``more_rules.yml`` are written by hand; ``dashboard.json`` and
``dashboard_all.json`` are made by the generator in ``tools/dashboard`` (``make dashboard``). All of
either is for processes that export all metrics.

Reads these files.
"""

from importlib.resources import files


def rules(*, all_metrics: bool = False) -> str:
    """Return the recording and alerting rules, as YAML for ``rule_files``."""
    more = _read("more_rules.yml").partition("groups:\n")[2] if all_metrics else ""
    return "\n".join(filter(None, (_read("rules.yml"), more)))


def dashboard_json(*, all_metrics: bool = False) -> str:
    """Return the dashboard, as JSON for Grafana's import or provisioning."""
    return _read("dashboard_all.json" if all_metrics else "dashboard.json")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
