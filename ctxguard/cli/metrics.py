"""``ctxguard metrics``: the files that Prometheus and Grafana need."""

from typing import Literal

import typer

from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli._console import Output


class MetricsCommand(SettingsModel):
    what: Literal["rules", "dashboard"] = setting(
        "File to print: rules (YAML for Prometheus) or dashboard (JSON for Grafana).",
        "rules|dashboard",
        argument=True,
    )

    def __call__(self, _: Output) -> None:
        """For example: ctxguard metrics rules > /etc/prometheus/ctxguard.yml

        docs/alertmanager.yml in the project's repository is an example of an
        Alertmanager that sends these alerts to people.
        """
        from ctxguard.monitor.export import dashboard_json, rules

        typer.echo(rules() if self.what == "rules" else dashboard_json(), nl=False)
