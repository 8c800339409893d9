"""Every query of a panel and recorded rule, on a real Prometheus that scrapes a replica and an ingress."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
import yaml

from deployments.config import AppArgs
from deployments.engine_replica import EngineReplica, ReplicaSettings
from deployments.wire import decode_chunk
from engine.errors import LorafleetError
from engine.request import AdapterRef, GenerateRequest
from engine.sampling_params import SamplingParams
from engine.wire import encode_request
from tests.deployments.api.fake_fleet import BASE, FakeFleet
from tests.k8s.manifests import of_kind
from tests.k8s.test_monitoring import SCENARIO, groups, panel_expressions, rules, substituted
from tests.tiny import make_adapter, make_llama

pytestmark = pytest.mark.cluster

AT_WORK_S = 14.0
ONE_ADAPTER_BYTES = 12_000  # and not two of them
WINDOW = "10s"  # of rates; Prometheus scrapes every second


@contextmanager
def prometheus(folder: Path, **ports: int) -> Iterator[int]:
    """`ports`: by name of the monitor that tells the path there. Yields its own."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus: install the package prometheus")
    quick = [{**group, "interval": "1s"} for group in groups()]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": quick}).replace("[5m]", f"[{WINDOW}]"))
    paths = {
        monitor["metadata"]["name"]: monitor["spec"]["podMetricsEndpoints"][0].get("path")
        for monitor in of_kind(SCENARIO, "PodMonitor")
    }
    scrapes = [
        {
            "job_name": name,
            "metrics_path": paths[f"lorafleet-{name}"],
            "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
        }
        for name, port in ports.items()
    ]
    config = {
        "global": {"scrape_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": scrapes,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        cwd=folder,
    )  # fmt: skip
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


async def run(replica: EngineReplica, ref: AdapterRef | None, max_tokens: int, route: str) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = encode_request(GenerateRequest(f"r-{time.monotonic_ns()}", (1, 2, 3), params, ref))
    async for chunk in replica.generate(request, route=route):
        try:
            decode_chunk(chunk)
        except LorafleetError:
            return


async def leave_early(replica: EngineReplica) -> None:
    request = GenerateRequest(
        f"l-{time.monotonic_ns()}", (1, 2, 3), SamplingParams(max_tokens=64, ignore_eos=True)
    )
    async with aclosing(replica.generate(encode_request(request), route="balance")) as stream:
        await anext(stream)


@asynccontextmanager
async def ingress() -> AsyncIterator[int]:
    """Over a scripted fleet. Yields its port."""
    fleet = FakeFleet()
    fleet.catalog.add("sql")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()  # who comes before the server waits
        server = uvicorn.Server(uvicorn.Config(fleet.app(), log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        yield sock.getsockname()[1]
        server.should_exit = True
        await serving


async def ask_ingress(port: int, enough: asyncio.Event) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while not enough.is_set():
            answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "hi"})
            assert answer.status_code == 200
            await asyncio.sleep(0.2)


async def stay_busy(replica: EngineReplica, enough: asyncio.Event) -> None:
    """So that each scrape finds somebody running."""
    while not enough.is_set():
        await run(replica, None, 60, "balance")


async def work(replica: EngineReplica, adapters: list[AdapterRef], enough: asyncio.Event) -> None:
    """More adapters than slots and host memory, and what goes wrong at times."""
    for turn, ref in enumerate(itertools.cycle(adapters)):
        if enough.is_set():
            return
        await asyncio.gather(
            run(replica, ref, 6, "resident"), run(replica, None, 4, "balance"), leave_early(replica)
        )
        broken = AdapterRef(ref.name, f"{ref.uri}-gone", f"version-{turn}")
        await run(replica, broken, 4, "home")


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By where the expression stands."""
    base = make_llama(folder / "base")
    refs = [
        AdapterRef(name, str(make_adapter(base, folder / name, rank=8, targets=["q_proj"], seed=i)), "1")
        for i, name in enumerate(("sql", "pirate"))
    ]
    engine = {"num_pages": 60, "num_threads": 1, "max_adapters": 1, "host_cache_bytes": ONE_ADAPTER_BYTES}
    args = AppArgs(model=str(base), engine=engine)
    asked = [
        (where, substituted(expression).replace("[1m]", f"[{WINDOW}]"))
        for where, expression in panel_expressions()
    ]
    asked += [(rule["record"], rule["record"]) for rule in rules("record")]

    async def main() -> dict[str, list[dict[str, Any]]]:
        replica = EngineReplica(args.engine_config(), ReplicaSettings(metrics_port=0), "r1")
        await replica.start()
        assert replica.metrics_port is not None
        async with ingress() as api:
            with prometheus(folder, replicas=replica.metrics_port, ingress=api) as port:
                enough = asyncio.Event()
                working = asyncio.gather(
                    work(replica, refs, enough), stay_busy(replica, enough), ask_ingress(api, enough)
                )
                await asyncio.sleep(AT_WORK_S)
                found = await asyncio.to_thread(lambda: {f"{where}: {e}": ask(port, e) for where, e in asked})
                enough.set()
                await working
        await replica.stop()
        return found

    return asyncio.run(main())


def test_every_query_has_an_answer(tmp_path: Path) -> None:
    found = results(tmp_path)
    assert len(found) > 60
    empty = [where for where, answer in found.items() if not answer]
    assert empty == []
    for where, answer in found.items():
        values = [float(series["value"][1]) for series in answer]
        assert any(math.isfinite(value) for value in values), where
