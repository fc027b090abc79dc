"""``ctxguard metrics``: the files that Prometheus and Grafana need."""

from enum import StrEnum
from typing import Annotated

import typer


class MetricsFile(StrEnum):
    """A file that the package ships."""

    RULES = "rules"
    DASHBOARD = "dashboard"


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("metrics")(metrics)


def metrics(
    what: Annotated[
        MetricsFile,
        typer.Argument(
            metavar="rules|dashboard",
            help="File to print: rules (YAML for Prometheus) or dashboard (JSON for Grafana).",
        ),
    ],
) -> None:
    """Print the recording and alerting rules for Prometheus, or the dashboard for Grafana.

    For example: ctxguard metrics rules > /etc/prometheus/ctxguard.yml

    docs/alertmanager.yml in the project's repository is an example of an
    Alertmanager that sends these alerts to people.
    """
    from ctxguard.monitor.export import dashboard_json, rules

    typer.echo(rules() if what is MetricsFile.RULES else dashboard_json(), nl=False)
