"""A plan against a server: its adapters, its counters before and after, a bar while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from urllib.request import Request, urlopen

from tqdm import tqdm

from load_tests.harness.client import Record, Target, run
from load_tests.harness.summary import Slo, Summary, difference, lookups, summarise
from load_tests.harness.workload import Planned

READ_TIMEOUT_S = 30


def read(target: Target, path: str) -> str:
    """Raises OSError."""
    with urlopen(Request(target.url + path, headers=target.headers), timeout=READ_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
        return text


def adapters_of(target: Target) -> tuple[str, ...]:
    """Names of the models that have a parent: vLLM's and our way to tell adapters. Raises OSError."""
    models = json.loads(read(target, "/v1/models"))["data"]
    return tuple(model["id"] for model in models if model.get("parent"))


def lookups_of(target: Target) -> dict[str, float]:
    try:
        return lookups(read(target, "/metrics"))
    except (OSError, ValueError):
        return {}


def measure(target: Target, planned: Sequence[Planned], slo: Slo, title: str) -> tuple[Summary, list[Record]]:
    before = lookups_of(target)
    with tqdm(total=len(planned), desc=title, unit="req", disable=None) as progress:
        records = asyncio.run(run(target, planned, lambda _: progress.update()))
    return summarise(records, slo, difference(before, lookups_of(target))), records


def show(summary: Summary) -> None:
    for name, group in summary.groups.items():
        print(
            f"{name:10} {group.requests} requests, errors {group.errors or 0}, TTFT {_ms(group.ttft_s)},"
            f" TPOT {_ms(group.tpot_s)}, {group.output_tokens_per_s:.1f} tokens/s,"
            f" {group.good_share:.1%} within the SLO"
        )
    if summary.hit_ratio is not None:
        tiers = ", ".join(f"{tier} {count:.0f}" for tier, count in summary.hits.items())
        print(f"hit ratio  {summary.hit_ratio:.1%} ({tiers})")


def _ms(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{value * 1e3:.0f}" for value in percentiles.values()) + " ms"
