"""Serve's side of autoscaling, in its controller: what the catalog's process found, told by the replicas.

A policy may not wait for anybody, and sees numbers of replicas only, no names of adapters. So `fleet_scaler`
decides elsewhere, and the replicas carry the result here as a number of theirs.
"""

from __future__ import annotations

from typing import Any

POLICY = "deployments.scaling_policy:as_told"
WANTED = "wanted_replicas"


def as_told(context: Any) -> tuple[int, dict[str, Any]]:
    """`context`: Serve's AutoscalingContext. What was told last; no change while nobody tells."""
    points = [series[-1] for series in context.raw_metrics.get(WANTED, {}).values() if series]
    if not points:
        return context.target_num_replicas, {}
    return int(max(points, key=lambda point: point.timestamp).value), {}
