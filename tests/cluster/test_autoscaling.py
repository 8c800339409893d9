"""A fleet that sizes itself, as a user runs it: a burst, a trickle, nobody, and somebody again.

Takes two minutes: `pytest -m slow -s tests/cluster/test_autoscaling.py` prints how long each change took.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster.serve_process import ENGINE, ServeProcess, serving
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MOST, SEATS, NUM_USERS = 3, 4, 8  # two replicas' seats, so that three are right for them
NAMES = [f"a{i}" for i in range(8)]
UP_S, DOWN_S = 2.0, 8.0
WITHIN_S = 90.0  # an engine takes seconds to start, more on a busy machine


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    base = make_llama(tmp_path / "base")
    for seed, name in enumerate(NAMES):
        make_adapter(base, tmp_path / "source" / name, rank=8, targets=ALL_LINEAR, seed=seed)
    config = {
        "model": str(base),
        "adapter_source": str(tmp_path / "source"),
        "allow_runtime_lora_updating": True,
        "autoscaling": {
            "min_replicas": 0, "max_replicas": MOST, "upscale_delay_s": UP_S, "downscale_delay_s": DOWN_S,
        },
        "router": {"max_wait_s": WITHIN_S},  # for a replica that starts, too
        "engine": {"max_num_seqs": SEATS, "max_adapters": len(NAMES), "pool_bytes": 8_000_000},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with serving(["--config", str(tmp_path / "config.yaml"), "--proxy", "python"]) as server:
        yield server


@contextmanager
def users(server: ServeProcess, count: int, pause_s: float, statuses: Counter[int]) -> Iterator[None]:
    """Each asks one adapter after the other."""
    is_over = threading.Event()

    def ask(number: int) -> Counter[int]:
        seen: Counter[int] = Counter()
        for i in range(number, 10**6):
            if is_over.is_set():
                break
            answer = server.complete(NAMES[i % len(NAMES)], max_tokens=64, ignore_eos=True)
            seen[answer.status] += 1
            time.sleep(pause_s)
        return seen

    with ThreadPoolExecutor(count) as threads:
        asking = [threads.submit(ask, number) for number in range(count)]
        try:
            yield
        finally:
            is_over.set()
        for one in asking:
            statuses.update(one.result())


def until(condition: Callable[[], bool]) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < WITHIN_S, "it did not happen in time"
        time.sleep(0.2)
    return time.monotonic() - started


def cold_lookups(server: ServeProcess) -> dict[str, float]:
    """Requests that found their adapter at its source only, by replica."""
    found: Counter[str] = Counter()
    for line in str(server.call("/metrics").body).splitlines():
        if line.startswith("lorafleet_adapter_lookups_total{") and 'tier="source"' in line:
            found[line.partition('replica="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return dict(found)


def test_a_fleet_grows_shrinks_and_wakes_without_a_lost_request(server: ServeProcess, tmp_path: Path) -> None:
    statuses: Counter[int] = Counter()

    def serves(count: int) -> bool:
        return len(server.pids(ENGINE)) == count == len(cold_lookups(server))

    with users(server, NUM_USERS, 0.0, statuses):
        grown = until(lambda: serves(MOST))
    assert statuses.keys() == {200}
    before = cold_lookups(server)
    with users(server, 1, 0.2, statuses):
        shrunk = until(lambda: len(server.pids(ENGINE)) == 1)
        time.sleep(0.5 * len(NAMES))  # every adapter is asked for again
        (last,) = server.pids(ENGINE)
        cold = cold_lookups(server)
    assert statuses.keys() == {200}
    # whatever the others held was there before they went
    assert len(cold) == 1
    assert all(count == before[replica] for replica, count in cold.items())
    gone = until(lambda: server.pids(ENGINE) == [])
    until(lambda: cold_lookups(server) == {})
    page = server.call("/metrics")
    assert page.status == 200
    assert 'lorafleet_replicas{state="answers"} 0.0\n' in page.body
    assert "replica=" not in page.body, "the last one's series went with it"
    (answered,) = re.findall(r'_ingress_requests_total{.*outcome="answered"} (.+)', page.body)
    assert float(answered) == statuses[200]
    assert "lorafleet_catalog_adapters{" in page.body
    assert server.call("/health").status == 503
    load = {"lora_name": "late", "lora_path": str(tmp_path / "source" / NAMES[0])}
    assert server.call("/v1/load_lora_adapter", load).status == 200
    assert server.pids(ENGINE) == [], "nobody needs it yet"
    started = time.monotonic()
    assert server.complete("late").status == 200
    woken = time.monotonic() - started
    assert server.pids(ENGINE) != [last]
    sizes = f"1 to {MOST} in {grown:.0f} s, to 1 in {shrunk:.0f} s, to none in {gone:.0f} s more"
    print(f"{statuses[200]} requests answered; {sizes}; the next one took {woken:.1f} s")  # noqa: T201
