"""Ranks as Ray actors on two nodes: tokens of one process, replaced when one is lost; their GPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import LorafleetError
from engine.request import AdapterRef, GenerateRequest
from tests.cluster.conftest import SAFE, FakeCatalog
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.cluster

APP = "group"
PROMPT = (97, 98, 99)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
RECOVERY_S = 120.0


class Asker:
    def __init__(self, engine: Any, uri: str) -> None:
        from deployments.fleet_service import FleetService

        self._service = FleetService(engine, "base", 256, load_timeout_s=20.0)
        self._uri = uri

    async def ask(self, number: int, adapter: str | None, max_tokens: int) -> tuple[str, str | None]:
        """The text, and the class of an error."""
        # at the top Ray would be imported before the cluster's settings are made
        from ray.serve.exceptions import RayServeException

        ref = AdapterRef(adapter, self._uri) if adapter else None
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        text = ""
        try:
            async for deltas in self._service.generate(GenerateRequest(f"r{number}", PROMPT, params, ref)):
                text += "".join(delta.text for delta in deltas)
        except (LorafleetError, RayServeException) as error:
            return text, type(error).__name__
        return text, None


class Group:
    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._number = 0

    def start(self, adapter: str | None, max_tokens: int = 8) -> Any:
        self._number += 1
        return self._handle.ask.remote(self._number, adapter, max_tokens)

    def texts(self) -> list[str]:
        """Of the base and of the adapter, as soon as both are answered."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            answers = [self.start(adapter).result(timeout_s=60) for adapter in (None, "a")]
            if all(error is None for _, error in answers):
                return [text for text, _ in answers]
            assert time.monotonic() < deadline, answers
            time.sleep(0.5)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("group")
    base = make_llama(path / "base")
    return base, make_adapter(base, path / "a", rank=4, targets=ALL_LINEAR, seed=0)


@pytest.fixture
def nodes(ray_cluster: Any) -> list[Any]:
    """Beside the first one; a test may take one away, and adds another."""
    return [ray_cluster.add_node(**NODE)]


@pytest.fixture
def group(ray_cluster: Any, nodes: list[Any], paths: tuple[Path, Path]) -> Iterator[Group]:
    from ray import serve

    from deployments.app import engine_application
    from deployments.config import AppArgs
    from deployments.engine_replica import ENGINE_CLIENT

    args = AppArgs(
        model=str(paths[0]),
        tensor_parallel_size=2,
        rank_placement="STRICT_SPREAD",
        engine={"num_pages": 100, "num_threads": 1},
        graceful_shutdown_timeout_s=0.2,
    )
    catalog = serve.deployment(FakeCatalog).options(name="catalog", **SAFE).bind([])
    asker = serve.deployment(Asker).options(name="asker", max_ongoing_requests=10, **SAFE)
    engines = engine_application(args, catalog, ENGINE_CLIENT)
    yield Group(serve.run(asker.bind(engines, str(paths[1])), name=APP, route_prefix=None))
    serve.delete(APP)
    for node in nodes:
        ray_cluster.remove_node(node)


def rank_pids() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"ray::RankActor" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def test_ranks_on_two_nodes_give_the_tokens_of_one_process_and_are_replaced(
    ray_cluster: Any, nodes: list[Any], group: Group, paths: tuple[Path, Path]
) -> None:
    alone = Engine(EngineConfig(model=str(paths[0]), num_pages=100, num_threads=1))
    alone.load_adapter("a", str(paths[1]))
    expected = [output.text for output in alone.generate([PROMPT] * 2, PARAMS, [None, "a"])]
    alone.close()
    assert group.texts() == expected

    (rank,) = rank_pids()
    running = group.start(None, max_tokens=240)
    time.sleep(0.3)
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    assert running.result(timeout_s=10)[1] is not None
    assert time.monotonic() - killed < 10
    assert group.texts() == expected
    assert rank not in rank_pids()

    running = group.start(None, max_tokens=240)
    time.sleep(0.3)
    ray_cluster.remove_node(nodes.pop(), allow_graceful=False)
    assert running.result(timeout_s=10)[1] is not None
    nodes.append(ray_cluster.add_node(**NODE))
    assert group.texts() == expected


class RankWithoutEngine:
    def run(self, address: str, token: str, rank: int) -> tuple[str, str]:
        return visible_gpus()


class Replica:
    """Starts ranks as an engine's replica does, and asks what they see."""

    def start(self, engine: EngineConfig) -> list[tuple[str, str]]:
        import ray

        from deployments import rank_actors

        rank_actors.RankActor = RankWithoutEngine  # type: ignore[assignment, misc]
        _, ranks = rank_actors.start_ranks(engine)
        return [visible_gpus(), *ray.get([rank.run.remote("", "", 0) for rank in ranks.actors])]


def visible_gpus() -> tuple[str, str]:
    """The node, and which of its GPUs this process may use."""
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_rank_on_gpus_sees_one_of_its_own(ray_cluster: Any) -> None:
    """Ray hands out as many as a node says it has: two here and one there, though there is none."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from deployments.app import engine_application
    from deployments.config import AppArgs
    from deployments.engine_replica import ENGINE_CLIENT

    args = AppArgs(model="x", device="cuda", tensor_parallel_size=3, rank_placement="PACK")
    deployment = engine_application(args, None, ENGINE_CLIENT)._bound_deployment
    asked = deployment._replica_config
    nodes = [ray_cluster.add_node(**NODE | {"num_cpus": gpus, "num_gpus": gpus}) for gpus in (2, 1)]
    group = placement_group(asked.placement_group_bundles, asked.placement_group_strategy)
    first = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    replica = ray.remote(Replica).options(**deployment.ray_actor_options, scheduling_strategy=first).remote()
    seen = ray.get(replica.start.remote(args.engine_config()), timeout=60)
    assert len(set(seen)) == 3
    assert sorted(gpus for _, gpus in seen) == ["0", "0", "1"]
    remove_placement_group(group)
    for node in nodes:
        ray_cluster.remove_node(node)
