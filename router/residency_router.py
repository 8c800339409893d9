"""The policy inside Ray Serve's request router. Knows Serve's router API and the names in a replica's stats.

Serve pickles this module by value into every process that holds a handle, so its imports stay light and
must exist on every node. Each handle has a router of its own; they share nothing but the replicas' stats:

    routing_stats     {"resident", "host", "loading": sorted names, "running", "waiting", "free_slots": ints}
    replica_metadata  {"max_num_seqs", "max_adapters": ints}

Every call carries a multiplexed_model_id, the base model's being BASE_ID. A caller that passes `route=""`
gets it replaced by the reason of the choice, so that the replica can count reasons.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from engine.stats import BASE
from router.policy import DEFAULT_MEMORY_S, DEFAULT_SLACK, ReplicaSnapshot, ResidencyPolicy

BASE_ID = BASE  # a call without an id would get another request's replica


class ResidencyRouter(FIFOMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    def initialize_state(self, slack: int = DEFAULT_SLACK, memory_s: float = DEFAULT_MEMORY_S) -> None:
        self._policy = ResidencyPolicy(Random(), slack=slack, memory_s=memory_s)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [list(candidate_replicas)]
        # without it the retry loop spins
        pending_request.routing_context.should_backoff = True
        adapter = _adapter(pending_request)
        by_id = {r.replica_id.unique_id: r for r in candidate_replicas}
        choice = self._policy.choose(
            adapter, [self._snapshot(r) for r in candidate_replicas], time.monotonic()
        )
        if "route" in pending_request.kwargs:
            pending_request.kwargs["route"] = choice.reason
        return [[by_id[replica_id]] for replica_id in choice.order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        adapter = _adapter(pending_request)
        if adapter is not None:
            self._policy.routed(adapter, replica_id.unique_id, time.monotonic())

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: Any | None = None
    ) -> None:
        """Give the replica to the very request it was chosen for, and to no other.

        The mixins match by model id, else take the queue's head. Calls made inside one parent request share
        an internal id and only the first is indexed, so a replica chosen for a later one went to somebody
        else's request, for another adapter.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return

    def _snapshot(self, replica: RunningReplica) -> ReplicaSnapshot:
        stats, metadata = replica.routing_stats, replica.replica_metadata
        return ReplicaSnapshot(
            replica_id=replica.replica_id.unique_id,
            resident=frozenset(stats.get("resident", ())),
            host=frozenset(stats.get("host", ())),
            loading=frozenset(stats.get("loading", ())),
            num_running=stats.get("running", 0),
            num_waiting=stats.get("waiting", 0),
            free_slots=stats.get("free_slots", metadata.get("max_adapters", 1)),
            max_num_seqs=metadata.get("max_num_seqs", replica.max_ongoing_requests),
            queue_len=self.replica_queue_len_cache.get(replica.replica_id) or 0,
        )


def _adapter(pending_request: PendingRequest) -> str | None:
    model_id: str = pending_request.metadata.multiplexed_model_id
    return None if model_id in ("", BASE_ID) else model_id
