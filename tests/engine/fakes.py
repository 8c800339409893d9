"""A runner and a loader under the test's control: no model, no files, no threads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from engine.adapters.image import AdapterImage
from engine.adapters.loader import LoadResult
from engine.adapters.manager import AdapterManager
from engine.config import EngineConfig
from engine.core import EngineCore, Geometry
from engine.errors import AdapterRefused, LorafleetError
from engine.events import TokenEvent
from engine.page_pool import PageKind
from engine.plan import StepPlan
from engine.request import AdapterRef, GenerateRequest, Milestones
from engine.runner.base import SampledToken
from engine.sampling_params import SamplingParams

PAGE_BYTES = 100


@dataclass
class FakeRunner:
    """The next token is the number of the adapter in the chunk's slot, 0 without one."""

    max_in_flight: int = 1
    copy_bytes_per_s: float = math.inf
    in_flight: list[list[SampledToken]] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    plans: list[StepPlan] = field(default_factory=list)
    resident: dict[int, str] = field(default_factory=dict)  # slot -> digest

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        assert request_id not in self.started
        self.started.add(request_id)

    def finish(self, request_id: str) -> None:
        self.started.discard(request_id)

    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        self.plans.append(plan)
        for eviction in plan.evictions:
            self.resident.pop(eviction.slot, None)
        for load in plan.loads:
            assert images[load.digest].digest == load.digest
            self.resident[load.slot] = load.digest
        tokens = []
        for chunk in plan.chunks:
            assert chunk.adapter_slot == -1 or chunk.adapter_slot in self.resident
            if chunk.samples:
                tokens.append(SampledToken(chunk.request_id, self._token(chunk.adapter_slot), None))
        self.in_flight.append(tokens)
        assert len(self.in_flight) <= self.max_in_flight

    def collect(self) -> list[SampledToken]:
        return self.in_flight.pop(0)

    def close(self) -> None: ...

    def _token(self, slot: int) -> int:
        return 0 if slot < 0 else int(self.resident[slot].removeprefix("digest-"))


@dataclass
class FakeLoader:
    submitted: list[AdapterRef] = field(default_factory=list)
    refused: dict[AdapterRef, AdapterRefused] = field(default_factory=dict)
    forgotten: list[AdapterRef] = field(default_factory=list)
    is_closed: bool = False

    def submit(self, ref: AdapterRef) -> None:
        assert ref not in self.submitted, "two loads of one version in flight"
        self.submitted.append(ref)

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        self.refused[ref] = error

    def forget_failure(self, ref: AdapterRef) -> None:
        self.forgotten.append(ref)

    def close(self) -> None:
        self.is_closed = True


def image(number: int, num_pages: int = 2, is_from_disk: bool = False) -> AdapterImage:
    """Its rank is 8."""
    fake = SimpleNamespace(
        digest=f"digest-{number}",
        num_pages=num_pages,
        nbytes=num_pages * PAGE_BYTES,
        rank=8,
        is_from_disk=is_from_disk,
        report={"status": "ok", "digest": f"digest-{number}"},
    )
    return cast("AdapterImage", fake)


class Harness:
    """An EngineCore over fakes, with a hand-driven clock; checks invariants after every step."""

    def __init__(self, num_pages: int = 40, max_in_flight: int = 1, **config: Any) -> None:
        self.now = 0.0
        self.runner = FakeRunner(max_in_flight)
        self.loader = FakeLoader()
        self.config = EngineConfig(
            model="fake", debug=True, **{"max_num_seqs": 8, "max_num_batched_tokens": 64} | config
        )
        self.core = EngineCore(
            self.config,
            Geometry(num_pages, 4, PAGE_BYTES, 128, 256, (255,)),
            self.runner,
            AdapterManager(self.loader, self.config.host_cache_bytes, self.config.max_parallel_loads),
            lambda: self.now,
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenEvent] = {}
        self.answers: dict[str, Any] = {}
        self.milestones: dict[str, Milestones] = {}

    def add(
        self,
        request_id: str,
        adapter: AdapterRef | None = None,
        length: int = 5,
        timeout_s: float | None = None,
        is_traced: bool = False,
        **params: Any,
    ) -> None:
        sampling = SamplingParams(**({"max_tokens": 4, "seed": 0} | params))
        request = GenerateRequest(request_id, tuple(range(length)), sampling, adapter, timeout_s, is_traced)
        self.core.add_request(request)
        self.tokens[request_id] = []

    def loaded(self, ref: AdapterRef, result: AdapterImage | LorafleetError, seconds: float = 0.5) -> None:
        self.loader.submitted.remove(ref)
        if isinstance(result, LorafleetError):
            self.core.on_loaded(LoadResult(ref, None, result, seconds))
        else:
            self.core.on_loaded(LoadResult(ref, result, None, seconds))
        self.collect()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.01
            self.core.step()
            self.collect()

    def run(self) -> None:
        """Until nothing can run without a load or an arrival."""
        for _ in range(1000):
            self.step()
            if self.core.is_idle or (self.core.is_stalled and not self.core.scheduler.running):
                return
        raise AssertionError("still running after 1000 steps")

    def collect(self) -> None:
        self.core.check_invariants()
        for event in self.core.take_events():
            if not isinstance(event, TokenEvent):
                assert event.call_id not in self.answers
                self.answers[event.call_id] = event.error or event.result
                continue
            assert event.request_id not in self.ends, "an event after the end"
            if event.milestones is not None:
                assert event.request_id not in self.milestones, "told twice"
                assert self.tokens[event.request_id] == []
                self.milestones[event.request_id] = event.milestones
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.finish_reason or event.error:
                self.ends[event.request_id] = event
        for ended in self.ends:
            assert ended not in self.runner.started

    def assert_nothing_is_held(self) -> None:
        core = self.core
        assert not core.requests
        assert not self.runner.started
        assert all(adapter.num_leases == 0 for adapter in core.memory.residency)
        assert core.memory.pool.num_used(PageKind.SEQUENCE) == 0
        assert core.memory.prefix.num_evictable == core.memory.prefix.num_pages
