"""FR-60 on three real engines: a hot adapter spreads to where there are seats, and shrinks with its load.

Takes a minute: `pytest -m slow -s tests/cluster/test_spread.py` prints how long each step took.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path

import pytest

from deployments.app import ROUTER
from tests.cluster.test_routing import NUM_REPLICAS, SEATS, SLOTS, Fleet, fleet
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HOT = "hot"
NUM_OTHERS = 2 * NUM_REPLICAS * SLOTS
OTHERS_RATE = 4.0  # requests a second
LOOK_S = 0.25
SPREAD_S, SHRINK_S = 10.0, 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("spread")
    base = make_llama(root / "base")
    for seed, name in enumerate((HOT, *(f"a{i:02}" for i in range(NUM_OTHERS)))):
        make_adapter(base, root / name, rank=8, targets=ALL_LINEAR, seed=seed)
    return root


@asynccontextmanager
async def asking(app: Fleet, num_users: int) -> AsyncIterator[None]:
    """So many users ask the hot adapter, one request after another."""
    is_over = False

    async def user() -> None:
        while not is_over:
            await app.ask(HOT)

    users = [asyncio.create_task(user()) for _ in range(num_users)]
    yield
    is_over = True
    await asyncio.gather(*users)


@asynccontextmanager
async def others(app: Fleet) -> AsyncIterator[None]:
    """Poisson, zipf over the other adapters."""
    rng = random.Random(0)
    weights = list(accumulate(1 / (i + 1) for i in range(NUM_OTHERS)))
    calls: set[asyncio.Task[float]] = set()

    async def arrive() -> None:
        while True:
            (i,) = rng.choices(range(NUM_OTHERS), cum_weights=weights)
            calls.add(asyncio.create_task(app.ask(f"a{i:02}")))
            await asyncio.sleep(rng.expovariate(OTHERS_RATE))

    arriving = asyncio.create_task(arrive())
    yield
    arriving.cancel()
    await asyncio.gather(*calls)


class Watch:
    """Where the hot adapter is, and where its requests went in the last two seconds."""

    def __init__(self, app: Fleet) -> None:
        self._app = app
        self._seen: list[Counter[str]] = []
        self.holders = 0
        self.recent: Counter[str] = Counter()

    async def look(self) -> None:
        replicas = await asyncio.to_thread(self._app.stats)
        entries = {stats["replica"]: stats["adapters"].get(HOT, {}) for stats in replicas}
        self.holders = sum(entry.get("tier") == "hbm" for entry in entries.values())
        arrived = {
            replica: sum(entry["hits"].values()) + entry["misses"]
            for replica, entry in entries.items()
            if "hits" in entry
        }
        self._seen.append(Counter(arrived))
        self.recent = self._seen[-1] - self._seen[max(0, len(self._seen) - 1 - int(2 / LOOK_S))]

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Seconds it took."""
        started = time.monotonic()
        while True:
            await self.look()
            if condition():
                return time.monotonic() - started
            assert time.monotonic() - started < timeout_s, (self.holders, self.recent)
            await asyncio.sleep(LOOK_S)


def test_a_hot_adapter_spreads_over_three_replicas_and_shrinks_again(ray_cluster: None, model: Path) -> None:
    async def main(app: Fleet) -> None:
        watch = Watch(app)
        async with others(app):
            async with asking(app, 1):
                await asyncio.sleep(5.0)
                await watch.look()
            assert watch.holders == 1
            async with asking(app, NUM_REPLICAS * SEATS):
                shared = await watch.until(
                    lambda: watch.holders == len(watch.recent) == NUM_REPLICAS, SPREAD_S
                )
                # it stays so: none of them has as much as two should have
                await asyncio.sleep(4.0)
                await watch.look()
                assert max(watch.recent.values()) < 2 / NUM_REPLICAS * watch.recent.total()
            async with asking(app, 1):
                gathered = await watch.until(lambda: len(watch.recent) == 1, SHRINK_S)
                # and stays there: the copies are nobody's, and go when somebody needs their pages
                await asyncio.sleep(4.0)
                await watch.look()
                assert len(watch.recent) == 1
        print(f"on {NUM_REPLICAS} replicas {shared:.1f} s after its load came, ", end="")  # noqa: T201
        print(f"at one home {gathered:.1f} s after it went")  # noqa: T201

    with fleet(model, ROUTER, "spread") as app:
        asyncio.run(main(app))
