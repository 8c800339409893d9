"""What an ingress replica knows of the catalog, as Prometheus text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from deployments.service import CatalogFacts


def render(facts: CatalogFacts) -> str:
    registry = CollectorRegistry(auto_describe=False)
    states = Gauge("lorafleet_catalog_adapters", "Adapters by state.", ["state"], registry=registry)
    for state, count in sorted(facts.states.items()):
        states.labels(state).set(count)
    kept = Gauge(
        "lorafleet_catalog_kept", "1 for where run-time loads are kept.", ["kept"], registry=registry
    )
    kept.labels(facts.kept).set(1)
    return generate_latest(registry).decode()
