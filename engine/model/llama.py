"""The Llama forward pass over paged keys and values, with LoRA adapters mixed in one batch.

Owns the base weights. Knows nothing of requests, of who owns a page or of how an adapter got its slot.

Shapes: T tokens, S sequences, N rows of logits, E hidden size, H query heads, KH KV heads, D head size,
I intermediate size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from engine.model.loading import LlamaWeights
from engine.model.rope import rotary_table
from engine.model.spec import ModelSpec
from engine.runner.batch import ForwardBatch
from engine.shape import PROJECTIONS, ModelShape
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.linear import linear
from kernels.paged_attention import paged_attention, plan_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_kv_write
from kernels.sgmv import AdapterViews, ColumnSlice, SplitViews, sgmv, split_sgmv
from kernels.silu_mul import silu_mul

Adapters = AdapterViews | SplitViews


class LlamaModel:
    """Raises nothing of its own: the caller has checked token ids, positions and pages."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        max_model_len: int | None = None,
        comm: Comm = ALONE,
    ) -> None:
        """`spec.shape` and `weights`: what this rank holds. `max_model_len` bounds the positions."""
        self.spec = spec
        self.shape = spec.shape
        self.weights = weights
        self._comm = comm
        num_positions = max_model_len or spec.max_position_embeddings
        cos_PD, sin_PD = rotary_table(spec.rope, spec.shape.head_dim, num_positions)
        self._cos_PD = cos_PD.to(weights.embed.device)
        self._sin_PD = sin_PD.to(weights.embed.device)
        self._qkv = _column_slices(self.shape, "q_proj", "k_proj", "v_proj")
        self._o = _column_slices(self.shape, "o_proj")
        self._gate_up = _column_slices(self.shape, "gate_proj", "up_proj")
        self._down = _column_slices(self.shape, "down_proj")

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: torch.Tensor, adapters: Adapters | None = None
    ) -> torch.Tensor:
        """Writes the tokens' keys and values into `pool` [num_pages, page_elems]; returns logits [N, V] fp32.

        `adapters` may be None if no segment has one.
        """
        kv_pages = self.kv_pages(pool)
        cos_TD, sin_TD = self._cos_PD[batch.positions], self._sin_PD[batch.positions]
        plan = plan_attention(kv_pages, batch.page_table, batch.context_lens, batch.cu_query_lens)
        lora = _LoraBranch(batch, adapters)
        x_TE = self.weights.embed[batch.token_ids]
        for i, layer in enumerate(self.weights.layers):
            h_TE = rms_norm(x_TE, layer.input_norm, self.spec.rms_norm_eps)
            qkv_TX = lora.linear(h_TE, layer.qkv, i, self._qkv)
            q_THD = rotary_kv_write(qkv_TX, cos_TD, sin_TD, kv_pages, i, batch.kv_slots)
            o_THD = paged_attention(q_THD, kv_pages, i, plan)
            x_TE = x_TE + self._comm.all_reduce(lora.linear(o_THD.flatten(1), layer.o, i, self._o))
            h_TE = rms_norm(x_TE, layer.post_norm, self.spec.rms_norm_eps)
            act_TI = silu_mul(lora.linear(h_TE, layer.gate_up, i, self._gate_up))
            x_TE = x_TE + self._comm.all_reduce(lora.linear(act_TI, layer.down, i, self._down))
        x_NE = rms_norm(x_TE[batch.logits_indices], self.weights.final_norm, self.spec.rms_norm_eps)
        return self._comm.gather_columns(linear(x_NE, self.weights.lm_head)).float()

    def kv_pages(self, pool: torch.Tensor) -> torch.Tensor:
        """The pool as [num_pages, num_layers, 2, page_tokens, KH, D]."""
        shape = self.shape
        page_tokens = pool.shape[1] // shape.page_elems(1)
        return pool.view(-1, shape.num_layers, 2, page_tokens, shape.num_kv_heads, shape.head_dim)


class _LoraBranch:
    """The linears of one step: base product plus each segment's adapter."""

    def __init__(self, batch: ForwardBatch, adapters: Adapters | None) -> None:
        self._segments = tuple(segment for segment in batch.segments if segment.slot >= 0)
        self._adapters = adapters
        assert adapters is not None or not self._segments

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, slices: Sequence[ColumnSlice]
    ) -> torch.Tensor:
        y = linear(x, weight)
        if not self._segments:
            return y
        if isinstance(self._adapters, SplitViews):
            split_sgmv(y, x, self._segments, self._adapters, layer, slices)
        elif self._adapters is not None:
            sgmv(y, x, self._segments, self._adapters, layer, slices)
        return y


def _column_slices(shape: ModelShape, *names: str) -> tuple[ColumnSlice, ...]:
    """Projections side by side in one fused output."""
    projections = [PROJECTIONS.index(name) for name in names]
    ends = list(itertools.accumulate(shape.widths(p).out_features for p in projections))
    starts = [0, *ends[:-1]]
    return tuple(ColumnSlice(p, start, end) for p, start, end in zip(projections, starts, ends, strict=True))
