"""What LoRA adds to the linears of one Llama-3-8B layer, on one GPU. Checks first, then times.

    python -m kernels.sgmv.bench            one JSON line a case

A layer-set is qkv, o, gate_up and down of one layer in bf16, as kernels.linear computes them, each followed
by a stand-in for the op that reads its output (and, with LoRA, the delta). CUDA graphs of many layer-sets,
each with weights of its own and LoRA weights of 2.5 times the L2 at least; added = graph with LoRA - graph
without, medians of alternate replays, over the number of layer-sets. Prefill: the LoRA launches alone, in
place. Tiles lie in shuffled 2 MiB pages.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.linear.triton import linear, tile_for
from kernels.sgmv.bench_cases import CASES, Case
from kernels.sgmv.lists import ListCounts, lists_size, write_lists
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan
from kernels.sgmv.reference import sgmv
from kernels.sgmv.table import RANK_BLOCK, AdapterTable, ColumnSlice, FusedModule, Segment
from kernels.sgmv.workspace import SgmvWorkspace

MODULES = (
    FusedModule(0, 4096, (4096, 1024, 1024)),  # q, k, v
    FusedModule(3, 4096, (4096,)),  # o
    FusedModule(4, 4096, (14336, 14336)),  # gate, up
    FusedModule(6, 14336, (4096,)),  # down
)
NUM_PROJECTIONS = 7
DEVICE = "cuda"
PAGE_ELEMS = (2 << 20) // 2
READ_BYTES_PER_US = 4_531_000  # measured on an H200 by a kernel that only reads
MIN_LORA_BYTES = 160 << 20  # 2.5 times the L2 of an H200
MIN_LAYER_SETS, MAX_LAYER_SETS = 12, 64
NUM_REPLAYS = 15
MAX_ERROR = 5e-3  # relative, Frobenius: a rounding of the output to bf16 is 1.7e-3


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    us: float  # added; of prefill, alone
    base_us: float  # of a layer-set without LoRA; 0 for prefill
    floor_us: float
    error: float  # relative, against fp32
    num_layer_sets: int


def main() -> int:
    for result in measure_all():
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
    return 0


def measure_all() -> Iterator[Result]:
    """All CASES, on the current GPU. Raises AssertionError if a result is wrong."""
    torch.manual_seed(0)
    base = BaseLinears(MAX_LAYER_SETS)
    for case in CASES:
        yield measure(case, base)


class BaseLinears:
    """Weights [out, in] by layer-set and module."""

    def __init__(self, num_layer_sets: int) -> None:
        self.weights = [
            [_randn(sum(module.widths), module.in_features) * 0.02 for module in MODULES]
            for _ in range(num_layer_sets)
        ]


def measure(case: Case, base: BaseLinears) -> Result:
    """Raises AssertionError if a result is wrong."""
    bench = CaseBench(case, base)
    error = bench.check()
    if case.decode:
        without, with_lora = bench.capture(lora=False), bench.capture(lora=True)
        base_us, lora_us = _replay_us(without, with_lora)
        base_us, lora_us = base_us / bench.num_layer_sets, lora_us / bench.num_layer_sets
    else:
        (lora_us,) = _replay_us(bench.capture_prefill())
        base_us, lora_us = 0.0, lora_us / bench.num_layer_sets
    return Result(case, lora_us - base_us, base_us, bench.floor_us(), error, bench.num_layer_sets)


class CaseBench:
    def __init__(self, case: Case, base: BaseLinears) -> None:
        self.case = case
        slots = case.slots()
        self.segments = [
            Segment(slot, slots.index(slot), slots.index(slot) + slots.count(slot))
            for slot in sorted(set(slots))
        ]
        ranks = [case.ranks[slot % len(case.ranks)] for slot in range(case.num_adapters)]
        per_rank = sum(module.in_features * len(module.widths) + sum(module.widths) for module in MODULES)
        self.weight_bytes = 2 * per_rank * sum(ranks[s.slot] for s in self.segments)
        self.num_layer_sets = min(
            MAX_LAYER_SETS, max(MIN_LAYER_SETS, -(-MIN_LORA_BYTES // self.weight_bytes))
        )
        self.weights = base.weights[: self.num_layer_sets]
        self.pool, self.table = _random_adapters(ranks, self.num_layer_sets)
        self.slot_ranks = np.array(ranks)
        tokens, max_rank = case.num_tokens, max(case.ranks)
        self.use(decode_plan(tokens, max_rank) if case.decode else prefill_plan(tokens, 256, max_rank))
        self.x = [_randn(tokens, module.in_features) for module in MODULES]
        self.y = [_randn(tokens, sum(module.widths)) for module in MODULES]
        self.read = [torch.empty_like(y) for y in self.y]
        self.start, self.want = zip(*(self._expected(i) for i in range(len(MODULES))), strict=True)

    def use(self, plan: SgmvPlan) -> None:
        self.workspace = SgmvWorkspace(plan, MODULES, self.pool, self.table)
        lists = np.zeros(lists_size(plan), np.int32)
        self.counts = write_lists(plan, self.segments, self.slot_ranks, lists)
        self.workspace.lists.copy_(torch.from_numpy(lists))
        self.workspace.resolve()

    def layer_set(self, layer: int, lora: bool) -> None:
        """As in decode: LoRA beside the GEMM, and an op that reads both."""
        for i, module in enumerate(MODULES):
            x, y, weight = self.x[i], self.y[i], self.weights[layer][i]

            def gemm(x: torch.Tensor = x, y: torch.Tensor = y, weight: torch.Tensor = weight) -> torch.Tensor:
                return linear(x, weight, y)

            if lora:
                is_ours = tile_for(len(x), weight) is not None
                _, delta = self.workspace.beside(x, module, layer, gemm, leaves_room=is_ours)
                torch.add(y, delta, out=self.read[i])
            else:
                torch.neg(gemm(), out=self.read[i])

    def add(self, layer: int, counts: ListCounts | None) -> None:
        """As in prefill: in place."""
        for x, y, module in zip(self.x, self.y, MODULES, strict=True):
            self.workspace.add(y, x, module, layer, counts)

    def capture(self, lora: bool) -> torch.cuda.CUDAGraph:
        def run() -> None:
            for layer in range(self.num_layer_sets):
                self.layer_set(layer, lora)

        return _capture(run)

    def capture_prefill(self) -> torch.cuda.CUDAGraph:
        def run() -> None:
            for layer in range(self.num_layer_sets):
                self.add(layer, self.counts)

        return _capture(run)

    def check(self) -> float:
        """The largest error over the modules of the last layer, buffers filled with NaN before."""
        layer, before = self.num_layer_sets - 1, [y.clone() for y in self.y]
        self.workspace.poison()
        if self.case.decode:
            for tensor in (*self.y, *self.read):
                tensor.fill_(torch.nan)
            self.layer_set(layer, lora=True)
        else:
            self.add(layer, self.counts)
        results = self.read if self.case.decode else self.y
        errors = [_error(got.float(), want) for got, want in zip(results, self.want, strict=True)]
        effects = [_error(start, want) for start, want in zip(self.start, self.want, strict=True)]
        assert max(errors) < MAX_ERROR, f"{self.case.name}: errors {errors}"
        assert min(effects) > 20 * MAX_ERROR, "LoRA would not show"
        for y, original in zip(self.y, before, strict=True):
            y.copy_(original)
        return max(errors)

    def _expected(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Module i of the last layer without and with LoRA, in fp32."""
        x, module, layer = self.x[i], MODULES[i], self.num_layer_sets - 1
        start = x.float() @ self.weights[layer][i].float().T if self.case.decode else self.y[i].float()
        want = start.clone()
        sgmv(want, x, self.segments, self.pool, self.table, layer, _slices(module))
        return start, want

    def floor_us(self) -> float:
        """LoRA weights and x read once, y read and written once, at the measured read rate."""
        xy = sum(x.nbytes + 2 * y.nbytes for x, y in zip(self.x, self.y, strict=True))
        return (self.weight_bytes + xy) / READ_BYTES_PER_US


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _slices(module: FusedModule) -> list[ColumnSlice]:
    ends = np.cumsum(module.widths).tolist()
    return [
        ColumnSlice(module.projection + i, end - width, end)
        for i, (width, end) in enumerate(zip(module.widths, ends, strict=True))
    ]


