"""A model that is a hash, over pages that remember what was written on them; drives a Scheduler in tests.

The next token depends on the adapter and on all tokens before. A page is checked before a chunk reads it: one
of another request, of another adapter or of another version fails the test.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from engine.memory import PoolMemory
from engine.page_pool import PREFIX_OWNER
from engine.plan import PENDING, ScheduledChunk, StepPlan
from engine.request import FinishReason
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence

VOCAB = 3
PAGE_TOKENS = 4

Tokens = tuple[int, ...]
Cell = tuple[str, Tokens] | None
"""A KV cell holds (namespace, all tokens up to its own); an adapter's cell (digest, ()); None: nothing."""


def next_token(digest: str | None, tokens: Tokens) -> int:
    return zlib.crc32(repr((digest, tokens)).encode()) % VOCAB


@dataclass(slots=True)
class Client:
    """What the outside knows of a request."""

    prompt: Tokens
    max_tokens: int
    digest: str | None = None
    stop_token_ids: frozenset[int] = frozenset()
    sampled: list[int] = field(default_factory=list)  # on the device
    output: list[int] = field(default_factory=list)  # of these, what is known on the host
    end: FinishReason | None = None

    @property
    def tokens(self) -> Tokens:
        return self.prompt + tuple(self.output)

    @property
    def all_tokens(self) -> Tokens:
        return self.prompt + tuple(self.sampled)

    def undisturbed(self) -> list[int]:
        """The output of a run without any other request."""
        output: list[int] = []
        while len(output) < self.max_tokens and not (output and output[-1] in self.stop_token_ids):
            output.append(next_token(self.digest, self.prompt + tuple(output)))
        return output


