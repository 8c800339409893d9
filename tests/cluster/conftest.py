"""One small Ray cluster for all tests here, and a caller inside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.errors import LorafleetError
from engine.request import AdapterRef, GenerateRequest
from engine.sampling_params import SamplingParams
from tests.cluster.serve_process import free_port

NODE = {"num_cpus": 16, "object_store_memory": 80_000_000}
HEAD = "head"  # a resource of the first node: what must not die with another one asks for a bit of it
SAFE = {
    "ray_actor_options": {"num_cpus": 0.1, "resources": {HEAD: 0.01}},
    "graceful_shutdown_wait_loop_s": 0.1,  # each delete of an application waits for it
}
FAKE_ENGINE = "tests.cluster.fake_engine:FakeEngineClient"
Spec = dict[str, Any]  # adapter, prompt, max_tokens, close_after, whole


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Who runs the tests in a shell's background has it ignored, and the servers would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray's `Cluster`: one node, to which a test may add others."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_LOG_TO_STDERR="0")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(**NODE, resources={HEAD: 1}, include_dashboard=False, dashboard_port=free_port())
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


class Caller:
    """Makes engine calls as an ingress does: several of them inside one parent request."""

    def __init__(self, engine: Any) -> None:
        from deployments.fleet_service import FleetService

        self._service = FleetService(engine, "base", 256, load_timeout_s=10.0)

    async def generate(self, specs: list[Spec]) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self._one(spec) for spec in specs))

    async def service(self, method: str, *args: Any) -> Any:
        return await getattr(self._service, method)(*args)

    async def _one(self, spec: Spec) -> dict[str, Any]:
        """{"pid": of the engine, "tokens": how many came, "error": class name or None}"""
        adapter = spec.get("adapter")
        request = GenerateRequest(
            request_id=spec.get("id", "id"),
            prompt_token_ids=tuple(spec.get("prompt", (1,))),
            params=SamplingParams(max_tokens=spec.get("max_tokens", 3)),
            adapter=AdapterRef(adapter, spec.get("uri", "x")) if adapter else None,
        )
        texts: list[str] = []
        source = self._service.whole if spec.get("whole") else self._service
        stream = source.generate(request)
        try:
            async for deltas in stream:
                texts.extend(delta.text for delta in deltas)
                if len(texts) >= spec.get("close_after", 1 << 30):
                    await stream.aclose()
                    break
        except LorafleetError as error:
            return {"pid": texts[0] if texts else None, "tokens": len(texts), "error": type(error).__name__}
        return {"pid": texts[0], "tokens": len(texts), "error": None}


class FakeCatalog:
    def __init__(self, preloaded: list[dict[str, str]]) -> None:
        self._preloaded = preloaded

    async def preloaded(self, pinned: tuple[str, ...]) -> dict[str, Any]:
        return {"result": self._preloaded}


class App:
    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def generate(self, *specs: Spec) -> list[dict[str, Any]]:
        """All at once, inside one parent request."""
        results: list[dict[str, Any]] = self.start(*specs).result(timeout_s=30)
        return results

    def start(self, *specs: Spec) -> Any:
        return self._handle.generate.remote(list(specs))

    def service(self, method: str, *args: Any) -> Any:
        return self._handle.service.remote(method, *args).result(timeout_s=30)

    def stats(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = self.service("stats")["replicas"]
        return replicas


StartApp = Callable[..., App]


@pytest.fixture
def start_app(ray_cluster: Any, request: pytest.FixtureRequest) -> Iterator[StartApp]:
    with starting_apps(request.node.name.replace("[", "-").replace("]", "")) as start:
        yield start


@pytest.fixture(scope="module")
def shared_app(ray_cluster: Any) -> Iterator[App]:
    """For tests that leave it as it was: to start one takes as long as most of them."""
    with starting_apps("shared") as start:
        yield start({"token_s": 0.02})


@contextmanager
def starting_apps(title: str) -> Iterator[StartApp]:
    """Two engine replicas with fake engines behind the real router, replica and service.

    `of`: an application that gets these settings instead of its own.
    """
    from ray import serve

    from deployments.app import engine_application
    from deployments.config import AppArgs

    names: list[str] = []

    def start(
        delays: dict[str, float],
        preloaded: tuple[AdapterRef, ...] = (),
        of: App | None = None,
        grace_s: float = 0.2,
        **engine: Any,
    ) -> App:
        args = AppArgs(
            model=json.dumps(delays),
            num_replicas=2,
            engine={"max_num_seqs": 4, "max_adapters": 4, **engine},
            stream_interval_s=0.0,
            graceful_shutdown_timeout_s=grace_s,
        )
        refs = [{"name": ref.name, "uri": ref.uri, "version": ref.version} for ref in preloaded]
        catalog = serve.deployment(FakeCatalog).options(name="catalog", **SAFE).bind(refs)
        engines = engine_application(args, catalog, engine_client=FAKE_ENGINE)
        caller = (
            serve.deployment(Caller).options(name="caller", max_ongoing_requests=100, **SAFE).bind(engines)
        )
        name = of.name if of else f"app{len(names)}-{title}"
        handle = serve.run(caller, name=name, route_prefix=None)
        if of is None:
            names.append(name)
        return App(name, handle)

    yield start
    for name in names:
        serve.delete(name)
