"""``ctxguard metrics``: the files that Prometheus and Grafana need."""

from typing import Literal

from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli._console import Output


class MetricsCommand(SettingsModel):
    what: Literal["rules", "dashboard", "details"] = setting(
        "File to print: rules (YAML for Prometheus), dashboard (JSON for Grafana) or details "
        "(the dashboard of all other panels).",
        "rules|dashboard|details",
        argument=True,
    )

    def __call__(self, output: Output) -> None:
        """For example: ctxguard metrics rules > /etc/prometheus/ctxguard.yml

        docs/alertmanager.yml in the project's repository is an example of an
        Alertmanager that sends these alerts to people.
        """
        from ctxguard.monitor.export import dashboard_json, details_json, rules

        files = {"rules": rules, "dashboard": dashboard_json, "details": details_json}
        output.text(files[self.what](), end="")
