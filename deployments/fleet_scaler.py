"""Looks at all replicas once a second, decides how many there should be, hands over what must not be lost.

Runs in the catalog's process: there is one of it, it has a handle of the engines, and it knows where adapters
are. While it is away nothing is scaled. See `router.autoscaling` for the rule.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ray.serve.exceptions import DeploymentUnavailableError

from engine.errors import LorafleetError, Unavailable
from engine.request import AdapterRef
from engine.stats import BASE
from engine.wire import encode_ref
from router.autoscaling import HANDOVER_S, Autoscaler, Bounds, Handover, ReplicaLoad

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class Broadcast(Protocol):
    """`deployments.fleet_service.Replicas.broadcast`."""

    async def __call__(self, method: str, *args: Any, timeout_s: float = ...) -> list[dict[str, Any]]:
        """The answers of those that answer in time.

        Raises Unavailable if nobody does; because of DeploymentUnavailableError if there is no replica.
        """


class FleetScaler:
    def __init__(
        self, bounds: Bounds, broadcast: Broadcast, lookup: Callable[[str], Awaitable[AdapterRef]]
    ) -> None:
        self._scaler = Autoscaler(bounds)
        self._broadcast = broadcast
        self._lookup = lookup
        self._wanted: int | None = None  # replicas, by the last plan
        self._handed: set[Handover] = set()
        self._loading: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def look(self, now: float) -> None:
        wanted = self._wanted
        try:
            loads = [decode_load(answer) for answer in await self._broadcast("scaling", wanted)]
        except Unavailable as error:
            if not isinstance(error.__cause__, DeploymentUnavailableError):
                return  # too busy to answer in time: what was wanted stays so
            loads = []
        plan = self._scaler.plan(loads, now)
        if plan.num_replicas not in (None, wanted):
            logger.info("%d replicas serve, %d are wanted", len(loads), plan.num_replicas)
        self._wanted = plan.num_replicas
        self._handed &= set(plan.handovers)
        new = [handover for handover in plan.handovers if handover not in self._handed]
        if new:
            self._handed.update(new)
            # loads take their time, and looks go on
            task = asyncio.create_task(self._hand_over(new))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    async def _hand_over(self, handovers: list[Handover]) -> None:
        refs: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        for handover in handovers:
            try:
                refs[handover.to].append(encode_ref(await self._lookup(handover.adapter)))
            except LorafleetError as error:  # it was removed meanwhile, or its source is down
                logger.warning("adapter %s is not handed over: %s", handover.adapter, error.message)
        try:
            answers = await self._broadcast("take_over", dict(refs), timeout_s=HANDOVER_S)
        except Unavailable:
            logger.warning("%d adapters are not handed over: no replica answers", len(handovers))
            self._handed.difference_update(handovers)  # the next look tries again
            return
        for refused in (refused for answer in answers for refused in answer["errors"]):
            logger.warning("an adapter is not handed over: %s", refused["message"])


def encode_load(stats: dict[str, Any], wanted: list[str], replica_id: str) -> dict[str, Any]:
    """`stats`: the engine's; `wanted`: adapters that had requests lately."""
    pages, cost = stats.get("pages", {}), stats.get("step_cost")
    adapters = {name: entry for name, entry in stats.get("adapters", {}).items() if name != BASE}
    return {
        "replica_id": replica_id,
        "seats": stats.get("max_num_seqs", 1),
        "slots": stats.get("slots", {}).get("total", 1),
        "num_requests": stats.get("running", 0) + stats.get("waiting", 0),
        "queued_tokens": stats.get("tokens", {}).get("queued", 0),
        "prefill_s": cost[1] if cost else 0.0,
        "num_pages": pages.get("total", 1),
        "used_pages": pages.get("kv", 0) + stats.get("lora_pages", 0),
        "page_tokens": stats.get("page_tokens", 1),
        "in_use": [name for name, e in adapters.items() if e.get("running", 0) + e.get("waiting", 0)],
        "wanted": wanted,
        "holds": [name for name, entry in adapters.items() if entry.get("tier") in ("hbm", "host")],
    }


def decode_load(data: dict[str, Any]) -> ReplicaLoad:
    names = {key: frozenset(data[key]) for key in ("in_use", "wanted", "holds")}
    return ReplicaLoad(**{**data, **names})
