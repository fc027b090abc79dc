"""``ctxguard metrics``: the files that Prometheus and Grafana need."""

from typing import Literal

import typer

from ctxguard._support.settings import SettingsModel, setting


class Metrics(SettingsModel):
    """Settings of ``ctxguard metrics``."""

    what: Literal["rules", "dashboard"] = setting(
        "File to print: rules (YAML for Prometheus) or dashboard (JSON for Grafana).",
        "rules|dashboard",
        argument=True,
    )


def metrics(settings: Metrics) -> None:
    """Print the recording and alerting rules for Prometheus, or the dashboard for Grafana.

    For example: ctxguard metrics rules > /etc/prometheus/ctxguard.yml

    docs/alertmanager.yml in the project's repository is an example of an
    Alertmanager that sends these alerts to people.
    """
    from ctxguard.monitor.export import dashboard_json, rules

    typer.echo(rules() if settings.what == "rules" else dashboard_json(), nl=False)
