"""Names of series: those that a replica and an ingress export, and those that an expression reads."""

from __future__ import annotations

import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.catalog_metrics import render
from deployments.exposition import text_of
from deployments.ingress_books import IngressBooks
from deployments.metrics import families
from deployments.replica_books import ReplicaBooks
from deployments.service import CatalogFacts
from engine.stats import EngineStats

LABEL_VALUES = re.compile(r"^label_values\((\w+), (\w+)\)$")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?=[{\[ )]|$)")


def exported() -> dict[str, set[str]]:
    """Labels by name of series, of a replica in which everything has happened."""
    stats = EngineStats()
    stats.adapter("sql").evictions["slot"] += 1
    books = ReplicaBooks()
    books.arrived("sql", "home", now=0.0)
    books.ended("sql", now=1.0, error="overloaded")
    entry = {**stats.adapter("sql").to_dict(), "tier": "hbm", "pages": 4, "running": 0, "waiting": 0}
    engine: dict[str, Any] = {
        "pages": {"total": 3, "free": 1, "kv": 1, "prefix": 0, "adapters": 1},
        "page_bytes": 8,
        "evictions": {"hbm": {"slot": 1}},
        "evictions_blocked": {"slot": 1},
        "prefetches": {"hint": {"copied": 1, "used": 1}},
        "load_seconds": stats.load_seconds.to_dict(),
        "step_seconds": stats.step_seconds.to_dict(),
        "step_adapters": stats.step_adapters.to_dict(),
        "adapters": {"sql": entry},
    }
    merged = books.merge_into(engine)
    merged["adapters"]["sql"]["finished"] = {"error": 1}
    return _on(text_of(families([{"replica": "r1", **merged}], now=0.0)))


def exported_by_ingress() -> dict[str, set[str]]:
    """The same of the ingress's own page."""
    return _on(text_of(IngressBooks().families("i1")) + render(CatalogFacts("file", {"ready": 1})))


def _on(page: str) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def read_by(expression: str) -> set[str]:
    """Ours only, recorded ones included; functions and labels have other names."""
    return {
        name
        for name in _NAME.findall(expression)
        if name.startswith("lorafleet_") or re.match(r"[a-z]+:lorafleet_", name)
    }


def labels_of(expression: str) -> set[str]:
    """Those that it selects or groups by."""
    selected = re.findall(r"(\w+)(?:=~|!=|!~|=)\"", expression)
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    return {*selected, *(name.strip() for group in grouped for name in group.split(",") if name.strip())}
