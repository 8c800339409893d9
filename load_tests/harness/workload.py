"""What is asked for, and when: arrivals, adapters and lengths, seeded. Knows nothing of servers.

arrivals     poisson, gamma (`cv` > 1: bursts), a trace file
adapters     identical, distinct, uniform (ceil(sqrt(n)) of them, as Punica), skewed (geometric, ratio 1.5),
             power (S-LoRA), zipf, shifting (a hot set of a tenth takes nine tenths, and moves on each minute)
lengths      functions of `load_tests.replay.workloads`
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load_tests.replay.workloads import (
    Lengths,
    conversation_lengths,
    punica_lengths,
    uniform_lengths,
    weighted,
)

SHIFT_S = 60.0
HOT_PART, HOT_SHARE = 0.1, 0.9
# ids that every vocabulary has, and none of them special
TOKEN_IDS = range(32, 250)

Pick = Callable[[float], int]  # time -> adapter


@dataclass(frozen=True, slots=True)
class Planned:
    time_s: float
    adapter: int
    prompt: tuple[int, ...]
    num_output: int
    group: str = "all"  # summed up apart from others


@dataclass(frozen=True, slots=True)
class Preset:
    adapters: str  # name of a popularity
    lengths: Lengths
    exponent: float = 1.0  # of zipf or power
    cv: float = 1.0  # of the gaps between requests; 1: Poisson
    shared: float = 0.0  # part of each prompt that all requests of its adapter begin with


PRESETS = {
    "slora-s2": Preset("power", uniform_lengths),
    "slora-s4": Preset("power", uniform_lengths, cv=4.0),
    "punica-distinct": Preset("distinct", punica_lengths),
    "punica-uniform": Preset("uniform", punica_lengths),
    "punica-skewed": Preset("skewed", punica_lengths),
    "punica-identical": Preset("identical", punica_lengths),
    "chameleon": Preset("zipf", conversation_lengths),
    "toppings-s3": Preset("distinct", conversation_lengths),
    "zipf-1.0": Preset("zipf", uniform_lengths, 1.0, shared=1 / 3),
    "zipf-1.2": Preset("zipf", uniform_lengths, 1.2, shared=1 / 3),
    "zipf-1.5": Preset("zipf", uniform_lengths, 1.5, shared=1 / 3),
    "shifting": Preset("shifting", uniform_lengths, shared=1 / 3),
    "thrash": Preset("power", uniform_lengths),  # over twice as many adapters as the server holds
}


def popularity(name: str, n: int, rng: random.Random, exponent: float = 1.0) -> Pick:
    """`n` adapters. Raises ValueError for a name that is not in the module's list."""
    if name == "identical":
        return lambda _: 0
    if name == "distinct":
        numbers = itertools.count()
        return lambda _: next(numbers) % n
    if name == "uniform":
        return lambda _: rng.randrange(math.ceil(math.sqrt(n)))
    if name == "power":
        return lambda _: int(rng.random() ** (1 / exponent) * n)
    if name in ("skewed", "zipf"):
        weights = [1.5**-i if name == "skewed" else (i + 1) ** -exponent for i in range(n)]
        pick = weighted(rng, weights)
        return lambda _: pick()
    if name == "shifting":
        return partial(_shifting, n, rng)
    raise ValueError(f"no popularity {name!r}")


def _shifting(n: int, rng: random.Random, now: float) -> int:
    num_hot = max(1, int(n * HOT_PART))
    if rng.random() >= HOT_SHARE:
        return rng.randrange(n)
    return (int(now / SHIFT_S) * num_hot + rng.randrange(num_hot)) % n


def arrivals(rate: float, duration_s: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Gaps are gamma distributed with mean 1 / rate; their deviation is `cv` times that."""
    shape = 1 / cv**2
    now = rng.gammavariate(shape, 1 / (rate * shape))
    while now < duration_s:
        yield now
        now += rng.gammavariate(shape, 1 / (rate * shape))


def trace(path: Path, duration_s: float) -> Iterator[float]:
    """Times of a file with a JSON list of seconds, rescaled so that the last one is at `duration_s`.

    Raises ValueError if they are all the same.
    """
    times = sorted(json.loads(path.read_text()))
    if not times or times[0] == times[-1]:
        raise ValueError(f"{path} has no two different times")
    return (duration_s * (time - times[0]) / (times[-1] - times[0]) for time in times)


def plan(
    preset: Preset,
    times: Iterator[float],
    num_adapters: int,
    rng: random.Random,
    length_scale: float = 1.0,
    group: str = "all",
    first_adapter: int = 0,
) -> list[Planned]:
    """`length_scale`: of prompts and outputs. `first_adapter`: its number; the others follow."""
    pick = popularity(preset.adapters, num_adapters, rng, preset.exponent)
    planned = []
    for time_s in times:
        adapter = first_adapter + pick(time_s)
        num_prompt, num_output = (max(1, round(length * length_scale)) for length in preset.lengths(rng))
        num_shared = int(num_prompt * preset.shared)
        system = random.Random(adapter).choices(TOKEN_IDS, k=num_shared)
        prompt = (*system, *rng.choices(TOKEN_IDS, k=num_prompt - num_shared))
        planned.append(Planned(time_s, adapter, prompt, num_output, group))
    return planned
