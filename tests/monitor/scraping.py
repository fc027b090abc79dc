"""A scrape as figures by name and labels."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(exported: CollectorRegistry | Collector) -> Samples:
    """Every sample by name and labels but the judge's; no series comes twice."""
    registry = exported
    if not isinstance(registry, CollectorRegistry):
        registry = CollectorRegistry()
        registry.register(exported)  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    samples = {
        (one.name, frozenset((name, at) for name, at in one.labels.items() if name != "judge")): (
            one.value
        )
        for one in found
    }
    assert len(samples) == len(found), "a series was exported twice"
    return samples


def one(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))
