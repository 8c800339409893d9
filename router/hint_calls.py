"""Hints on their way to replicas, over Ray Serve. Nobody waits for one, nor hears how it ends."""

from __future__ import annotations

import asyncio
import logging
import uuid

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from engine.prefetch import HINT_S

MAX_UNDER_WAY = 64  # a replica that hangs keeps its hints for HINT_S

logger = logging.getLogger(__name__)


class HintCalls:
    """For one event loop."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, replica: RunningReplica, ref: dict[str, str]) -> None:
        """`ref`: an adapter, for the replica's `prefetch`."""
        if len(self._under_way) < MAX_UNDER_WAY:
            call = asyncio.get_running_loop().create_task(_call(replica, ref))
            self._under_way.add(call)
            call.add_done_callback(self._under_way.discard)


async def _call(replica: RunningReplica, ref: dict[str, str]) -> None:
    unique = uuid.uuid4().hex
    metadata = RequestMetadata(request_id=unique, internal_request_id=unique, call_method="prefetch")
    call = PendingRequest(args=[ref], kwargs={}, metadata=metadata)
    try:
        async with asyncio.timeout(HINT_S):
            # not one of the requests that the router counts, and nothing that a full replica rejects
            await replica.try_send_request(call, with_rejection=False).get_async()
    except Exception as error:  # whatever it is: the request goes its way, and who is dead others find out
        # not its text: that may name where the adapter is, with credentials
        logger.debug("hint to %s: %s", replica.replica_id.unique_id, type(error).__name__)
