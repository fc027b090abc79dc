"""``ctxguard metrics``: print the files that Prometheus and Grafana need.

Writes to standard output alone.
"""

from typing import Literal

from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli._console import Output
from ctxguard.server.system import AllMetrics


class MetricsCommand(SettingsModel):
    all_metrics: AllMetrics = False
    what: Literal["rules", "dashboard"] = setting(
        "File to print: rules (YAML for Prometheus) or dashboard (JSON for Grafana).",
        "rules|dashboard",
        argument=True,
    )

    def __call__(self, output: Output) -> None:
        """For example: ctxguard metrics rules > /etc/prometheus/ctxguard.yml

        With all-metrics = true in the --system file, which `ctxguard serve` and
        `ctxguard monitor` read too, all alerts or panels are printed.

        docs/alertmanager.yml in the project's repository is an example of an
        Alertmanager that sends these alerts to people.
        """
        from ctxguard.monitor.export import dashboard_json, rules

        printed = {"rules": rules, "dashboard": dashboard_json}[self.what]
        output.text(printed(all_metrics=self.all_metrics), end="")
