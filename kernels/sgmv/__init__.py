"""Segmented gather matrix-vector product: the LoRA branch of a linear, for many adapters in one batch.

`kernels.sgmv.reference` is the specification; `sgmv` exported here is the CPU op.
"""

from kernels.sgmv.cpu import AdapterViews, sgmv
from kernels.sgmv.split import Split, SplitViews, split_sgmv
from kernels.sgmv.table import RANK_BLOCK, AdapterTable, ColumnSlice, Segment, absolute_offsets

__all__ = [
    "RANK_BLOCK",
    "AdapterTable",
    "AdapterViews",
    "ColumnSlice",
    "Segment",
    "Split",
    "SplitViews",
    "absolute_offsets",
    "sgmv",
    "split_sgmv",
]
