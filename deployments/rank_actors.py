"""The other ranks of a replica's group as Ray actors, one in each further bundle of its placement group.

Rank 0 is the replica's own engine process, to which they connect (`engine.tensor_parallel.seats`). On GPUs
each has one, the only one that Ray lets it see. All ranks number theirs alike then, which PyTorch, by its
source, takes for one GPU and shares no memory, so that sums go through NCCL even on one host (not run). What
ends the replica ends its placement group, and so the ranks; what ends a rank ends the engine, and so the
replica.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineConfig
from engine.tensor_parallel.seats import TOKEN_ENV, reserve_address


class RankActor:
    def run(self, address: str, token: str, rank: int) -> None:
        """Until the group ends, and this process with it."""
        # torch takes seconds to import: the replica that only starts this needs it not
        from engine.tensor_parallel.seats import connect
        from engine.tensor_parallel.worker import serve

        os.environ[TOKEN_ENV] = token
        serve(connect(address, rank))


@dataclass(frozen=True, slots=True)
class Ranks:
    """They live as this does."""

    actors: list[Any]
    place: socket.socket  # keeps the address for the engine process, which listens there later


def start_ranks(engine: EngineConfig) -> tuple[EngineConfig, Ranks]:
    """Called in the replica: its engine's configuration, and the other ranks."""
    placement_group = ray.util.get_current_placement_group()
    place, address = reserve_address(ray.util.get_node_ip_address())
    token = os.environ[TOKEN_ENV] = secrets.token_hex(32)  # the engine process inherits it
    gpus = 1 if engine.device == "cuda" else 0
    actors = []
    for rank in range(1, engine.tensor_parallel_size):
        bundle = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": bundle}
        actor = ray.remote(RankActor).options(**options).remote()
        actor.run.remote(address, token, rank)
        actors.append(actor)
    return replace(engine, rank_address=address), Ranks(actors, place)
