"""The scheduler under random load and injected shortages; what must hold whatever happens."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable, Sequence

import pytest

from engine.errors import RequestTooLarge
from engine.memory import Needed, PoolMemory
from engine.prefix_cache import PrefixNode
from tests.engine.simulation import PAGE_TOKENS, VOCAB, Simulation, Tokens


class Soak:
    """Random arrivals, hints, aborts and reloads of adapters, on a pool that is much too small for them."""

    def __init__(self, seed: int, num_requests: int = 40) -> None:
        self.rng = rng = random.Random(seed)
        num_slots = rng.randint(1, 3)
        self.simulation = Simulation(
            num_pages=rng.randint(8, 30),
            num_slots=num_slots,
            max_num_seqs=(max_num_seqs := rng.randint(1, 6)),
            max_num_batched_tokens=rng.randint(max_num_seqs, 16),
            prefix_cache=rng.random() < 0.85,
            max_overtakes=rng.choice((0, 1, 4)),
            max_overtaken_s=rng.choice((3.0, 20.0, 1e9)),
            max_in_flight=rng.choice((1, 2)),
            fair=rng.random() < 0.7,
            spare_pages=rng.choice((0, 2)),
            page_copy_s=rng.choice((0.0, 0.1, 0.3)),
            prefetch=rng.random() < 0.8,
        )
        self.num_requests = num_requests
        self.versions = dict.fromkeys(range(rng.randint(1, 4)), 0)  # adapter -> version
        self.num_pages = {adapter: rng.choice((1, 2, 5)) for adapter in self.versions}
        self.templates = [self.prompt(rng.randint(4, 24)) for _ in range(3)]

    def prompt(self, num_tokens: int) -> Tokens:
        return tuple(self.rng.randrange(VOCAB) for _ in range(num_tokens))

    def digest(self, adapter: int) -> str:
        return f"{adapter}@{self.versions[adapter]}"

    def submit(self) -> None:
        rng = self.rng
        adapter = rng.choice([None, *self.versions])
        prompt = rng.choice(self.templates)[: rng.randint(1, 24)] + self.prompt(rng.choice((0, 0, 3)))
        try:
            self.simulation.submit(
                f"r{len(self.simulation.clients)}",
                prompt,
                max_tokens=rng.choice((1, 4, 12, 30)),
                digest=None if adapter is None else self.digest(adapter),
                adapter_pages=1 if adapter is None else self.num_pages[adapter],
                stop_token_ids=rng.choice((frozenset(), frozenset({0}))),
            )
        except RequestTooLarge:
            self.num_requests -= 1

    def abort(self) -> None:
        live = [r for r, c in self.simulation.clients.items() if c.end is None]
        if live:
            self.simulation.abort(self.rng.choice(live))

    def reload(self) -> None:
        """From now on the name means other bytes, or, sometimes, the same ones after all."""
        adapter = self.rng.choice(list(self.versions))
        old = self.digest(adapter)
        self.simulation.scheduler.retire(old)
        if self.rng.random() < 0.3:
            self.simulation.scheduler.keep(old)
        else:
            self.versions[adapter] += 1

    def hint(self) -> None:
        adapter = self.rng.choice(list(self.versions))
        prefetcher = self.simulation.scheduler.prefetcher
        prefetcher.hint(self.digest(adapter), self.num_pages[adapter], self.simulation.now)

    def read(self) -> None:
        adapter = self.rng.choice(list(self.versions))
        self.simulation.scheduler.prefetcher.in_host(self.digest(adapter), self.num_pages[adapter])

    def disturb(self) -> None:
        events = (self.abort, 0.02), (self.reload, 0.02), (self.hint, 0.05), (self.read, 0.05)
        for event, probability in events:
            if self.rng.random() < probability:
                event()

    def run(self) -> None:
        for _ in range(5000):
            while len(self.simulation.clients) < self.num_requests and self.rng.random() < 0.4:
                self.submit()
            self.disturb()
            if self.simulation.scheduler.has_work:
                self.step()
            elif len(self.simulation.clients) >= self.num_requests:
                return
        raise AssertionError("requests never end")

    def step(self) -> None:
        in_host_memory = {self.digest(a) for a in self.versions if self.rng.random() < 0.9}
        waiting = {s.digest for s in self.simulation.scheduler.waiting}
        all_wait_for_images = not self.simulation.running() and not (
            waiting & (in_host_memory | self.simulation.resident() | {None})
        )
        in_host_memory |= {d for d in waiting if d and d not in map(self.digest, self.versions)}
        has_in_flight = bool(self.simulation.in_flight)
        plan = self.simulation.step(in_host_memory, during=self.disturb)
        assert plan.chunks or has_in_flight or all_wait_for_images, "a step without progress"
        assert set(plan.missing) <= {d for d in waiting if d} - in_host_memory


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_once_with_the_tokens_of_an_undisturbed_run(seed: int) -> None:
    """FR-22, FR-24, FR-25: no page of another request, adapter or version is ever read."""
    soak = Soak(seed)
    soak.run()
    soak.simulation.check_ends()
    soak.simulation.check_nothing_leaked()


class ShortMemory(PoolMemory):
    """Says that there is no room when `is_short` of the number of the question, whatever there is."""

    def __init__(self, is_short: Callable[[int], bool], num_pages: int, num_slots: int) -> None:
        super().__init__(num_pages, PAGE_TOKENS, num_slots)
        self._is_short = is_short
        self.num_asked = 0

    def can_take(self, num_pages: int, needed: Needed, keeping: Sequence[PrefixNode] = ()) -> bool:
        return not self._ask() and super().can_take(num_pages, needed, keeping)

    def has_slot(self, needed: Needed) -> bool:
        return not self._ask() and super().has_slot(needed)

    def _ask(self) -> bool:
        self.num_asked += 1
        return self._is_short(self.num_asked)


def run_short_of_memory(is_short: Callable[[int], bool], max_overtaken_s: float) -> int:
    """Returns how often it asked."""
    memory = ShortMemory(is_short, num_pages=14, num_slots=2)
    simulation = Simulation(
        14, num_slots=2, max_num_batched_tokens=8, max_overtaken_s=max_overtaken_s, memory=memory
    )
    shared = (1, 2, 0, 1, 1, 2, 2, 0)
    adapter_pages = {"a": 1, "b": 3, "c": 2}
    for i, digest in enumerate(("a", None, "b", "a", "c", "b", None, "a", "c", "a")):
        prompt = shared[: 2 + i] + (i % VOCAB,) * 3
        simulation.submit(f"r{i}", prompt, 8, digest, adapter_pages.get(digest or "", 0))
    simulation.run_to_end()
    simulation.check_ends()
    simulation.check_nothing_leaked()
    return memory.num_asked


@pytest.mark.parametrize("max_overtaken_s", [2.0, 1e9])
def test_a_shortage_at_any_moment_delays_but_loses_nothing(max_overtaken_s: float) -> None:
    """Fault sweep: the n-th question for pages or a slot is answered with no, for every n."""
    for nth in itertools.count(1):
        num_asked = run_short_of_memory(functools.partial(operator.eq, nth), max_overtaken_s)
        if num_asked < nth:
            break
    assert nth > 40, "the sweep covers a run with many questions"


@pytest.mark.parametrize("seed", range(8))
def test_shortages_that_come_again_and_again_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    run_short_of_memory(lambda _: rng.random() < 0.4, max_overtaken_s=2.0)