def _random_adapters(ranks: Sequence[int], num_layers: int) -> tuple[torch.Tensor, AdapterTable]:
    """All seven projections in every layer; an adapter's tiles follow each other, its pages do not."""
    table = AdapterTable.empty(len(ranks), num_layers, NUM_PROJECTIONS, max(ranks))
    in_order = table.tile_offsets.numpy()
    end = 0
    for *tile, size in _tiles(ranks, num_layers):
        if end % PAGE_ELEMS + size > PAGE_ELEMS:
            end += PAGE_ELEMS - end % PAGE_ELEMS
        in_order[tuple(tile)] = end
        end += size
    table.ranks[:] = torch.tensor(ranks, dtype=torch.int32)[:, None, None]
    table.scales.uniform_(0.5, 2.0)
    pages, offsets = torch.randperm(-(-end // PAGE_ELEMS)), table.tile_offsets
    shuffled = pages[offsets.clamp(min=0) // PAGE_ELEMS] * PAGE_ELEMS + offsets % PAGE_ELEMS
    pool = torch.empty(len(pages), PAGE_ELEMS, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.05)
    return pool, AdapterTable(
        torch.where(offsets < 0, offsets, shuffled).to(DEVICE),
        table.ranks.to(DEVICE),
        table.scales.to(DEVICE),
    )


def _tiles(ranks: Sequence[int], num_layers: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(slot, layer, projection, A or B, rank block, elements)"""
    widths = [(module.in_features, width) for module in MODULES for width in module.widths]
    for slot, rank in enumerate(ranks):
        blocks = [min(RANK_BLOCK, rank - row) for row in range(0, rank, RANK_BLOCK)]
        for layer in range(num_layers):
            for projection, sides in enumerate(widths):
                for side, width in enumerate(sides):
                    for block, rows in enumerate(blocks):
                        yield slot, layer, projection, side, block, rows * width


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def _capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _replay_us(*graphs: torch.cuda.CUDAGraph) -> list[float]:
    """Median of each graph's replays, which alternate."""
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    times: list[list[float]] = [[] for _ in graphs]
    for replay in range(NUM_REPLAYS + 3):
        for graph, own in zip(graphs, times, strict=True):
            start, end = new_event(), new_event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 3:
                own.append(start.elapsed_time(end) * 1000)
    return [statistics.median(own) for own in times]


if __name__ == "__main__":
    raise SystemExit(main())
