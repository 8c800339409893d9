"""The buffers that sgmv's launches share in a step, and the two ways to run them: beside a GEMM or after it.

Owns the resolved tiles, the planes of partial sums, the delta and the side stream. Knows nothing of layers'
order, of graphs or of who fills the lists.

Tried on an H200 for Llama-3-8B, and not faster: shrink, GEMM and expand on one stream by dependent launches,
in three orders, where the expand polls for what the shrink counts (steps of 64 rows up to 13 % longer, only
with mixed ranks 2 % shorter); shrinks of smaller parts, all on their way at once; whole shrinks loaded into
registers at once (up to 8 % longer); B read ahead, into the L2 or, with mixed ranks up to 4 % longer, into
registers; A of the next linear read ahead into the L2 once an expand has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kernels.peers.triton import PeerBuffers
from kernels.sgmv.handover import Handover, HandoverArguments
from kernels.sgmv.lists import ListCounts, lists_size
from kernels.sgmv.plan import SgmvPlan
from kernels.sgmv.split import Split, exchange
from kernels.sgmv.table import RANK_BLOCK, AdapterTable, FusedModule
from kernels.sgmv.triton import expand, expand_silu_mul, resolve, shrink
from kernels.silu_mul.triton import silu_mul

Y = TypeVar("Y")

_ALIGN = 16  # elements; what the widths of the usual models allow
# of a captured launch at most: each that has nothing to do takes a place from one that has
_SHRINKS_PER_SM = 4
_EXPANDS_PER_SM = 8


class SgmvWorkspace:
    """For steps of up to plan.max_tokens tokens. Everything is allocated here, but for what ranks exchange.

    A step is: copy its lists into `lists`, `resolve()`, then `beside` or `add` for each linear in turn.
    A graph that captured these serves every later step whose lists were written under the same plan.
    """

    def __init__(
        self,
        plan: SgmvPlan,
        modules: Sequence[FusedModule],
        pool: torch.Tensor,
        table: AdapterTable,
        lists: torch.Tensor | None = None,
        split: Split | None = None,
        handover: Handover | None = None,
    ) -> None:
        """`modules`: every one that will come. `lists`: int32 [lists_size(plan)], part of a larger copy.

        `split`: adapters are dealt out so; all ranks must then make the same calls. `handover`: by which they
        exchange what they must; the lists then need its number of the step.
        """
        device = pool.device
        self.plan = plan
        self.lists = (
            torch.zeros(lists_size(plan), dtype=torch.int32, device=device) if lists is None else lists
        )
        assert self.lists.shape == (lists_size(plan),)
        self._pool, self._table, self._split = pool, table, split
        self._handover = handover
        is_handed = handover is not None and handover.has_room(plan, modules)
        self._handed = handover if is_handed else None
        self._num_projections = table.ranks.shape[2]
        num_modules = table.ranks.shape[1] * self._num_projections
        self._a_tiles, self._b_tiles = (
            torch.zeros(num_modules, length + 1, rank_blocks, dtype=torch.int64, device=device)
            for length, rank_blocks in (
                (plan.max_items, plan.shrink.rank_blocks),
                (plan.max_blocks, plan.rank_blocks),
            )
        )
        shapes = {module: plane_shape(plan, module, split, is_handed) for module in modules}
        self._sums = torch.empty(max(map(math.prod, shapes.values())), dtype=torch.float32, device=device)
        self._planes = {
            module: self._sums[: math.prod(shape)].view(shape) for module, shape in shapes.items()
        }
        delta_rows = plan.max_tokens if plan.kind == "decode" else 0
        self._widest = max(modules, key=lambda module: sum(module.widths))
        self._delta = torch.empty(delta_rows * sum(self._widest.widths), dtype=pool.dtype, device=device)
        widths = [width for module in modules for width in (module.in_features, *module.widths)]
        self._align = math.gcd(_ALIGN, pool.shape[1], *widths)
        self._side = None  # interpreted kernels have no streams
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_sms = _num_sms(device)
        self._last_layer = table.ranks.shape[1] - 1

    @property
    def num_bytes(self) -> int:
        buffers = (self.lists, self._a_tiles, self._b_tiles, self._sums, self._delta)
        return sum(buffer.nbytes for buffer in buffers)

    def poison(self) -> None:
        """For tests: fill what a step must not read before it has written it."""
        self._sums.fill_(torch.nan)
        self._delta.fill_(torch.nan)

    def resolve(self) -> None:
        """Before a step's first linear, after its lists have arrived."""
        resolve(self.plan, self.lists, self._table, self._a_tiles, self._b_tiles, self._split)

    def beside(
        self,
        x: torch.Tensor,
        module: FusedModule,
        layer: int,
        gemm: Callable[[], Y],
        pdl: bool = False,
        leaves_room: bool = False,
        peers: PeerBuffers | None = None,
    ) -> tuple[Y, torch.Tensor]:
        """(gemm(), delta): the whole LoRA branch runs on the side stream, joined before this returns.

        delta [tokens, columns] is valid until the next call and only in rows that have an adapter; the
        others may hold anything. pdl: as of rotary_kv_write, of the branch's launches.
        leaves_room: the GEMM, on each multiprocessor, for a CTA of the shrink.
        peers: they get the delta instead, this rank too. Who receives it there waits for the branch by that,
        so it is joined by a later call, in the last layer by this one.
        """
        assert self.plan.kind == "decode"
        delta = self._delta[: x.shape[0] * sum(module.widths)].view(x.shape[0], -1)
        if self._side is None:
            self._run(delta, x, module, layer, None, add=False, peers=peers)
            return gemm(), delta
        main = torch.cuda.current_stream(x.device)
        self._side.wait_stream(main)
        # A GEMM that leaves room goes first, and LoRA runs beside it once all its CTAs have an SM. One of
        # cuBLAS fills an SM, so CTAs of LoRA go before or after its own; but the longest leaves some SMs
        # free, long enough for LoRA.
        y = gemm() if leaves_room or module == self._widest else None
        with torch.cuda.stream(self._side):
            is_one_chain = self._split is None or self._handed is not None
            self._run(delta, x, module, layer, None, False, pdl and is_one_chain, peers)
        y = gemm() if y is None else y
        if peers is None or layer == self._last_layer:
            main.wait_stream(self._side)
        return y, delta

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        module: FusedModule,
        layer: int,
        counts: ListCounts | None = None,
    ) -> None:
        """y += the LoRA branch, on the current stream. `counts` fit the grids to this step, not to any."""
        self._run(y, x, module, layer, counts, add=True)

    def delta(self, x: torch.Tensor, module: FusedModule, layer: int, counts: ListCounts) -> torch.Tensor:
        """The LoRA branch alone [T, columns], new; zeros in rows without an adapter. In prefill only.

        For a base product that adds to it (beta = 1): cheaper by a pass over y than `add` behind the product.
        """
        assert self.plan.kind == "prefill"
        delta = x.new_empty(x.shape[0], sum(module.widths))
        delta[: counts.plain_tokens].zero_()
        self._run(delta, x, module, layer, counts, add=False)
        return delta

    def silu_mul(
        self, gate_up: torch.Tensor, x: torch.Tensor, module: FusedModule, layer: int, counts: ListCounts
    ) -> torch.Tensor:
        """silu_mul(gate_up + the LoRA branch) [T, width], new; gate_up [T, 2 width] is not changed.

        What `add` and then silu_mul would give, in one pass over gate_up. In prefill only.
        """
        act = gate_up.new_empty(gate_up.shape[0], module.widths[0])
        plain = counts.plain_tokens
        silu_mul(gate_up[:plain], out=act[:plain])
        if counts.blocks == 0:
            return act
        planes = self._shrink(x, module, layer, counts)
        expand_silu_mul(
            act,
            gate_up,
            planes,
            self._pool,
            self.lists,
            self._b_tiles,
            self._table.scales,
            self.plan,
            module,
            self._layer_module(module, layer),
            self._align,
            counts.blocks * self.plan.gated.num_units(module.widths[:1]),
        )
        return act

    def _run(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        module: FusedModule,
        layer: int,
        counts: ListCounts | None,
        add: bool,
        pdl: bool = False,
        peers: PeerBuffers | None = None,
    ) -> None:
        plan = self.plan
        assert x.dtype == out.dtype
        blocks = plan.max_blocks if counts is None else counts.blocks
        if blocks == 0:
            return
        planes = self._shrink(x, module, layer, counts, pdl)
        expand(
            out,
            planes,
            self._pool,
            self.lists,
            self._b_tiles,
            self._table.scales,
            plan,
            module,
            self._layer_module(module, layer),
            self._align,
            self._num_ctas(blocks * plan.expand.num_units(module.widths), _EXPANDS_PER_SM),
            add,
            pdl,
            peers,
            self._handover_arguments(module),
        )

    def _shrink(
        self,
        x: torch.Tensor,
        module: FusedModule,
        layer: int,
        counts: ListCounts | None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """x -> planes, as the expand takes them."""
        plan = self.plan
        assert x.shape[0] <= plan.max_tokens
        assert x.dtype == self._pool.dtype
        items = plan.max_items if counts is None else counts.items
        if plan.kind == "decode":
            # a program for one rank block of each token; where there are more, programs walk
            items = min(items, plan.max_tokens)
        planes = self._planes[module]
        shrink(
            planes,
            x,
            self._pool,
            self.lists,
            self._a_tiles,
            plan,
            module,
            self._layer_module(module, layer),
            self._align,
            self._num_ctas(
                items * plan.shrink.num_units(len(module.widths), module.in_features), _SHRINKS_PER_SM
            ),
            pdl,
            self._handover_arguments(module),
        )
        if self._split is None or self._handed is not None:
            return planes
        if self._handover is not None:
            return self._handover.exchange(planes[:, : len(x)], module)
        return exchange(planes[:, : len(x)], self._split, self._split.by_output[module.projection])

    def _handover_arguments(self, module: FusedModule) -> HandoverArguments | None:
        return None if self._handed is None else self._handed.arguments(module)

    def _layer_module(self, module: FusedModule, layer: int) -> int:
        """The row of its first projection in the resolved tiles."""
        return layer * self._num_projections + module.projection

    def _num_ctas(self, num_units: int, per_sm: int) -> int:
        """Prefill has one for each unit."""
        return num_units if self.plan.kind == "prefill" else min(num_units, per_sm * self._num_sms)


def plane_shape(
    plan: SgmvPlan, module: FusedModule, split: Split | None, is_handed: bool = False
) -> tuple[int, int, int]:
    """Splits of K, tokens, slices x ranks; if handed over, those that are dealt to a rank of the group."""
    ranks = plan.rank_blocks * RANK_BLOCK
    if split is not None:
        each = split.most_rows(plan.max_rank)
        ranks = each if is_handed or split.by_output[module.projection] else each * split.world
    return plan.shrink.num_splits(module.in_features), plan.max_tokens, len(module.widths) * ranks


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count
