"""Two real engines, twenty adapters in S3, a pool that holds six: right answers, counted hits, a dead S3.

And where the time of a cold request goes, told to a collector of spans.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.demo.s3 import EmbeddedS3
from engine import Engine, EngineConfig, SamplingParams
from tests.cluster.serve_process import Answer, ServeProcess, serving
from tests.cluster.span_collector import Collector, collecting
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.cluster

TIERS = ("hbm", "host", "source")
NUM_ADAPTERS = 20
ADAPTER_PAGES = 8  # rank 8, all seven projections of base T
NUM_PAGES = 6 * ADAPTER_PAGES + 16  # and KV for eight requests
HOST_CACHE_BYTES = 3 * ADAPTER_PAGES * 8192  # two engines hold 18 of the twenty at most
PROMPT = "The quick brown fox"
TRACED = "traced"  # an adapter that nobody else asks for
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["route", "load adapter", "queue", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Setup:
    fleet: ServeProcess
    s3: EmbeddedS3
    collector: Collector
    expected: dict[str, str]  # adapter -> text

    def ask(self, name: str) -> Answer:
        return self.fleet.complete(name, prompt=PROMPT, max_tokens=12)

    def lookups(self) -> dict[str, float]:
        time.sleep(0.5)  # statistics are 0.1 s old at most
        return {tier: self.metric("lorafleet_adapter_lookups_total", tier=tier) for tier in TIERS}

    def metric(self, name: str, **labels: str) -> float:
        """Summed over all samples that have these labels."""
        page = self.fleet.call("/metrics").body
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("tiers")
    base = make_llama(root / "base")
    names = [f"a{i:02}" for i in range(NUM_ADAPTERS)]
    for seed, name in enumerate(names):
        make_adapter(base, root / "adapters" / name, rank=8, targets=ALL_LINEAR, seed=seed)
    expected = _expected(base, root / "adapters", names)
    make_adapter(base, root / "adapters" / TRACED, rank=8, targets=ALL_LINEAR, seed=NUM_ADAPTERS)
    with EmbeddedS3() as s3, collecting() as (address, collector):
        uri = s3.upload(root / "adapters", "bucket", "prefix")
        flags = [
            "--model", str(base), "--adapter-source", uri, "--num-replicas", "2", "--max-num-seqs", "8",
            "--num-pages", str(NUM_PAGES), "--host-cache-bytes", str(HOST_CACHE_BYTES),
        ]  # fmt: skip
        traces = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with serving(flags, s3.env | traces) as fleet:
            yield Setup(fleet, s3, collector, expected)


def _expected(base: Path, adapters: Path, names: list[str]) -> dict[str, str]:
    engine = Engine(EngineConfig(model=str(base), num_pages=400))
    for name in names:
        engine.load_adapter(name, str(adapters / name))
    outputs = engine.generate([PROMPT] * len(names), SamplingParams(temperature=0, max_tokens=12), names)
    engine.close()
    texts = {name: output.text for name, output in zip(names, outputs, strict=True)}
    assert len(set(texts.values())) == len(names)
    return texts


def test_the_stages_of_a_cold_request_arrive_in_order(setup: Setup) -> None:
    body = b'{"model": "traced", "prompt": "abc", "max_tokens": 8}'
    headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    began = time.time_ns()
    with urlopen(Request(f"{setup.fleet.url}/v1/completions", body, headers), timeout=60) as answer:
        assert answer.status == 200
    ended = time.time_ns()
    spans = setup.collector.wait_for(TRACE, 2 + len(STAGES))
    assert set(spans) == {"POST /v1/completions", "generate", *STAGES}
    assert setup.collector.services == {"lorafleet"}
    assert spans["POST /v1/completions"].parent_span_id.hex() == PARENT
    assert {spans[name].parent_span_id for name in STAGES} == {spans["generate"].span_id}
    borders = [began]
    for name in STAGES:
        borders += [spans[name].start_time_unix_nano, spans[name].end_time_unix_nano]
    borders.append(ended)
    assert borders == sorted(borders)
    tier = {a.key: a.value.string_value for a in spans["load adapter"].attributes}
    assert tier == {"lorafleet.adapter.tier": "source"}


def test_every_answer_is_right_while_adapters_come_and_go(setup: Setup) -> None:
    """Claims: right weights always, hits and misses counted, evictions under load, no failure."""
    rng = random.Random(0)
    asked = list(setup.expected) + rng.choices(list(setup.expected), k=140)
    before = setup.lookups()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(setup.ask, asked))
    for name, answer in zip(asked, answers, strict=True):
        assert answer.status == 200, answer.body
        assert answer.body["model"] == name
        assert answer.body["choices"][0]["text"] == setup.expected[name]
    lookups = {tier: count - before[tier] for tier, count in setup.lookups().items()}
    assert sum(lookups.values()) == len(asked)
    assert lookups["source"] >= NUM_ADAPTERS
    assert lookups["hbm"] > 0
    assert setup.metric("lorafleet_evictions_total", tier="hbm") > 0


def test_dead_s3_leaves_what_is_here_serving_and_the_rest_is_told_to_retry(setup: Setup) -> None:
    """FR-26, FR-64; and it is all there again when S3 is."""
    setup.s3.kill()
    answers = {name: setup.ask(name) for name in setup.expected}
    served = {name for name, answer in answers.items() if answer.status == 200}
    assert 6 <= len(served) < NUM_ADAPTERS
    for name, answer in answers.items():
        if name in served:
            assert answer.body["choices"][0]["text"] == setup.expected[name]
        else:
            assert answer.status == 503, answer.body
            assert int(answer.headers["retry-after"]) >= 1
            assert "127.0.0.1" not in str(answer.body)
    assert setup.fleet.call("/health").status == 200
