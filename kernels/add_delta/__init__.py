"""Adds what adapters' branches left to base outputs, where the sum over ranks comes next."""

from kernels.add_delta.reference import add_delta

__all__ = ["add_delta"]
