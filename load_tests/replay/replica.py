"""One replica in simulated time: the real engine core over a device and a source that take time.

A step takes what the GPU took in `load_tests/results/h200_engine.json`:

    max(base, prefill tokens * prefill) + decode rows * row + sum of the ranks of the adapters in it * rank
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from engine.adapters.manager import AdapterManager
from engine.config import EngineConfig
from engine.core import EngineCore, Geometry
from engine.errors import AdapterRefused
from engine.events import TokenEvent
from engine.memory import EvictionCause
from engine.plan import StepPlan
from engine.request import AdapterRef, GenerateRequest
from engine.runner.base import SampledToken
from engine.sampling_params import SamplingParams
from load_tests.replay.policies import PAGE_TOKENS, Policy
from load_tests.replay.workloads import NUM_SLOTS, PAGE_BYTES, Workload

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage
    from engine.adapters.loader import LoadResult

ENGINE_RESULTS = Path(__file__).parents[1] / "results" / "h200_engine.json"
COPY_BYTES_PER_S = 50e9
SOURCE_BYTES_PER_S = 1e9
SOURCE_LATENCY_S = 0.05
MAX_NUM_SEQS = 128
MAX_BATCHED_TOKENS = 4096
LOOK_AGAIN_S = 0.02  # as `engine.loop` does when nothing can run


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds."""

    base: float
    prefill: float
    row: float
    rank: float

    @staticmethod
    def measured(path: Path = ENGINE_RESULTS) -> StepModel:
        rows = json.loads(path.read_text())["rows"]
        value = {(row["case"], row["metric"]): row["value"] for row in rows}
        one, many = (value["no adapter", f"tpot, batch {batch}"] / 1e3 for batch in (1, 64))
        distinct = value["64 adapters distinct, r16", "tpot, batch 64"] / 1e3
        return StepModel(
            base=one,
            prefill=1.0 / value["no adapter", "prefill"],
            row=(many - one) / 63,
            rank=(distinct - many) / (64 * 16),
        )

    def seconds(self, num_prefill: int, num_rows: int, sum_of_ranks: int) -> float:
        busy = max(self.base, num_prefill * self.prefill)
        return busy + num_rows * self.row + sum_of_ranks * self.rank


@dataclass(slots=True)
class Clock:
    now: float = 0.0


@dataclass(slots=True)
class Device:
    """A Runner. Copies run beside the steps, in order; a step waits for the copies of its adapters."""

    clock: Clock
    model: StepModel
    ranks: Mapping[str, int]
    max_in_flight: int = 2
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    _free_at: float = 0.0
    _copied_at: float = 0.0
    _slots: dict[int, tuple[int, float]] = field(default_factory=dict)  # slot -> rank, when it is there
    _in_flight: deque[tuple[float, list[SampledToken]]] = field(default_factory=deque)

    def start(self, request_id: str, params: SamplingParams, seed: int, prompt: tuple[int, ...]) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def close(self) -> None: ...

    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        for load in plan.loads:
            begin = max(self._copied_at, self._free_at if load.after_steps else self.clock.now)
            self._copied_at = begin + images[load.digest].nbytes / self.copy_bytes_per_s
            self._slots[load.slot] = (self.ranks[load.digest], self._copied_at)
        if not plan.chunks:
            self._in_flight.append((self.clock.now, []))
            return
        slots = {chunk.adapter_slot for chunk in plan.chunks} - {-1}
        num_rows = sum(len(chunk.token_ids) == 1 for chunk in plan.chunks)
        num_prefill = sum(len(chunk.token_ids) for chunk in plan.chunks) - num_rows
        seconds = self.model.seconds(num_prefill, num_rows, sum(self._slots[slot][0] for slot in slots))
        begin = max(self._free_at, self.clock.now, *(self._slots[slot][1] for slot in slots))
        self._free_at = begin + seconds
        tokens = [SampledToken(chunk.request_id, 0, None) for chunk in plan.chunks if chunk.samples]
        self._in_flight.append((self._free_at, tokens))

    def collect(self) -> list[SampledToken]:
        done_at, tokens = self._in_flight.popleft()
        self.clock.now = max(self.clock.now, done_at)
        return tokens


class Source:
    """A Loader: loads share the bandwidth one after another."""

    def __init__(self, clock: Clock, images: Mapping[str, AdapterImage]) -> None:
        self.is_instant = False
        self._clock = clock
        self._images = images
        self._free_at = 0.0
        self._loads: list[tuple[float, str, AdapterRef, float]] = []

    def submit(self, ref: AdapterRef) -> None:
        begun = self._clock.now
        if not self.is_instant:
            seconds = self._images[ref.name].nbytes / SOURCE_BYTES_PER_S
            self._free_at = max(self._free_at, begun + SOURCE_LATENCY_S) + seconds
        done_at = begun if self.is_instant else self._free_at
        heapq.heappush(self._loads, (done_at, ref.name, ref, begun))

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        raise error

    def forget_failure(self, ref: AdapterRef) -> None: ...

    def close(self) -> None: ...

    @property
    def next_at(self) -> float:
        return self._loads[0][0] if self._loads else float("inf")

    def take_done(self) -> list[LoadResult]:
        done = []
        while self.next_at <= self._clock.now:
            done_at, name, ref, begun = heapq.heappop(self._loads)
            result = SimpleNamespace(ref=ref, image=self._images[name], error=None, seconds=done_at - begun)
            done.append(cast("LoadResult", result))
        return done


