"""The base model's linears."""

from kernels.linear.cpu import linear, pack_weight

__all__ = ["linear", "pack_weight"]
