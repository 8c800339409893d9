"""What each rank has of some columns, side by side on all of them: logits of a split vocabulary."""

from kernels.gather_columns.reference import gather_columns

__all__ = ["gather_columns"]
