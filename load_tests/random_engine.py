"""An engine of Llama-3-8B shape with random weights and adapters, for the benches."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.adapters.host_memory import HostArena
from engine.adapters.image import AdapterImage
from engine.adapters.layout import RowsOf, all_rows, make_layout
from engine.adapters.loader import AdapterLoader, LoadResult
from engine.adapters.manager import AdapterManager
from engine.config import EngineConfig
from engine.core import EngineCore, Geometry
from engine.errors import AdapterRefused
from engine.events import TokenEvent
from engine.heap import keep_what_is_there
from engine.loop import EngineLoop, Inbox
from engine.model.loading import LlamaWeights, allocate_weights
from engine.model.spec import ModelSpec, RopeSpec
from engine.request import AdapterRef, GenerateRequest
from engine.runner.base import Runner
from engine.sampling_params import SamplingParams
from engine.shape import NUM_PROJECTIONS, ModelShape
from engine.sharding import WHOLE, Shard, shard_shape

SHAPE = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
SPEC = ModelSpec("random", SHAPE, 1e-5, RopeSpec(500_000.0), False, 8192, (), None)
SHAPE_70B = ModelShape(80, 8192, 28672, 64, 8, 128, 128256)
SPEC_70B = replace(SPEC, shape=SHAPE_70B)
PAGE_TOKENS = 16


@dataclass(slots=True)
class HostLoader:
    """Stands for S3: makes adapters of random weights, outside of what is timed."""

    ranks: dict[str, int]
    shape: ModelShape
    rows_of: RowsOf = all_rows
    done: list[LoadResult] = field(default_factory=list)
    _images: dict[int, AdapterImage] = field(default_factory=dict)

    def submit(self, ref: AdapterRef) -> None:
        rank = self.ranks[ref.name]
        if rank not in self._images:
            self._images[rank] = random_image(rank, self.shape, self.rows_of)
        # equal bytes under another digest: pages of their own in the pool
        self.done.append(LoadResult(ref, replace(self._images[rank], digest=ref.name), None, 0.0))

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        raise error

    def forget_failure(self, ref: AdapterRef) -> None: ...

    def close(self) -> None: ...


class RandomEngine:
    """Adapters are all-linear; `ranks`: of each name. `make_loader`: what reads them, from `source`/name.

    `rows_of`: what this rank of a group holds of random ones.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        num_pages: int,
        max_model_len: int,
        ranks: Mapping[str, int],
        shape: ModelShape = SHAPE,
        make_loader: Callable[[Inbox], AdapterLoader] | None = None,
        source: str = "random:/",
        rows_of: RowsOf = all_rows,
    ) -> None:
        page_bytes = shape.page_elems(PAGE_TOKENS) * 2
        geometry = Geometry(num_pages, PAGE_TOKENS, page_bytes, max_model_len, SHAPE.vocab_size, ())
        inbox: Inbox = queue.SimpleQueue()
        self._source = source
        self._host = HostLoader(dict(ranks), shape, rows_of)
        self.loader = self._host if make_loader is None else make_loader(inbox)
        manager = AdapterManager(self.loader, config.host_cache_bytes, len(ranks) or 1)
        self.core = EngineCore(config, geometry, runner, manager, time.monotonic)
        self._loop = EngineLoop(self.core, inbox)

    def read(self, names: Iterable[str]) -> None:
        """Into host memory, random ones."""
        self.load(names)
        for result in self._host.done:
            self.core.on_loaded(result)
        self._host.done.clear()
        self.core.take_events()

    def load(self, names: Iterable[str]) -> None:
        """Have them read into host memory; returns at once."""
        for name in names:
            self.core.load_adapter(f"load {name}", self._ref(name))

    def holds(self, names: Iterable[str]) -> bool:
        """Whether all of them are in host memory."""
        return all(name in self.core.manager.names for name in names)

    def request(
        self, request_id: str, prompt: Sequence[int], num_output: int, adapter: str | None
    ) -> GenerateRequest:
        """Greedy, and it ignores EOS."""
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, seed=0)
        ref = None if adapter is None else self._ref(adapter)
        return GenerateRequest(request_id, tuple(prompt), params, ref)

    def turn(self) -> list[TokenEvent]:
        """One turn of the loop; its tokens."""
        events = self._loop.turn(0.0)
        for event in events:
            if event.error is not None:
                raise event.error
        return [event for event in events if isinstance(event, TokenEvent)]

    def _ref(self, name: str) -> AdapterRef:
        return AdapterRef(name, f"{self._source}/{name}", name)


def as_in_serving() -> None:
    """What an engine's process does once its runner is ready."""
    torch.set_num_threads(1)
    keep_what_is_there()


def random_image(rank: int, shape: ModelShape = SHAPE, rows_of: RowsOf = all_rows) -> AdapterImage:
    """Each page holds the same numbers: drawing them anew would take seconds at large ranks."""
    ranks = {(i, p): rank for i in range(shape.num_layers) for p in range(NUM_PROJECTIONS)}
    layout = make_layout(shape, ranks, shape.page_elems(PAGE_TOKENS), rows_of)
    offsets = torch.full((shape.num_layers, NUM_PROJECTIONS, 2, -(-rank // 16)), -1, dtype=torch.int64)
    for tile in layout.tiles:
        offsets[tile.layer, tile.projection, tile.side, tile.block] = tile.offset
    arena = HostArena(shape.page_elems(PAGE_TOKENS), torch.bfloat16, is_pinned=torch.cuda.is_available())
    pages = arena.take(layout.num_pages)
    numbers = torch.empty_like(pages[0]).normal_(0.0, 0.02)
    for page in pages:
        page.copy_(numbers)
    modules = (shape.num_layers, NUM_PROJECTIONS)
    return AdapterImage(
        digest="",
        pages=pages,
        tile_offsets=offsets,
        ranks=torch.full(modules, rank, dtype=torch.int32),
        scales=torch.full(modules, 0.1),
        report={},
        chat_template=None,
    )


def random_weights(shard: Shard = WHOLE, shape: ModelShape = SHAPE) -> LlamaWeights:
    weights = allocate_weights(shard_shape(shape, shard), False, torch.bfloat16, "cuda")
    for tensor in (weights.embed, weights.lm_head):
        tensor.normal_(0.0, 0.02)
    for layer in weights.layers:
        for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down):
            tensor.normal_(0.0, 0.02)
        layer.input_norm.fill_(1.0)
        layer.post_norm.fill_(1.0)
    weights.final_norm.fill_(1.0)
    return weights
