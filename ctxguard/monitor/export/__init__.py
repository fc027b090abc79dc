"""The files for Prometheus and Grafana: rules, alerts, and dashboards.

``rules.yml`` is written by hand; ``dashboard.json`` and ``details.json``, which it links, are made
by the generator in ``tools/dashboard`` (``make dashboard``).
"""

from importlib.resources import files


def rules() -> str:
    """Write the recording and alerting rules, as YAML for ``rule_files``."""
    return _read("rules.yml")


def dashboard_json() -> str:
    """Write the dashboard, as JSON for Grafana's import or provisioning."""
    return _read("dashboard.json")


def details_json() -> str:
    """Write the dashboard of all other panels, as JSON for Grafana."""
    return _read("details.json")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
