"""Angles of the rotary embedding by position, with the scaling rules of Llama checkpoints."""

from __future__ import annotations

import math

import torch

from engine.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """[D / 2] fp32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.type:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _stretch_low_frequencies(frequencies, rope)


def rotary_table(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [num_positions, D] fp32, the second half of a row equal to the first."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _stretch_low_frequencies(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Llama 3.1: waves longer than the trained context are slowed by `factor`, short ones are kept."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths  # in the trained context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor
