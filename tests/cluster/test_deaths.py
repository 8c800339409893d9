"""Processes of a running server die or hang, Ray Serve's own too: what clients see, and what is there then.

The base model repeats "abc...", whatever adapter is on it, so any text that a stream shows must be the start
of that: a token that is lost or comes twice would show. Adapters come from S3; no flag tells where to keep
anything.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from string import ascii_lowercase
from urllib.error import URLError

import pytest
import yaml

from deployments.demo.s3 import EmbeddedS3
from tests.cluster.serve_process import (
    CATALOG,
    ENGINE,
    INGRESS,
    REPLICA,
    STOP_TIMEOUT_S,
    Answer,
    ServeProcess,
    Stream,
    serving,
)
from tests.tiny import make_adapter, make_parrot

pytestmark = pytest.mark.cluster

HEARTBEAT_S = 3.0
RECOVERY_S = 60.0  # seconds on an idle machine
CONTROLLER = "ray::ServeController"
PYTHON_PROXY = "ray::ProxyActor"
LONG, SHORT = 1200, 4  # tokens
EXPECTED = (ascii_lowercase * (LONG // len(ascii_lowercase) + 2))[1 : LONG + 1]  # after the prompt "a"
ADAPTERS = ("pinned", "found", "named", "later")


@dataclass(frozen=True, slots=True)
class Fleet:
    server: ServeProcess
    uri: str

    def start_streams(self, threads: ThreadPoolExecutor, count: int = 6) -> list[Future[Stream]]:
        """Returns when all of them have shown some text."""
        started = threading.Barrier(count + 1, timeout=30)

        def run(number: int) -> Stream:
            has_started = False

            def on_text(text: str) -> None:
                nonlocal has_started
                if text and not has_started:
                    has_started = True
                    started.wait()

            return self.server.stream(("base", "named")[number % 2], LONG, on_text)

        streams = [threads.submit(run, number) for number in range(count)]
        started.wait()
        return streams

    def start_whole_answers(self, threads: ThreadPoolExecutor, count: int = 6) -> list[Future[Answer]]:
        """Of the text that streams give, as long as theirs."""

        def run(number: int) -> Answer:
            return self.server.complete(("base", "named")[number % 2], prompt="a", max_tokens=LONG)

        return [threads.submit(run, number) for number in range(count)]

    def statuses(self, threads: ThreadPoolExecutor, models: tuple[str, ...], count: int = 8) -> set[int]:
        names = [models[i % len(models)] for i in range(count)]
        return {
            a.status for a in threads.map(lambda name: self.server.complete(name, max_tokens=SHORT), names)
        }

    def load(self, name: str) -> int:
        """The status of a load at run time."""
        body = {"lora_name": name, "lora_path": f"{self.uri}/later"}
        return self.server.call("/v1/load_lora_adapter", body).status

    def can_answer(self) -> bool:
        try:
            return self.server.complete("base", max_tokens=1).status == 200
        except (URLError, ConnectionError):  # nobody listens, or it dies before it answers
            return False

    def models(self) -> list[str]:
        return [model["id"] for model in self.server.call("/v1/models").body["data"]]

    def wait_for_engines(self, gone: int) -> None:
        """Until two serve again, none of which is that one."""

        def is_whole() -> bool:
            pids = self.server.pids(ENGINE)
            pages = self.server.call("/metrics")
            loaded = str(pages.body).count('lorafleet_adapter_loaded{adapter="named"')
            return gone not in pids and len(pids) == 2 and loaded == 2

        eventually(is_whole, RECOVERY_S)


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("deaths")
    base = make_parrot(root / "base", ascii_lowercase.encode(), max_position_embeddings=2 * LONG)
    for seed, name in enumerate(ADAPTERS):
        make_adapter(base, root / "adapters" / name, rank=4, targets=["q_proj"], seed=seed)
    engine = {"pinned_adapters": ["pinned"], "heartbeat_timeout_s": HEARTBEAT_S, "pool_bytes": 32_000_000}
    with EmbeddedS3() as s3:
        for name in ADAPTERS:
            source = "source" if name in ("pinned", "found") else "elsewhere"
            s3.upload(root / "adapters" / name, "bucket", f"{source}/{name}")
        config = {
            "model": str(base),
            "adapter_source": "s3://bucket/source",
            "lora_modules": {"named": "s3://bucket/elsewhere/named"},
            "allowed_lora_prefixes": ["s3://bucket/elsewhere"],
            "allow_runtime_lora_updating": True,
            "num_replicas": 2,
            "num_ingress_replicas": 2,
            "engine": engine,
        }
        (root / "config.yaml").write_text(yaml.safe_dump(config))
        with serving(["--config", str(root / "config.yaml"), "--proxy", "python"], s3.env) as server:
            yield Fleet(server, "s3://bucket/elsewhere")


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_pinned_and_named_adapters_are_there_before_the_first_request(fleet: Fleet) -> None:
    """FR-66."""
    page = fleet.server.call("/metrics").body
    for name in ("pinned", "named"):
        assert page.count(f'lorafleet_adapter_loaded{{adapter="{name}"') == 2
    assert fleet.models() == ["base", "found", "named", "pinned"]


@pytest.mark.parametrize("victim", [ENGINE, REPLICA])
def test_a_replica_that_dies_cuts_its_own_streams_with_an_error(
    fleet: Fleet, threads: ThreadPoolExecutor, victim: str
) -> None:
    """FR-65: never a silent end, no token twice; the other replica's streams and new requests go on.

    So do answers that are not streamed, whoever had begun them.
    """
    answers = fleet.start_whole_answers(threads)
    streams = fleet.start_streams(threads)
    engines = fleet.server.pids(ENGINE)
    os.kill(fleet.server.pids(victim)[0], signal.SIGKILL)
    # nobody has seen a part of them: those that were with the dead one are asked for elsewhere
    assert fleet.statuses(threads, ("base", "named", "found")) == {200}
    for answer in (answer.result() for answer in answers):
        assert answer.status == 200, answer.body
        assert answer.body["choices"][0]["text"] == EXPECTED
        assert answer.body["usage"]["completion_tokens"] == LONG
    results = [stream.result() for stream in streams]
    cut = [stream for stream in results if not stream.is_done]
    assert 0 < len(cut) < len(results)
    for stream in results:
        assert EXPECTED.startswith(stream.text)
        assert stream.broken is None
        if stream.is_done:
            assert (stream.text, stream.error) == (EXPECTED, None)
        else:
            assert stream.error is not None
            assert stream.error["code"] == "engine_dead"
    eventually(lambda: len(set(engines) & set(fleet.server.pids(ENGINE))) == 1, 5)
    (survivor,) = set(engines) & set(fleet.server.pids(ENGINE))
    fleet.wait_for_engines(gone=next(pid for pid in engines if pid != survivor))


def test_an_engine_that_hangs_is_replaced_and_costs_no_waiting_request(
    fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    """FR-65: nothing has died, so only the missing signs of life tell."""
    hung = fleet.server.pids(ENGINE)[0]
    os.kill(hung, signal.SIGSTOP)
    started = time.monotonic()
    assert fleet.statuses(threads, ("base", "named", "found", "pinned"), 12) == {200}
    eventually(lambda: hung not in fleet.server.pids(ENGINE), 3 * HEARTBEAT_S)
    assert time.monotonic() - started < 5 * HEARTBEAT_S
    fleet.wait_for_engines(gone=hung)


def test_a_catalog_that_dies_forgets_nothing_and_stops_nobody(
    fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    """FR-58, FR-59: what was loaded and unloaded at run time is in the bucket."""
    assert fleet.load("later") == 200
    assert fleet.server.call("/v1/unload_lora_adapter", {"lora_name": "found"}).status == 200
    (catalog,) = fleet.server.pids(CATALOG)
    os.kill(catalog, signal.SIGKILL)
    assert fleet.statuses(threads, ("base", "named", "later")) == {200}
    eventually(lambda: fleet.server.pids(CATALOG) not in ([], [catalog]), RECOVERY_S)
    # answered by the new one: 503 until it can tell
    eventually(lambda: fleet.server.complete("never-heard-of").status == 404, RECOVERY_S)
    assert fleet.statuses(threads, ("later", "named", "pinned")) == {200}
    assert fleet.statuses(threads, ("found",), 4) == {404}
    assert fleet.load("later") == 409
    lists = list(threads.map(lambda _: fleet.models(), range(8)))
    assert lists == [["base", "later", "named", "pinned"]] * 8


def test_an_ingress_that_dies_is_replaced_and_knows_all(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    """FR-58, FR-59: what ran through it breaks off without an end; what comes after is answered."""
    assert fleet.load("loaded") == 200
    ingresses = fleet.server.pids(INGRESS)
    streams = fleet.start_streams(threads)
    os.kill(ingresses[0], signal.SIGKILL)
    for stream in (stream.result() for stream in streams):
        assert EXPECTED.startswith(stream.text)
        assert stream.is_done == (stream.text == EXPECTED)
        assert stream.is_done or stream.broken or stream.error
    assert fleet.statuses(threads, ("base", "named", "loaded")) == {200}
    eventually(lambda: len(set(fleet.server.pids(INGRESS)) - {ingresses[0]}) == 2, RECOVERY_S)
    assert fleet.statuses(threads, ("loaded", "pinned"), 16) == {200}


def test_a_controller_that_dies_is_missed_by_nobody(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    """FR-59: streams and new requests go on without it; the new one knows the fleet and mends it."""
    assert fleet.load("kept") == 200
    models = ("base", "named", "kept")
    streams = fleet.start_streams(threads)
    (controller,) = fleet.server.pids(CONTROLLER)
    os.kill(controller, signal.SIGKILL)
    assert fleet.statuses(threads, models) == {200}
    results = [stream.result() for stream in streams]
    assert [(s.text == EXPECTED, s.is_done, s.error, s.broken) for s in results] == [
        (True, True, None, None)
    ] * len(results)
    eventually(lambda: fleet.server.pids(CONTROLLER) not in ([], [controller]), RECOVERY_S)
    engine = fleet.server.pids(ENGINE)[0]
    os.kill(engine, signal.SIGKILL)
    fleet.wait_for_engines(gone=engine)
    assert fleet.statuses(threads, models, 12) == {200}


def test_a_proxy_that_dies_breaks_its_streams_and_is_replaced(
    fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    took_s = lose_the_proxy(fleet, threads, PYTHON_PROXY)
    print(f"answers again {took_s:.1f} s after the proxy died")  # noqa: T201


def lose_the_proxy(fleet: Fleet, threads: ThreadPoolExecutor, command: str) -> float:
    """FR-59, FR-65: never a silent end; engines, and what was loaded at run time, stay.

    Returns the seconds until a request is answered again.
    """
    assert fleet.load("stays") == 200
    engines, models = fleet.server.pids(ENGINE), fleet.models()
    streams = fleet.start_streams(threads)
    old = fleet.server.pids(command)
    assert old
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    for stream in (stream.result() for stream in streams):
        assert EXPECTED.startswith(stream.text)
        assert stream.is_done == (stream.text == EXPECTED)
        assert stream.is_done or stream.broken
    eventually(fleet.can_answer, RECOVERY_S)
    took_s = time.monotonic() - killed
    assert not set(old) & set(fleet.server.pids(command))
    assert fleet.statuses(threads, ("base", "named", "stays"), 12) == {200}
    assert fleet.models() == models
    assert fleet.server.pids(ENGINE) == engines
    return took_s


def test_a_stop_lets_streams_finish(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    """FR-66. The last test: it stops the server."""
    streams = fleet.start_streams(threads)
    fleet.server.process.send_signal(signal.SIGTERM)
    results = [stream.result() for stream in streams]
    assert [(stream.text == EXPECTED, stream.is_done, stream.error) for stream in results] == [
        (True, True, None)
    ] * len(results)
    assert fleet.server.process.wait(STOP_TIMEOUT_S) == 0
