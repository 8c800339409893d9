"""What the kernels walk in one step: row blocks of its segments. Host only, one int32 array for one copy.

    header     number of items, number of blocks, number of the step (kernels.sgmv.handover), 0
    items      SgmvPlan.max_items + 1 of (first token, tokens, slot, rank blocks)    for the shrink
    blocks     SgmvPlan.max_blocks + 1 of (first token, tokens, slot, rank blocks)   for the expand

`rank blocks` is the first one of the adapter, plus their number << 16. Both lists end in entries of zeros: a
kernel stops at the first that has no tokens, and need not know the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.sgmv.plan import SgmvPlan
from kernels.sgmv.table import RANK_BLOCK, Segment

HEADER = 4
STEP_FIELD = 2
FIELDS = 4
COUNT_SHIFT = 16


class ListCounts(NamedTuple):
    items: int
    blocks: int
    plain_tokens: int  # without an adapter; in prefill they come first


def lists_size(plan: SgmvPlan) -> int:
    return blocks_start(plan) + FIELDS * (plan.max_blocks + 1)


def blocks_start(plan: SgmvPlan) -> int:
    return HEADER + FIELDS * (plan.max_items + 1)


def write_lists(
    plan: SgmvPlan, segments: Sequence[Segment], slot_ranks: np.ndarray, out: np.ndarray, step: int = 0
) -> ListCounts:
    """Fill `out` [lists_size(plan)] int32.

    Segments without an adapter (slot -1) leave no trace; consecutive segments should differ in their slots.
    In prefill the segment without an adapter is the first. slot_ranks [slots]: the largest rank among an
    adapter's modules; smaller and absent modules are found on the device.
    """
    adapted = np.array([s for s in segments if s.slot >= 0 and s.end > s.start], np.int32).reshape(-1, 3)
    plain_tokens = sum(s.end - s.start for s in segments if s.slot < 0)
    is_first = not len(adapted) or adapted[0, 1] == plain_tokens
    assert plan.kind == "decode" or is_first, "tokens without an adapter behind others"
    # an adapter without a module has a block all the same: somebody must write its rows
    rank_blocks = np.maximum(-(-slot_ranks[adapted[:, 0]] // RANK_BLOCK), 1)
    assert (rank_blocks <= plan.rank_blocks).all(), "a rank that the planes have no room for"
    items = _rank_groups(_row_blocks(adapted, rank_blocks, plan.shrink.rows), plan.shrink.rank_blocks)
    blocks = _row_blocks(adapted, rank_blocks, plan.expand.rows)
    # the longest work first: what starts last should not end long after all others
    blocks = blocks[np.argsort(-blocks[:, 3] * (1 + blocks[:, 1]), kind="stable")]
    blocks[:, 3] <<= COUNT_SHIFT
    counts = ListCounts(len(items), len(blocks), plain_tokens)
    assert counts.items <= plan.max_items, "more than the plan allows"
    assert counts.blocks <= plan.max_blocks, "more than the plan allows"
    out[:] = 0
    out[:2] = counts.items, counts.blocks
    out[STEP_FIELD] = step
    out[HEADER : HEADER + items.size] = items.ravel()
    out[blocks_start(plan) :][: blocks.size] = blocks.ravel()
    return counts


def _row_blocks(segments: np.ndarray, rank_blocks: np.ndarray, rows: int) -> np.ndarray:
    """Segments (slot, start, end) in at most `rows` tokens: (first token, tokens, slot, rank blocks)."""
    slot, start, end = segments.T
    owner, nth = _repeat(-(-(end - start) // rows))
    first = start[owner] + nth * rows
    num_tokens = np.minimum(end[owner] - first, rows)
    row_blocks: np.ndarray = np.column_stack((first, num_tokens, slot[owner], rank_blocks[owner]))
    return row_blocks


def _rank_groups(row_blocks: np.ndarray, group: int) -> np.ndarray:
    """Row blocks cut into at most `group` rank blocks."""
    owner, nth = _repeat(-(-row_blocks[:, 3] // group))
    items: np.ndarray = row_blocks[owner]
    first = nth * group
    items[:, 3] = first | np.minimum(items[:, 3] - first, group) << COUNT_SHIFT
    return items


def _repeat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """counts [2, 3] -> ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]
