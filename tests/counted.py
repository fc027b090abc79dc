"""What a guard counted, read back from a registry of its own as people's tools do."""

from prometheus_client import CollectorRegistry

from ctxguard.guard.telemetry import Telemetry


class Counted:
    """The guard's own metrics."""

    def __init__(self, kind: type[Telemetry] = Telemetry) -> None:
        self.registry = CollectorRegistry()
        self.telemetry = kind(self.registry, all_metrics=True)

    def __getitem__(self, name: str) -> int:
        """The sum of a metric over all its labels."""
        return sum(self.by_label(name).values())

    def by_label(self, name: str) -> dict[tuple[str, ...], int]:
        return {
            tuple(sample.labels.values()): int(sample.value)
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name in (f"ctxguard_{name}_total", f"ctxguard_{name}") and sample.value
        }

    def requests(self, outcome: str) -> int:
        return sum(n for labels, n in self.by_label("requests").items() if labels[2] == outcome)

    def dropped(self) -> dict[str, int]:
        return {reason: n for (reason,), n in self.by_label("dropped_candidates").items()}

    @property
    def failed(self) -> dict[str, int]:
        return {cause: n for (_, cause), n in self.by_label("failed_requests").items()}

    def add_up(self) -> bool:
        ended = self["requests"] + self["failed_requests"] + self["shed_requests"]
        return self["received_requests"] == ended
