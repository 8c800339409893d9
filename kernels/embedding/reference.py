"""Embedding lookup, where a token may be one that an earlier step has sampled and left on the device.

out[t] = weight[token_ids[t]], or weight[sampled[-1 - token_ids[t]]] where token_ids[t] < 0
token_ids [T] int64   sampled [S] int64   weight [V, E]   out [T, E], new
"""

from __future__ import annotations

import torch


def embed(token_ids: torch.Tensor, sampled: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    known = token_ids >= 0
    left = sampled[torch.where(known, 0, -1 - token_ids)]
    return weight[torch.where(known, token_ids, left)]
