"""The sum over the ranks of a tensor-parallel group, with what follows it: residual add and RMSNorm."""

from kernels.all_reduce.reference import all_reduce_add_rms_norm

__all__ = ["all_reduce_add_rms_norm"]