class SimulatedRunner:
    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.cells: list[list[Cell]] = [[None] * PAGE_TOKENS for _ in range(num_pages)]
        self.slots: list[tuple[str, Tokens] | None] = [None] * num_slots  # digest and pages

    def execute(self, plan: StepPlan, clients: dict[str, Client]) -> None:
        """Samples into the clients. Fails when a page does not hold what its reader must find there."""
        for eviction in plan.evictions:
            assert self.slots[eviction.slot] == (eviction.digest, eviction.page_ids)
            self.slots[eviction.slot] = None
        for page_id in plan.freed_pages:
            self.cells[page_id] = [None] * PAGE_TOKENS
        for load in plan.loads:
            assert self.slots[load.slot] is None
            self.slots[load.slot] = (load.digest, load.page_ids)
            for page_id in load.page_ids:
                self._write(page_id, range(PAGE_TOKENS), [(load.digest, ())] * PAGE_TOKENS)
        for chunk in plan.chunks:  # older than the step: a GPU reads it before other chunks are written
            self._check_reads(chunk, clients[chunk.request_id], chunk.start)
        for chunk in plan.chunks:
            self._write_chunk(chunk, clients[chunk.request_id])
        for chunk in plan.chunks:  # what one chunk wrote, no other one has overwritten
            self._check_reads(chunk, clients[chunk.request_id], chunk.start + len(chunk.token_ids))
        for chunk in plan.chunks:
            if chunk.samples:
                client = clients[chunk.request_id]
                client.sampled.append(next_token(client.digest, client.all_tokens))

    def _write(self, page_id: int, offsets: range, cells: list[Cell]) -> None:
        for offset, cell in zip(offsets, cells, strict=True):
            assert self.cells[page_id][offset] is None, "something lived here"
            self.cells[page_id][offset] = cell

    def _write_chunk(self, chunk: ScheduledChunk, client: Client) -> None:
        for position, token in enumerate(chunk.token_ids, chunk.start):
            assert token in (client.all_tokens[position], PENDING)
            assert token != PENDING or position >= len(client.tokens)
            offset = position % PAGE_TOKENS
            cell = (client.digest or "", client.all_tokens[: position + 1])
            self._write(chunk.page_ids[position // PAGE_TOKENS], range(offset, offset + 1), [cell])

    def _check_reads(self, chunk: ScheduledChunk, client: Client, num_tokens: int) -> None:
        for position in range(num_tokens):
            cell = self.cells[chunk.page_ids[position // PAGE_TOKENS]][position % PAGE_TOKENS]
            assert cell == (client.digest or "", client.all_tokens[: position + 1])
        if client.digest is None:
            assert chunk.adapter_slot == -1
            return
        adapter = self.slots[chunk.adapter_slot]
        assert adapter is not None
        assert adapter[0] == client.digest
        for page_id in adapter[1]:
            assert self.cells[page_id] == [(client.digest, ())] * PAGE_TOKENS


class Simulation:
    """A scheduler with its runner and clients. Every step is checked."""

    def __init__(
        self,
        num_pages: int,
        num_slots: int = 2,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 1000,
        prefix_cache: bool = True,
        max_overtakes: int = 32,
        max_overtaken_s: float = 1e9,
        memory: PoolMemory | None = None,
        max_in_flight: int = 1,
        page_copy_s: float = 0.0,
        fair: bool = False,
        spare_pages: int = 0,
        prefetch: bool = True,
    ) -> None:
        self.memory = memory or PoolMemory(num_pages, PAGE_TOKENS, num_slots)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            prefix_cache=prefix_cache,
            max_overtakes=max_overtakes,
            max_overtaken_s=max_overtaken_s,
            page_copy_s=page_copy_s,
            fair=fair,
            spare_pages=spare_pages,
            prefetch=prefetch,
        )
        self.scheduler = Scheduler(config, self.memory)
        self.runner = SimulatedRunner(num_pages, num_slots)
        self.max_in_flight = max_in_flight
        self.in_flight: list[StepPlan] = []
        self.clients: dict[str, Client] = {}
        self.now = 0.0

    def submit(
        self,
        request_id: str,
        prompt: Tokens | int,
        max_tokens: int = 1,
        digest: str | None = None,
        adapter_pages: int = 1,
        stop_token_ids: frozenset[int] = frozenset(),
        arrival: int | None = None,
    ) -> None:
        """`prompt`: tokens, or how many; those of different requests differ from the first one on."""
        if isinstance(prompt, int):
            prompt = tuple(1000 * (len(self.clients) + 1) + i for i in range(prompt))
        self.scheduler.add(
            Sequence(
                request_id=request_id,
                arrival=len(self.clients) if arrival is None else arrival,
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                digest=digest,
                num_adapter_pages=adapter_pages if digest else 0,
            )
        )
        self.clients[request_id] = Client(prompt, max_tokens, digest, stop_token_ids)

    def step(
        self,
        loadable: Container[str] | None = None,
        during: Callable[[], None] = lambda: None,
    ) -> StepPlan:
        """`during`: what happens while the step runs."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now, loadable)
        self.scheduler.check_invariants()
        assert len({c.request_id for c in plan.chunks}) == len(plan.chunks)
        assert all(chunk.token_ids for chunk in plan.chunks)
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        self.runner.execute(plan, self.clients)
        self.in_flight.append(plan)
        during()
        while len(self.in_flight) >= (self.max_in_flight if plan.chunks else 1):
            self._collect()
        self.scheduler.check_invariants()
        return plan

    def _collect(self) -> None:
        for chunk in self.in_flight.pop(0).chunks:
            if chunk.samples and chunk.request_id in self.scheduler.sequences:
                self._on_token(chunk.request_id)

    def steps(self, num_steps: int) -> list[StepPlan]:
        return [self.step() for _ in range(num_steps)]

    def run_to_end(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"requests never end: {[r for r, c in self.clients.items() if c.end is None]}")

    def abort(self, request_id: str) -> None:
        self.scheduler.finish(request_id, self.now)
        self._end(request_id, "abort")

    def running(self) -> set[str]:
        return {s.request_id for s in self.scheduler.running}

    def resident(self) -> set[str]:
        return {a.digest for a in self.memory.residency}

    def check_ends(self) -> None:
        """Every request has ended, with the tokens of an undisturbed run as far as it came."""
        for request_id, client in self.clients.items():
            assert client.end is not None, request_id
            expected = client.undisturbed()
            if client.end == "abort":
                expected = expected[: len(client.output)]
            assert client.output == expected, request_id

    def check_nothing_leaked(self) -> None:
        """What is left without requests is idle: unloading adapters and emptying the cache frees the pool."""
        assert not self.scheduler.has_work
        for digest in self.resident():
            self.scheduler.retire(digest)
        while (leaf := self.memory.prefix.oldest_evictable()) is not None:
            self.memory.pool.free(PREFIX_OWNER, [self.memory.prefix.evict(leaf)])
        self.scheduler.check_invariants()
        assert self.memory.pool.num_free == self.memory.pool.num_pages

    def _on_token(self, request_id: str) -> None:
        client = self.clients[request_id]
        token_id = client.sampled[len(client.output)]
        client.output.append(token_id)
        reason = self.scheduler.on_token(self.scheduler.sequences[request_id], token_id)
        if reason:
            self.scheduler.finish(request_id, self.now)
            self._end(request_id, reason)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        assert self.clients[request_id].end is None, "it ended twice"
        self.clients[request_id].end = reason
