"""Causal attention of a step's tokens over keys and values in pool pages.

`kernels.paged_attention.reference` is the specification; what is exported here is the CPU op.
"""

from kernels.paged_attention.cpu import AttentionPlan, paged_attention, plan_attention

__all__ = ["AttentionPlan", "paged_attention", "plan_attention"]
