"""The policy inside Ray Serve's request router. Knows Serve's router API and the names in a replica's stats.

Serve pickles this module by value into every process that holds a handle, so its imports stay light and
must exist on every node. Each handle has a router of its own; they share nothing but the replicas' stats:

    routing_stats     see `deployments.replica_books.routing_stats`
    replica_metadata  {"max_num_seqs", "max_adapters", "max_requests": ints}; Serve's own limit is above the
                      last one, so that a replica that is full of requests still takes other calls

Stats are read when they arrive, not when a request does. Choosing asks nobody: how many requests a replica
has is known from its stats, from its answers, and from what was sent since; if it is full all the same, it
rejects and says so. While requests wait in the router, adapters take turns; one that would wait for more than
`max_wait_s`, or than its own `timeout_s`, is refused at once. The replicas that they will go to are told
(`router.hints`), so that their adapters are there before them.

Every call carries a multiplexed_model_id, the base model's being BASE_ID. A caller that passes `route=""`
gets it replaced by the reason of the choice, so that the replica can count reasons.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.from_serve import (
    BASE_ID,
    read_adapter,
    read_report,
    read_request,
    read_timeout_s,
    read_waiting,
    take_time,
)
from router.hint_calls import HintCalls
from router.hints import Hint, Hints, Waiting
from router.policy import (
    DEFAULT_MAX_WAIT_S,
    DEFAULT_MEMORY_S,
    DEFAULT_SLACK,
    ResidencyPolicy,
)
from router.turns import Turns

LOOK_AGAIN_S = 0.05  # while requests wait for a place
BURST_S = 1.0  # nobody is refused before so long a time shows how fast requests end
__all__ = ["BASE_ID", "ResidencyRouter"]


@dataclass(slots=True, eq=False)
class _Turn:
    waiting: Waiting | None  # None: for the base model
    comes: asyncio.Future[None]


class ResidencyRouter(RequestRouter):  # type: ignore[misc]
    def initialize_state(
        self,
        slack: int = DEFAULT_SLACK,
        memory_s: float = DEFAULT_MEMORY_S,
        max_wait_s: float = DEFAULT_MAX_WAIT_S,
    ) -> None:
        self._policy = ResidencyPolicy(Random(), slack=slack, memory_s=memory_s)
        self._table = self._policy.table
        self._hints, self._hint_calls = Hints(self._policy), HintCalls()
        self._stats_seen: dict[str, dict[str, Any]] = {}
        self._running_replicas: dict[str, RunningReplica] = {}
        self._max_wait_s = max_wait_s
        self._selected: Counter[str] = Counter()  # replica -> requests that Serve is about to send there
        self._num_waiting = 0
        self._busy_since = 0.0  # when somebody began to wait, and somebody did ever since
        self._num_ended = 0  # requests, since then
        self._num_broadcasts = 0  # calls of broadcasts that have not ended
        self._turns: Turns[_Turn] = Turns()
        self._look: asyncio.TimerHandle | None = None  # at who waits, once more
        self._entering: set[object] = set()  # let in since the last look, without a replica yet

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._running_replicas = {r.replica_id.unique_id: r for r in replicas}
        for replica_id in self._stats_seen.keys() - self._running_replicas.keys():
            self._forget(replica_id)
        for replica_id, replica in self._running_replicas.items():
            self._read_stats(replica_id, replica)
        super().update_replicas(replicas)
        self._let_in()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if replica_id.unique_id in self._table:
            # if that means that it rejected our request, this will end now and count as one less
            is_full = (
                num_ongoing_requests >= self._running_replicas[replica_id.unique_id].max_ongoing_requests
            )
            self._table.answered(replica_id.unique_id, num_ongoing_requests + is_full, time.monotonic())

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Broadcasts are sent without being routed."""
        super().on_send_request(replica_id)
        if self._selected[replica_id.unique_id]:
            self._selected[replica_id.unique_id] -= 1
        else:
            self._num_broadcasts += 1
            self._table.sent(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if self._num_broadcasts:  # which call it was is not told, and these are short
            self._num_broadcasts -= 1
        else:
            self._num_ended += 1
        self._table.sent(replica_id.unique_id, -1)
        if self._turns:  # this may be another thread
            self._event_loop.call_soon_threadsafe(self._let_in)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [list(candidate_replicas)]
        # without it the retry loop spins
        pending_request.routing_context.should_backoff = True
        now = time.monotonic()
        choice = self._policy.choose(read_request(pending_request), now)
        if not self._table[choice.order[0]].num_free:
            waiting = read_waiting(pending_request)
            self._send(self._hints.chosen(waiting, choice, now) if waiting else [])
        if "route" in pending_request.kwargs:
            pending_request.kwargs["route"] = choice.reason
        return [[self._running_replicas[replica_id]] for replica_id in choice.order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It may not be the first of the order."""
        adapter = read_adapter(pending_request)
        if adapter is not None and replica_id.unique_id in self._table:
            self._table.place(self._table[replica_id.unique_id], adapter, time.monotonic())

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Raises BackPressureError, or DeploymentUnavailableError, if it would wait too long, or did."""
        now = time.monotonic()
        max_wait_s = min(self._max_wait_s, read_timeout_s(pending_request))
        if self._would_wait_too_long(max_wait_s, now):
            raise self._refusal()
        if not is_retry:
            self._policy.arrived(read_adapter(pending_request), now)
        if not self._num_waiting:
            self._busy_since, self._num_ended = now, 0
        self._num_waiting += 1
        try:
            async with asyncio.timeout(max_wait_s):
                if is_retry:  # it had its turn
                    return await self._wait_for_choice(pending_request, is_retry=True)
                turn = await self._take_turn(pending_request)
                try:
                    return await self._wait_for_choice(pending_request, is_retry=False)
                finally:
                    self._leave(turn)
        except TimeoutError:
            raise self._refusal() from None
        finally:
            self._num_waiting -= 1
            take_time(pending_request, time.monotonic() - now)

    async def _wait_for_choice(self, pending_request: PendingRequest, *, is_retry: bool) -> RunningReplica:
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except asyncio.CancelledError:
            if not pending_request.future.cancelled():  # it was chosen a moment before
                self._take_back(pending_request.future.result())
            raise

    async def _take_turn(self, pending_request: PendingRequest) -> object:
        """Return when a place is free that nobody else is entering for. Serve's own queue is by arrival."""
        if not self._turns and len(self._entering) < self._table.num_free:
            place = object()
            self._entering.add(place)
            return place
        adapter = read_adapter(pending_request) or BASE_ID
        turn = _Turn(read_waiting(pending_request), self._event_loop.create_future())
        self._turns.add(adapter, turn)
        if self._turns.num_adapters <= self._hints.num_ahead:
            self._hint([turn])
        if self._look is None:
            self._look = self._event_loop.call_later(LOOK_AGAIN_S, self._look_again)
        try:
            await turn.comes
        except asyncio.CancelledError:
            self._turns.discard(adapter, turn)
            self._leave(turn)
            raise
        return turn

    def _leave(self, turn: object) -> None:
        self._entering.discard(turn)
        self._let_in()

    def _let_in(self) -> None:
        while self._turns and len(self._entering) < self._table.num_free:
            turn = self._turns.next()
            if not turn.comes.done():
                self._entering.add(turn)
                turn.comes.set_result(None)

    def _look_again(self) -> None:
        """Nobody tells what other routers' requests leave, if it is as it was in the last report.

        And who was let in may wait for one replica that is full, while others have places.
        """
        self._look = None
        if self._turns:
            self._entering.clear()
            self._table.settle(time.monotonic())
            self._let_in()
            self._hint(self._turns.ahead(self._hints.num_ahead))
            self._look = self._event_loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _hint(self, turns: Iterable[_Turn]) -> None:
        waiting = (turn.waiting for turn in turns if turn.waiting)
        self._send(self._hints.due(waiting, time.monotonic()))

    def _send(self, hints: list[Hint]) -> None:
        for hint in hints:
            self._hint_calls.send(self._running_replicas[hint.replica_id], hint.ref)

    async def _select_from_candidate_replicas(
        self, candidates: list[RunningReplica], backoff_index: int
    ) -> RunningReplica | None:
        """Serve would ask a replica for its queue length: when it was idle for 10 s, and when it is full."""
        (candidate,) = candidates
        replica_id = candidate.replica_id.unique_id
        if replica_id not in self._table:  # it died meanwhile
            return None
        replica = self._table[replica_id]
        if replica.load >= replica.capacity:
            return None
        # others choose before Serve sends it
        self._selected[replica_id] += 1
        self._table.sent(replica_id)
        return candidate

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: Any | None = None
    ) -> None:
        """Give the replica to the very request it was chosen for, and to no other.

        Serve matches by the internal id, which calls made inside one parent request share, and its mixins by
        model id, else they take the queue's head: somebody else's request, for another adapter.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return
        self._take_back(replica)  # it was cancelled meanwhile

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        """Nobody looks into Serve's indices here, and who is in the one by model id leaves as he is found."""

    def _take_back(self, replica: RunningReplica) -> None:
        """Serve will not send what it was selected for."""
        replica_id = replica.replica_id.unique_id
        if self._selected[replica_id]:  # else it is gone
            self._selected[replica_id] -= 1
        self._table.sent(replica_id, -1)

    def _would_wait_too_long(self, max_wait_s: float, now: float) -> bool:
        """By how fast requests of this router end while others wait. A burst is none the wiser at first.

        Nor are those who wait for the first replica of all: that nobody ends tells nothing of it.
        """
        busy_s = now - self._busy_since
        if self._table.num_free or not self._table.replicas or not self._num_waiting or busy_s < BURST_S:
            return False
        return self._num_waiting * busy_s > max_wait_s * (self._num_ended + 1)

    def _refusal(self) -> Exception:
        error: Exception = BackPressureError(self._num_waiting, self._num_waiting)
        if not self._table.replicas:  # none is there yet, or again
            error = DeploymentUnavailableError(self._deployment_id)
        return error

    def _forget(self, replica_id: str) -> None:
        self._selected.pop(replica_id, None)
        if self._stats_seen.pop(replica_id, None) is not None:
            self._table.remove(replica_id)

    def _read_stats(self, replica_id: str, replica: RunningReplica) -> None:
        stats = replica.routing_stats
        if replica_id not in self._stats_seen:
            metadata, limit = replica.replica_metadata, replica.max_ongoing_requests
            capacity = min(metadata.get("max_requests", limit), limit)
            self._table.add(replica_id, metadata.get("max_num_seqs", limit), capacity)
        elif self._stats_seen[replica_id] == stats:
            return
        self._stats_seen[replica_id] = stats
        self._table.tell(replica_id, read_report(stats, replica.replica_metadata), time.monotonic())
