"""The gated activation of a Llama MLP."""

from kernels.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
