"""Rotary position embedding of queries and keys, and the write of keys and values into their pages."""

from kernels.rotary.reference import rotary_kv_write

__all__ = ["rotary_kv_write"]
