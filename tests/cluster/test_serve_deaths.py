"""Ray Serve's own processes die: its controller, and the proxy through which all requests come.

Same fleet and same rule for texts as in `test_deaths.py`. Seconds are printed: `pytest -s`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase
from urllib.error import URLError

import pytest

from tests.cluster.serve_process import ENGINE, ServeProcess, serving
from tests.cluster.test_deaths import EXPECTED, LONG, RECOVERY_S, Fleet, eventually
from tests.tiny import make_adapter, make_parrot

pytestmark = pytest.mark.cluster

CONTROLLER = "ray::ServeController"
PYTHON_PROXY = "ray::ProxyActor"
HAPROXY = "haproxy\0-db"  # arguments as /proc has them
MODELS = ("base", "named", "loaded")


@contextmanager
def fleet_behind(proxy: str, root: Path) -> Iterator[Fleet]:
    """With one adapter that was loaded at run time."""
    base = make_parrot(root / "base", ascii_lowercase.encode(), max_position_embeddings=2 * LONG)
    for seed, name in enumerate(("named", "loaded")):
        make_adapter(base, root / name, rank=4, targets=["q_proj"], seed=seed)
    flags = [
        "--model", str(base), "--lora-modules", f"named={root / 'named'}", "--num-replicas", "2",
        "--pool-bytes", "32000000", "--allow-runtime-lora-updating", "--allowed-lora-prefixes", str(root),
        "--proxy", proxy,
    ]  # fmt: skip
    with serving(flags) as server:
        load = {"lora_name": "loaded", "lora_path": str(root / "loaded")}
        assert server.call("/v1/load_lora_adapter", load).status == 200
        yield Fleet(server, str(root))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_behind("python", tmp_path_factory.mktemp("python")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def can_answer(server: ServeProcess) -> bool:
    try:
        return server.complete("base", max_tokens=1).status == 200
    except (URLError, ConnectionError):  # nobody listens, or it dies before it answers
        return False


def test_a_controller_that_dies_is_missed_by_nobody(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    """FR-59: streams and new requests go on without it; the new one knows the fleet and mends it."""
    server = fleet.server
    streams = fleet.start_streams(threads)
    (controller,) = server.pids(CONTROLLER)
    os.kill(controller, signal.SIGKILL)
    assert fleet.statuses(threads, MODELS) == {200}
    results = [stream.result() for stream in streams]
    assert [(s.text == EXPECTED, s.is_done, s.error, s.broken) for s in results] == [
        (True, True, None, None)
    ] * len(results)
    eventually(lambda: server.pids(CONTROLLER) not in ([], [controller]), RECOVERY_S)
    engine = server.pids(ENGINE)[0]
    os.kill(engine, signal.SIGKILL)
    fleet.wait_for_engines(gone=engine)
    assert fleet.statuses(threads, MODELS, 12) == {200}


def lose_the_proxy(fleet: Fleet, threads: ThreadPoolExecutor, command: str) -> float:
    """Seconds until a request is answered again."""
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
    eventually(lambda: can_answer(fleet.server), RECOVERY_S)
    took_s = time.monotonic() - killed
    assert not set(old) & set(fleet.server.pids(command))
    assert fleet.statuses(threads, MODELS, 12) == {200}
    assert fleet.models() == sorted(MODELS)
    return took_s


def test_a_proxy_that_dies_breaks_its_streams_and_is_replaced(
    fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    """FR-59, FR-65: never a silent end; engines, and what was loaded at run time, stay."""
    engines = fleet.server.pids(ENGINE)
    took_s = lose_the_proxy(fleet, threads, PYTHON_PROXY)
    print(f"answers again {took_s:.1f} s after the proxy died")  # noqa: T201
    assert fleet.server.pids(ENGINE) == engines


@pytest.mark.slow
def test_an_haproxy_that_dies_breaks_its_streams_and_is_replaced(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """The same where the server is open to the network."""
    with fleet_behind("haproxy", tmp_path) as fleet:
        engines = fleet.server.pids(ENGINE)
        took_s = lose_the_proxy(fleet, threads, HAPROXY)
        print(f"answers again {took_s:.1f} s after HAProxy died")  # noqa: T201
        assert fleet.server.pids(ENGINE) == engines