class Replica:
    def __init__(self, workload: Workload, policy: Policy, model: StepModel) -> None:
        self.clock = Clock()
        self._workload = workload
        self._policy = policy
        self._refs = [AdapterRef(f"a{i}", f"simulated/{i}", "1") for i in range(len(workload.ranks))]
        images = {ref.name: _image(ref.name, workload.num_pages(i)) for i, ref in enumerate(self._refs)}
        self._source = Source(self.clock, images)
        largest = max(image.num_pages for image in images.values())
        memory = policy.build(workload.pool_pages, NUM_SLOTS, largest)
        config = EngineConfig(
            model="simulated",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_queued_requests=1 << 20,
            max_adapters=NUM_SLOTS,
            host_cache_bytes=workload.host_bytes,
            prefetch=policy.prefetch,
        )
        manager = AdapterManager(
            self._source, config.host_cache_bytes, config.max_parallel_loads, memory.order.host_image
        )
        ranks = {ref.name: workload.ranks[i] for i, ref in enumerate(self._refs)}
        self.core = EngineCore(
            config,
            Geometry(workload.pool_pages, PAGE_TOKENS, PAGE_BYTES, 8192, 256, ()),
            Device(self.clock, model, ranks),
            manager,
            lambda: self.clock.now,
            memory,
        )
        self.arrived: dict[str, float] = {}
        self.first_token: dict[str, float] = {}
        self.hits: Counter[str] = Counter()  # by tier: where its adapter was when a request arrived
        self.num_tokens_in_window = 0
        self._arrivals = deque(workload.arrivals)
        self._hints = deque(workload.arrivals if policy.hint_s is not None else ())
        self._fill_host_memory()

    def run(self) -> None:
        """Until every request has ended."""
        core = self.core
        while self._arrivals or not core.is_idle or self._source.next_at < float("inf"):
            self._deliver()
            if core.is_idle or core.is_stalled:
                next_at = min(self._next_arrival, self._next_hint, self._source.next_at)
                look_again = float("inf") if core.is_idle else self.clock.now + LOOK_AGAIN_S
                self.clock.now = max(self.clock.now, min(next_at, look_again))
                self._deliver()
            if not core.is_idle:
                core.step()
            if self._take_events() and self._policy.drops_idle:
                self._drop_idle()

    @property
    def _next_arrival(self) -> float:
        return self._arrivals[0].time_s if self._arrivals else float("inf")

    @property
    def _next_hint(self) -> float:
        return self._hints[0].time_s - (self._policy.hint_s or 0.0) if self._hints else float("inf")

    def _deliver(self) -> None:
        while self._next_hint <= self.clock.now:
            self.core.prefetch(self._refs[self._hints.popleft().adapter])
        while self._next_arrival <= self.clock.now:
            arrival = self._arrivals.popleft()
            request_id = f"r{len(self.arrived)}"
            params = SamplingParams(temperature=0, max_tokens=arrival.num_output, ignore_eos=True, seed=0)
            self.arrived[request_id] = arrival.time_s
            if arrival.time_s >= self._workload.begin_s:
                self.hits[self._tier(self._refs[arrival.adapter].name)] += 1
            self.core.add_request(
                GenerateRequest(request_id, arrival.prompt, params, self._refs[arrival.adapter])
            )
        for result in self._source.take_done():
            self.core.on_loaded(result)

    def _tier(self, digest: str) -> str:
        if self.core.memory.residency.get(digest) is not None:
            return "hbm"
        return "host" if digest in self.core.manager else "source"

    def _take_events(self) -> bool:
        """Whether a request has ended."""
        has_ended = False
        begin, end = self._workload.begin_s, self._workload.duration_s
        for event in self.core.take_events():
            assert isinstance(event, TokenEvent)
            assert event.error is None, event.error
            self.first_token.setdefault(event.request_id, self.clock.now)
            self.num_tokens_in_window += begin <= self.clock.now < end
            has_ended = has_ended or event.finish_reason is not None
        return has_ended

    def _drop_idle(self) -> None:
        memory, queued = self.core.memory, self.core.scheduler.waiting.namespaces
        for adapter in list(memory.residency.idle()):
            if adapter.digest not in queued:
                memory.evict_adapter(adapter.digest, EvictionCause.UNLOADED)

    def _fill_host_memory(self) -> None:
        """As after a long time: the most popular ones are there, as many as fit."""
        self._source.is_instant = True
        free = self._workload.host_bytes
        for ref, rank in zip(self._refs, range(len(self._refs)), strict=True):
            free -= self._workload.num_pages(rank) * PAGE_BYTES
            if free < 0:
                break
            self.core.load_adapter(ref.name, ref)
            for result in self._source.take_done():
                self.core.on_loaded(result)
        self.core.take_events()
        self._source.is_instant = False


def _image(digest: str, num_pages: int) -> AdapterImage:
    image: Any = SimpleNamespace(
        digest=digest,
        num_pages=num_pages,
        nbytes=num_pages * PAGE_BYTES,
        rank=0,  # of interest to metrics only
        is_from_disk=False,
        report={},
    )
    return cast("AdapterImage", image)
