"""``ctxguard metrics``: what Prometheus and Grafana need to watch over ctxguard."""

from enum import StrEnum
from typing import Annotated

import typer


class MetricsFile(StrEnum):
    """What is printed."""

    RULES = "rules"
    DASHBOARD = "dashboard"


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("metrics")(metrics)


def metrics(
    what: Annotated[
        MetricsFile,
        typer.Argument(help="rules: YAML for Prometheus; dashboard: JSON for Grafana's import."),
    ],
) -> None:
    """Print the rules and alerts for Prometheus, or the dashboard for Grafana.

    For example: ctxguard metrics rules > /etc/prometheus/ctxguard.yml
    """
    from ctxguard.monitor.prometheus import dashboard_json, rules

    typer.echo(rules() if what is MetricsFile.RULES else dashboard_json(), nl=False)
