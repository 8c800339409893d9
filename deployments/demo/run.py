"""`lorafleet demo`: a small real base model, three adapters in an S3 of its own, a server, requests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from deployments.config import AppArgs
from deployments.dashboard.overview import TIERS
from deployments.demo.base_model import prepare_base_model
from deployments.demo.prompts import ADAPTERS_DIR, SHOWCASES, Showcase
from deployments.demo.s3 import EmbeddedS3
from deployments.launch import Listen, Server
from engine.config import Device

if TYPE_CHECKING:
    from openai import OpenAI

BUCKET = "lora-adapters"
POOL_BYTES = 512 << 20
ANSWER_TIMEOUT_S = 120.0


@contextmanager
def demo_server(device: Device, num_replicas: int, listen: Listen) -> Iterator[None]:
    """Raises Unavailable if the base model cannot be had, StartFailed for anything else."""
    listen.check_free()
    started = time.monotonic()
    print("base model: preparing (the first time it is downloaded, about 90 MB)", flush=True)
    model = prepare_base_model()
    with EmbeddedS3() as s3:
        uri = s3.upload(ADAPTERS_DIR, BUCKET, "demo")
        os.environ.update(s3.env)
        print(f"adapters: {', '.join(item.adapter for item in SHOWCASES)} in {uri}", flush=True)
        print(f"cluster: starting, engine replicas: {num_replicas}", flush=True)
        args = AppArgs(
            model=str(model),
            adapter_source=uri,
            device=device,
            num_replicas=num_replicas,
            engine={"pool_bytes": POOL_BYTES},
            graceful_shutdown_timeout_s=5.0,
        )
        with Server(args, listen):
            print(f"ready after {time.monotonic() - started:.0f} s: {listen.url}/v1", flush=True)
            yield


def print_ready(url: str) -> None:
    for item in SHOWCASES:
        body = {
            "model": item.adapter,
            "messages": _messages(item),
            "max_tokens": item.max_tokens,
            "temperature": 0,
        }
        quoted = json.dumps(body).replace("'", "'\\''")
        print(f"\ncurl {url}/v1/chat/completions -H 'content-type: application/json' \\\n  -d '{quoted}'")
    print("\nCtrl-C stops it.", flush=True)


def send_once(url: str) -> None:
    """Each request alone, its adapter cold; then all at once, in one batch."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S) as client:
        for item in SHOWCASES:
            started = time.monotonic()
            text, num_tokens = _answer(client, item)
            took_s = time.monotonic() - started
            print(f"\n[{item.adapter}] {item.prompt}\n{text}\n({num_tokens} tokens in {took_s:.2f} s)")
        started = time.monotonic()
        with ThreadPoolExecutor(len(SHOWCASES)) as threads:
            counts = [count for _, count in threads.map(lambda item: _answer(client, item), SHOWCASES)]
        took_s = time.monotonic() - started
    print(f"\nall {len(counts)} at once: {sum(counts) / took_s:.1f} tokens/s")
    with urlopen(f"{url}/metrics", timeout=ANSWER_TIMEOUT_S) as page:
        print(hit_rates(page.read().decode()), flush=True)


def hit_rates(metrics: str) -> str:
    """Where requests found their adapters, from the metrics page."""
    found = dict.fromkeys(TIERS, 0.0)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "lorafleet_adapter_lookups_total":
                found[sample.labels["tier"]] += sample.value
    total = sum(found.values()) or 1.0
    rates = ", ".join(f"{tier} {count / total:.0%}" for tier, count in found.items())
    return f"adapters found in: {rates}"


def _answer(client: OpenAI, item: Showcase) -> tuple[str, int]:
    answer = client.chat.completions.create(
        model=item.adapter,
        messages=[{"role": "user", "content": item.prompt}],
        max_tokens=item.max_tokens,
        temperature=0,
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.completion_tokens


def _messages(item: Showcase) -> Sequence[dict[str, str]]:
    return [{"role": "user", "content": item.prompt}]
