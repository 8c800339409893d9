"""Traces: who asks for which adapter, when, with how many tokens. Seeded; the same for every policy.

slora     S-LoRA's generator (`benchmarks/trace.py`), setting S2: ranks 64, 32, 16, 8 in turn, popularity
          power(1), so uniform, gaps exponential, prompt and output each uniform in [8, 512)
punica    prompt lognormal, prompt and output together uniform up to 2048, rank 16; popularity geometric with
          ratio 1.5 ("skewed"), or every request another adapter ("distinct")
chameleon conversation lengths, Poisson, ranks 8 to 128 equally likely, Zipf inside a rank
zipf      Zipf over 1000 adapters of ranks 8 to 64; a third of each prompt is the adapter's own system prompt
thrash    uniform over adapters of rank 16 that take twice the pool; "fits": half of it
start     three requests a second over 100 adapters of rank 64, Zipf, measured from the first one on
bursts    ten a second over 150 adapters of rank 32, Zipf; every eight seconds 40 long prompts take the pool
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

GIB = 1 << 30
PAGE_BYTES = 2 << 20
POOL_PAGES = 12_000
NUM_SLOTS = 2048
HOST_BYTES = 256 * GIB


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float
    adapter: int
    prompt: tuple[int, ...]
    num_output: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    ranks: tuple[int, ...]  # of adapter 0, 1, ...
    arrivals: tuple[Arrival, ...]
    duration_s: float
    warm_up: float = 0.2  # of the duration: not measured
    pool_pages: int = POOL_PAGES
    host_bytes: int = HOST_BYTES

    @property
    def begin_s(self) -> float:
        """Measured from here on."""
        return self.duration_s * self.warm_up

    def num_pages(self, adapter: int) -> int:
        return pages_of(self.ranks[adapter])


def pages_of(rank: int) -> int:
    """All seven linears of an 8B model in bf16: 40 pages of 2 MiB at rank 16."""
    return math.ceil(rank * 2.5)


def slora(n: int, duration_s: float, rate: float = 100.0, seed: int = 0) -> Workload:
    """`rate` requests a second: more than a replica can serve, so that throughput is what is compared."""
    rng = random.Random(42 + seed)
    ranks = tuple(itertools.islice(itertools.cycle((64, 32, 16, 8)), n))
    return _build(
        f"slora-s2 n={n}", ranks, duration_s, rate, rng, lambda: int(rng.random() * n), uniform_lengths
    )


def punica(popularity: str, duration_s: float, rate: float = 7.0, seed: int = 0) -> Workload:
    rng = random.Random(0xABCDABCD987 + seed)
    num_requests = int(rate * duration_s * 1.5)
    if popularity == "distinct":
        numbers = itertools.count()
        ranks = (16,) * num_requests
        return _build(
            "punica-distinct",
            ranks,
            duration_s,
            rate,
            rng,
            lambda: next(numbers) % num_requests,
            punica_lengths,
        )
    n = 24
    pick = weighted(rng, [1.5**-i for i in range(n)])
    return _build("punica-skewed", (16,) * n, duration_s, rate, rng, pick, punica_lengths)


def chameleon(duration_s: float, rate: float = 20.0, n: int = 500, seed: int = 0) -> Workload:
    rng = random.Random(7 + seed)
    classes = (8, 16, 32, 64, 128)
    ranks = tuple(classes[i % len(classes)] for i in range(n))
    pick = weighted(rng, [1.0 / (1 + i // len(classes)) for i in range(n)])
    return _build("chameleon", ranks, duration_s, rate, rng, pick, conversation_lengths)


def zipf(
    exponent: float, duration_s: float, rate: float = 30.0, host_bytes: int = HOST_BYTES, seed: int = 0
) -> Workload:
    rng = random.Random(11 + seed)
    n = 1000
    ranks = tuple(rng.choice((8, 16, 32, 64)) for _ in range(n))
    pick = weighted(rng, [(i + 1) ** -exponent for i in range(n)])
    name = f"zipf-{exponent}" + ("" if host_bytes == HOST_BYTES else f" {host_bytes // GIB} GiB host")
    return _build(name, ranks, duration_s, rate, rng, pick, uniform_lengths, 1 / 3, host_bytes)


def thrash(fits: bool, duration_s: float, rate: float = 35.0, seed: int = 0) -> Workload:
    rng = random.Random(3 + seed)
    n = int(POOL_PAGES * (0.5 if fits else 2.0)) // pages_of(16)
    name = "thrash (fits)" if fits else "thrash"
    return _build(name, (16,) * n, duration_s, rate, rng, lambda: rng.randrange(n), uniform_lengths)


def start(duration_s: float, rate: float = 3.0, seed: int = 0) -> Workload:
    rng = random.Random(5 + seed)
    n = 100
    pick = weighted(rng, [(i + 1) ** -0.6 for i in range(n)])
    workload = _build("start", (64,) * n, duration_s, rate, rng, pick, uniform_lengths)
    return replace(workload, warm_up=0.0)


def bursts(duration_s: float, rate: float = 10.0, seed: int = 0) -> Workload:
    rng = random.Random(13 + seed)
    n, every_s, burst = 150, 8.0, 40
    pick = weighted(rng, [(i + 1) ** -0.6 for i in range(n)])
    workload = _build("bursts", (32,) * n, duration_s, rate, rng, pick, uniform_lengths)
    times = [every_s * (i + 0.5) for i in range(int(duration_s / every_s))]
    long = [Arrival(time_s, 0, tuple(rng.randbytes(4000)), 60) for time_s in times for _ in range(burst)]
    arrivals = sorted([*workload.arrivals, *long], key=lambda arrival: arrival.time_s)
    return replace(workload, arrivals=tuple(arrivals))


def standard(scale: float = 1.0, seed: int = 0) -> list[Callable[[], Workload]]:
    """Makers of all workloads; `scale` of their durations."""
    return [
        *(partial(slora, n, 8 * scale, seed=seed) for n in (5, 100, 1000, 2000)),
        partial(punica, "skewed", 40 * scale, seed=seed),
        partial(punica, "distinct", 40 * scale, seed=seed),
        partial(chameleon, 25 * scale, seed=seed),
        *(partial(zipf, exponent, 25 * scale, seed=seed) for exponent in (1.0, 1.2, 1.5)),
        partial(zipf, 1.0, 25 * scale, host_bytes=32 * GIB, seed=seed),
        partial(thrash, True, 20 * scale, seed=seed),
        partial(thrash, False, 20 * scale, seed=seed),
        partial(start, 30 * scale, seed=seed),
        partial(bursts, 40 * scale, seed=seed),
    ]


Lengths = Callable[[random.Random], tuple[int, int]]


def _build(
    name: str,
    ranks: tuple[int, ...],
    duration_s: float,
    rate: float,
    rng: random.Random,
    pick: Callable[[], int],
    lengths: Lengths,
    shared: float = 0.0,
    host_bytes: int = HOST_BYTES,
) -> Workload:
    """`shared`: of each prompt that is the adapter's own system prompt."""
    arrivals = []
    time_s = rng.expovariate(rate)
    while time_s < duration_s:
        adapter = pick()
        num_prompt, num_output = lengths(rng)
        num_shared = int(num_prompt * shared)
        system = random.Random(adapter).randbytes(512)[:num_shared]
        prompt = tuple(system + rng.randbytes(num_prompt - num_shared))
        arrivals.append(Arrival(time_s, adapter, prompt, num_output))
        time_s += rng.expovariate(rate)
    return Workload(name, ranks, tuple(arrivals), duration_s, host_bytes=host_bytes)


def weighted(rng: random.Random, weights: list[float]) -> Callable[[], int]:
    cumulative = list(itertools.accumulate(weights))
    return lambda: rng.choices(range(len(weights)), cum_weights=cumulative)[0]


def uniform_lengths(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(8, 512), rng.randrange(8, 512)


def punica_lengths(rng: random.Random) -> tuple[int, int]:
    num_prompt = min(1900, max(2, int(18.0 * rng.lognormvariate(0.0, 0.8) - 1.0)))
    total = max(num_prompt + 1, rng.randrange(2, 2048))
    return num_prompt, total - num_prompt


def conversation_lengths(rng: random.Random) -> tuple[int, int]:
    num_prompt = min(4000, max(8, int(rng.lognormvariate(6.0, 0.9))))
    return num_prompt, min(1000, max(4, int(rng.lognormvariate(4.9, 0.7))))
