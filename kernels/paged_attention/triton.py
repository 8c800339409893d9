"""Attention over paged keys and values on the GPU: who computes what, and the launches.

A step may mix sequences of one query (decodes) and of many (prefill chunks):

  decode   FlashDecoding (Dao, Haziza, Massa, Sizov, 2023): a context is cut into splits, each an own program
           for every KV head; the last program of a sequence to arrive merges the parts, in order, so that
           the result does not depend on who was last. The query heads of a KV head are the rows of a product.
  prefill  FlashAttention-2 (Dao, 2023, arXiv:2307.08691): a tile is the query heads of one KV head for some
           consecutive tokens.

The cut is made on the device from the lengths, once a step, so that a captured graph serves any lengths.

Tried on an H200: decode blocks of 128 keys with twice the warps take a quarter less for up to 8 sequences of
100 tokens, up to 21 % more elsewhere; splits of 4 blocks or more take up to twice as long for one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.paged_attention.decode_kernel import decode_kernel
from kernels.paged_attention.plan_kernel import TILE_FIELDS, UNIT_FIELDS, plan_kernel
from kernels.paged_attention.prefill_kernel import prefill_kernel

LOG2_E = 1.4426950408889634
ENTRIES_PER_PROGRAM = 16  # of the plan kernel
DECODE_KEYS = 64  # a block of the decode loop, and the least length of a split
LONG_SPLIT = 32  # blocks: shorter splits are made only to fill the GPU, merging costs as much
MOST_SPLITS = 4  # a sequence, on average
DECODE_WARPS = 2
DECODE_STAGES = 3
PREFILL_ROWS = 128  # query heads x tokens of a prefill tile
PREFILL_KEYS = 64
PREFILL_WARPS = 8
PREFILL_STAGES = 3
PREFILL_REGISTERS = 128  # two programs to a multiprocessor: one's softmax runs beside the other's products


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Device memory for steps of at most so many sequences and tokens; one serves all layers and graphs."""

    units: torch.Tensor  # int32 [max units, UNIT_FIELDS]: splits of decodes
    tiles: torch.Tensor  # int32 [max tiles, TILE_FIELDS]: of prefills
    partial_out: torch.Tensor  # fp32 [max units, H, D], of splits whose sequence has several
    partial_stats: torch.Tensor  # fp32 [2, max units, H]: maximum and sum of the exponentials
    arrivals: torch.Tensor  # int32 [max sequences, KH], zero between launches
    num_kv_heads: int
    num_programs: int  # that run at once: what a decode wants to be cut into

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        num_programs: int | None = None,
    ) -> AttentionWorkspace:
        """`num_programs`: by default four times the multiprocessors."""
        if num_programs is None:
            num_programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        max_units = _max_units(max_num_seqs, num_programs, num_kv_heads)
        max_tiles = _max_tiles(max_num_seqs, max_num_tokens, num_heads // num_kv_heads)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            units=empty(max_units, UNIT_FIELDS.value),
            tiles=empty(max_tiles, TILE_FIELDS.value),
            partial_out=empty(max_units, num_heads, head_dim, dtype=torch.float32),
            partial_stats=empty(2, max_units, num_heads, dtype=torch.float32),
            arrivals=torch.zeros(max_num_seqs, num_kv_heads, dtype=torch.int32, device=device),
            num_kv_heads=num_kv_heads,
            num_programs=num_programs,
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.units, self.tiles, self.partial_out, self.partial_stats, self.arrivals)
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's cut into work, on the device; valid until the next plan in the same workspace."""

    workspace: AttentionWorkspace
    num_units: int  # bounds that depend on shapes alone
    num_tiles: int


