"""Requests for the simulator: who asks for which adapter, when, with how many tokens. Seeded."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import NamedTuple

Popularity = Callable[[Random, float], int]  # at a time, the adapter that is asked for


class Arrival(NamedTuple):
    time_s: float
    adapter: int
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal, as conversations are: most are short, a few are long."""

    prompt_median: float = 400.0
    output_median: float = 120.0
    sigma: float = 0.7
    most: int = 4000

    def draw(self, rng: Random) -> tuple[int, int]:
        prompt = self.prompt_median * math.exp(rng.gauss(0.0, self.sigma))
        output = self.output_median * math.exp(rng.gauss(0.0, self.sigma))
        return max(1, min(self.most, int(prompt))), max(1, min(self.most, int(output)))


def poisson(
    rate: Callable[[float], float], duration_s: float, pick: Popularity, lengths: Lengths, seed: int
) -> Iterator[Arrival]:
    """`rate`: requests a second, by time; must be positive."""
    rng = Random(seed)
    now = 0.0
    while (now := now + rng.expovariate(rate(now))) < duration_s:
        yield Arrival(now, pick(rng, now), *lengths.draw(rng))


def bursty(
    rate: float, duration_s: float, pick: Popularity, lengths: Lengths, seed: int, mean_burst: float = 12.0
) -> Iterator[Arrival]:
    """As functions in Azure are called: one adapter asks many times at once, then is silent.

    Bursts arrive as a Poisson process; a burst's size is geometric with mean `mean_burst`, its requests are
    50 ms apart on average. In any second the count's variance is `mean_burst` times and more that of Poisson.
    """
    rng = Random(seed)
    arrivals = []
    now = 0.0
    while (now := now + rng.expovariate(rate / mean_burst)) < duration_s:
        adapter, at = pick(rng, now), now
        while at < duration_s:
            arrivals.append(Arrival(at, adapter, *lengths.draw(rng)))
            if rng.random() < 1.0 / mean_burst:
                break
            at += rng.expovariate(20.0)
    return iter(sorted(arrivals))


def zipf(num_adapters: int, exponent: float = 1.0) -> Popularity:
    """Adapter i is asked for in proportion to 1 / (i + 1) ** exponent."""
    cumulative = list(accumulate((i + 1) ** -exponent for i in range(num_adapters)))
    return lambda rng, _: bisect(cumulative, rng.random() * cumulative[-1])


def shifting(num_adapters: int, period_s: float, exponent: float = 1.0) -> Popularity:
    """Zipf, but every `period_s` other adapters are the popular ones."""
    fixed = zipf(num_adapters, exponent)
    return lambda rng, now: (fixed(rng, now) + int(now / period_s) * (num_adapters // 7)) % num_adapters


def one_hot(others: Popularity, hot: int, rate: Callable[[float], float], other_rate: float) -> Popularity:
    """Adapter `hot` at `rate` beside others at `other_rate`, requests a second."""

    def pick(rng: Random, now: float) -> int:
        is_hot = rng.random() * (rate(now) + other_rate) < rate(now)
        return hot if is_hot else others(rng, now)

    return pick
