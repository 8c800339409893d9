"""The first op of a step: rows of the embedding, also for tokens that only the device knows yet."""

from kernels.embedding.reference import embed

__all__ = ["embed"]
