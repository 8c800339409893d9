"""Sizes of a Llama-family model and of its seven adaptable projections. Plain ints, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Index in this tuple = projection index in every table of tile offsets, ranks and scales."""

BLOCKS = ("self_attn",) * 4 + ("mlp",) * 3
"""In which part of a layer each of them is."""

NUM_PROJECTIONS = len(PROJECTIONS)
RANK_BLOCK = 16
"""An adapter's rank is cut into blocks of at most this many rows: one tile, one compile-time kernel shape."""


class Widths(NamedTuple):
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def widths(self, projection: int) -> Widths:
        """(in, out) features of PROJECTIONS[projection]."""
        hidden, inter = self.hidden_size, self.intermediate_size
        return (
            Widths(hidden, self.q_size),
            Widths(hidden, self.kv_size),
            Widths(hidden, self.kv_size),
            Widths(self.q_size, hidden),
            Widths(hidden, inter),
            Widths(hidden, inter),
            Widths(inter, hidden),
        )[projection]

    @property
    def max_tile_elems(self) -> int:
        """Elements of the largest adapter tile: one rank block of the widest projection."""
        return RANK_BLOCK * max(max(self.widths(p)) for p in range(NUM_PROJECTIONS))

    def page_elems(self, page_tokens: int) -> int:
        """Elements of one pool page = layers x (K and V) x tokens x KV heads x head size."""
        return self.num_layers * 2 * page_tokens * self.kv_size

    def fit_page_tokens(self, page_tokens: int) -> int:
        """`page_tokens`, doubled until the largest adapter tile fits a page."""
        while self.page_elems(page_tokens) < self.max_tile_elems:
            page_tokens *= 2
        return page_tokens