def plan_attention(
    workspace: AttentionWorkspace,
    context_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    num_tokens: int,
) -> AttentionPlan:
    """One launch, no synchronisation. num_tokens = cu_query_lens[-1].

    context_lens [S], cu_query_lens [S + 1]: int32 or int64 on the device. A decode of context 0 is a padding
    row: zeros; a sequence without a query is nothing. Where num_tokens == S there must be decodes only, and
    paged_attention is one launch.
    """
    num_seqs = len(context_lens)
    assert len(cu_query_lens) == num_seqs + 1
    assert num_seqs <= num_tokens
    num_kv_heads = workspace.num_kv_heads
    group = workspace.partial_out.shape[1] // num_kv_heads
    num_units = _max_units(num_seqs, workspace.num_programs, num_kv_heads)
    num_tiles = _max_tiles(num_seqs, num_tokens, group) if num_tokens > num_seqs else 0
    assert num_units <= len(workspace.units)
    assert num_tiles <= len(workspace.tiles)
    plan_kernel[(triton.cdiv(max(num_units, num_tiles), ENTRIES_PER_PROGRAM),)](
        context_lens,
        cu_query_lens,
        workspace.units,
        workspace.tiles,
        num_seqs,
        num_units,
        num_tiles,
        max(workspace.num_programs // num_kv_heads, 1),
        MOST_SPLITS * num_seqs,
        DECODE_KEYS=DECODE_KEYS,
        LONG_SPLIT=LONG_SPLIT,
        TILE_TOKENS=PREFILL_ROWS // group,
        BLOCK_SEQS=triton.next_power_of_2(len(workspace.arrivals)),
        BLOCK_ENTRIES=ENTRIES_PER_PROGRAM,
        num_warps=4,
    )
    return AttentionPlan(workspace, num_units, num_tiles)


def paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract of kernels.paged_attention.reference; there may be padding rows as well (see the plan).

    q [T, H, D] contiguous; D even, at most 256; page_table [S, P] int32 or int64, its rows contiguous.
    fp32, fp16 or bf16; products accumulate in fp32. Returns a new tensor, or `out`.
    pdl: as of rotary_kv_write, for a step of decodes.
    """
    out = torch.empty_like(q) if out is None else out
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == q.shape
    assert page_table.stride(1) == 1
    assert kv_pages.stride(-1) == 1
    assert q.shape[1:] == plan.workspace.partial_out.shape[1:]
    assert kv_pages.shape[4] == plan.workspace.num_kv_heads
    kv = kv_pages[:, layer]  # [N, 2, page_tokens, KH, D]
    _decode(q, kv, page_table, plan, out, pdl and not plan.num_tiles)
    if plan.num_tiles:
        _prefill(q, kv, page_table, plan, out)
    return out


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    workspace = plan.workspace
    num_heads, head_dim = q.shape[1:]
    page_tokens, num_kv_heads = kv.shape[2:4]
    group = num_heads // num_kv_heads
    decode_kernel[(num_kv_heads, plan.num_units)](
        q,
        kv[:, 0],
        kv[:, 1],
        out,
        page_table,
        workspace.units,
        workspace.partial_out,
        workspace.partial_stats[0],
        workspace.partial_stats[1],
        workspace.arrivals,
        head_dim**-0.5 * LOG2_E,
        page_table.stride(0),
        kv.stride(0),
        kv.stride(2),
        kv.stride(3),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        BLOCK_ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_KEYS=DECODE_KEYS,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SPLITS=16,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
    )


def _prefill(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, plan: AttentionPlan, out: torch.Tensor
) -> None:
    num_heads, head_dim = q.shape[1:]
    page_tokens, num_kv_heads = kv.shape[2:4]
    is_fp32 = q.dtype == torch.float32
    prefill_kernel[(num_kv_heads, plan.num_tiles)](
        q,
        kv[:, 0],
        kv[:, 1],
        out,
        page_table,
        plan.workspace.tiles,
        head_dim**-0.5 * LOG2_E,
        page_table.stride(0),
        kv.stride(0),
        kv.stride(2),
        kv.stride(3),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        BLOCK_ROWS=PREFILL_ROWS,
        # exact fp32 products have no tensor cores and no registers to spare
        BLOCK_KEYS=16 if is_fp32 else PREFILL_KEYS,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        num_warps=PREFILL_WARPS,
        num_stages=1 if is_fp32 else PREFILL_STAGES,
        maxnreg=None if is_fp32 else PREFILL_REGISTERS,
    )


def _max_units(num_seqs: int, num_programs: int, num_kv_heads: int) -> int:
    # each sequence rounds up once
    return num_seqs + max(num_programs // num_kv_heads, MOST_SPLITS * num_seqs, 1)


def _max_tiles(num_seqs: int, num_tokens: int, group: int) -> int:
    return num_seqs + num_tokens // (PREFILL_ROWS // group)
