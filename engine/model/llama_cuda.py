"""The Llama forward pass on a GPU: Triton ops over the paged pool, base products by cuBLAS.

Owns the base weights. Captured in a CUDA graph it reads a step's tensors from addresses that never change.
What it computes is specified by `engine.model.llama`.

Shapes: T tokens, E hidden size, H query heads, D head size, X qkv columns, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from engine.model.loading import LlamaWeights
from engine.model.rope import rotary_table
from engine.model.spec import ModelSpec
from engine.shape import PROJECTIONS, ModelShape
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.add_delta.triton import add_delta
from kernels.all_reduce.triton import all_reduce_add_rms_norm
from kernels.embedding.triton import embed
from kernels.gather_columns.triton import gather_columns
from kernels.linear.tiles import has_tile
from kernels.linear.triton import linear, linear_to_peers, tile_for
from kernels.paged_attention.rotary_attention import rotary_attention
from kernels.paged_attention.triton import AttentionPlan
from kernels.peers.triton import PeerBuffers, PeerSets
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from kernels.sgmv.lists import ListCounts
from kernels.sgmv.table import FusedModule
from kernels.sgmv.workspace import SgmvWorkspace
from kernels.silu_mul.triton import silu_mul


class Linear(NamedTuple):
    y: torch.Tensor
    delta: torch.Tensor | None = None  # still to be added; nothing is in it where peers get it apart
    is_sent: bool = False  # y, to all ranks, which want to sum it; nothing is in the tensor then


class Base(NamedTuple):
    """A product of the base model, and what of an adapter belongs to it."""

    weight: torch.Tensor
    module: FusedModule
    layer: int


class SumPeers(NamedTuple):
    """Of one set, to sum row-parallel products over the ranks."""

    parts: PeerBuffers
    deltas: PeerBuffers | None  # what adapters add is sent apart, to here; None: with the parts


class Branch(Protocol):
    """How a step's adapters take part in it."""

    pdl: bool
    """Kernels may be launched before the one before has ended: in graphs, where it pays (kernels.rotary)."""

    def linear(self, x: torch.Tensor, base: Base, peers: SumPeers | None = None) -> Linear:
        """`peers`: where y is to be summed over the ranks, and may be sent at once."""

    def gated(self, x: torch.Tensor, base: Base, slots: torch.Tensor) -> torch.Tensor:
        """silu_mul of gate_up, what adapters add to it included."""


class NoAdapters:
    def __init__(self, pdl: bool) -> None:
        self.pdl = pdl

    def linear(self, x: torch.Tensor, base: Base, peers: SumPeers | None = None) -> Linear:
        y, is_sent = linear_to_peers(x, base.weight, peers and peers.parts, pdl=self.pdl)
        return Linear(y, is_sent=is_sent)

    def gated(self, x: torch.Tensor, base: Base, slots: torch.Tensor) -> torch.Tensor:
        return silu_mul(linear(x, base.weight, pdl=self.pdl), pdl=self.pdl)


class BesideBase:
    """Few tokens: each adapter branch runs beside its base product, on a stream of its own."""

    def __init__(self, workspace: SgmvWorkspace, pdl: bool) -> None:
        self.pdl = pdl
        self._workspace = workspace

    def linear(self, x: torch.Tensor, base: Base, peers: SumPeers | None = None) -> Linear:
        weight, module, layer = base
        is_ours = tile_for(len(x), weight) is not None
        if peers is not None and peers.deltas is None:
            peers = None  # y goes with what is added to it
        (y, is_sent), delta = self._workspace.beside(
            x,
            module,
            layer,
            gemm=lambda: linear_to_peers(x, weight, peers and peers.parts, pdl=self.pdl, leaves_room=True),
            pdl=self.pdl,
            leaves_room=is_ours,
            peers=peers and peers.deltas,
        )
        return Linear(y, delta, is_sent)

    def gated(self, x: torch.Tensor, base: Base, slots: torch.Tensor) -> torch.Tensor:
        y, delta, _ = self.linear(x, base)
        return silu_mul(y, delta, slots, pdl=self.pdl)


class OntoBase:
    """Many tokens in a graph, which serves any counts: the adapters' branch adds to the base product."""

    pdl = False

    def __init__(self, workspace: SgmvWorkspace) -> None:
        self._workspace = workspace

    def linear(self, x: torch.Tensor, base: Base, peers: SumPeers | None = None) -> Linear:
        y = linear(x, base.weight)
        self._workspace.add(y, x, base.module, base.layer)
        return Linear(y)

    def gated(self, x: torch.Tensor, base: Base, slots: torch.Tensor) -> torch.Tensor:
        return silu_mul(self.linear(x, base).y)


class AfterBase:
    """Many tokens: the adapters' branch first, and the base product adds to it."""

    pdl = False

    def __init__(self, workspace: SgmvWorkspace, counts: ListCounts) -> None:
        self._workspace = workspace
        self._counts = counts

    def linear(self, x: torch.Tensor, base: Base, peers: SumPeers | None = None) -> Linear:
        y = self._workspace.delta(x, base.module, base.layer, self._counts)
        return Linear(y.addmm_(x, base.weight.T))

    def gated(self, x: torch.Tensor, base: Base, slots: torch.Tensor) -> torch.Tensor:
        return self._workspace.silu_mul(linear(x, base.weight), x, base.module, base.layer, self._counts)


class CudaLlama:
    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        max_model_len: int,
        comm: Comm = ALONE,
        peers: PeerSets | None = None,
        delta_peers: PeerSets | None = None,
        logit_peers: PeerSets | None = None,
    ) -> None:
        """`peers`, `logit_peers`: by which ranks send their parts of sums and of logits; None: by `comm`.

        delta_peers: by which they send what adapters add to few rows.
        """
        self._comm = comm
        self._peers = peers
        self._delta_peers = delta_peers
        self._logit_peers = logit_peers
        self._num_gathered = 0  # by these
        self.spec = spec
        self.weights = weights
        device = weights.embed.device
        cos_PD, sin_PD = rotary_table(spec.rope, spec.shape.head_dim, max_model_len)
        self._cos_PD, self._sin_PD = cos_PD.to(device), sin_PD.to(device)
        self.modules = fused_modules(spec.shape)
        self.qkv, self.o, self.gate_up, self.down = self.modules

    def hidden(
        self,
        token_ids: torch.Tensor,
        sampled: torch.Tensor,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        attention: AttentionPlan,
        kv_pages: torch.Tensor,
        branch: Branch,
        before_layer: Callable[[int], None],
    ) -> torch.Tensor:
        """Normed hidden states [T, E]; writes keys and values.

        `token_ids` [T] may name places in `sampled`, as of kernels.embedding; `slots` [T] int32: each row's
        adapter slot.
        """
        eps, layers, pdl = self.spec.rms_norm_eps, self.weights.layers, branch.pdl
        peer_sets = self._peer_sets(len(token_ids))
        cos_TD, sin_TD = self._cos_PD[positions], self._sin_PD[positions]
        residual_TE = embed(token_ids, sampled, self.weights.embed)
        h_TE = rms_norm(residual_TE, layers[0].input_norm, eps)
        for i, layer in enumerate(layers):
            before_layer(i)
            qkv_TX, delta, _ = branch.linear(h_TE, Base(layer.qkv, self.qkv, i))
            rows = slots if delta is not None else None
            o_THD = rotary_attention(
                qkv_TX, cos_TD, sin_TD, kv_pages, i, kv_slots, page_table, attention, delta, rows, pdl
            )
            partial = branch.linear(o_THD.flatten(1), Base(layer.o, self.o, i), peer_sets[0])
            h_TE = self._add_norm(residual_TE, partial, layer.post_norm, slots, pdl, peer_sets[0])
            act_TI = branch.gated(h_TE, Base(layer.gate_up, self.gate_up, i), slots)
            partial = branch.linear(act_TI, Base(layer.down, self.down, i), peer_sets[1])
            is_last = i + 1 == len(layers)
            norm = self.weights.final_norm if is_last else layers[i + 1].input_norm
            h_TE = self._add_norm(residual_TE, partial, norm, slots, pdl, peer_sets[1])
        return h_TE

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary], in the model's dtype; `out` [rows, this rank's part] is used."""
        sets = self._logit_peers
        if sets is None or len(hidden) > sets[0].max_rows:
            return self._comm.gather_columns(linear(hidden, self.weights.lm_head, out))
        peers = sets[self._num_gathered % len(sets)]
        self._num_gathered += 1
        own, is_sent = linear_to_peers(hidden, self.weights.lm_head, peers, out)
        return gather_columns(own, peers, is_sent)

    def _peer_sets(self, num_rows: int) -> tuple[SumPeers, SumPeers] | tuple[None, None]:
        """For sums of so many rows, in turn; None: they go another way."""
        if self._peers is None or num_rows > self._peers[0].max_rows:
            return None, None
        # only where products may send y too; asked so that all ranks answer alike
        deltas = self._delta_peers if has_tile(num_rows) else None
        first, second = (None, None) if deltas is None else deltas
        return SumPeers(self._peers[0], first), SumPeers(self._peers[1], second)

    def _add_norm(
        self,
        residual: torch.Tensor,
        partial: Linear,
        norm: torch.Tensor,
        slots: torch.Tensor,
        pdl: bool,
        peers: SumPeers | None,
    ) -> torch.Tensor:
        """Over the ranks the sum of `partial`, what adapters add included."""
        (y, delta, is_sent), eps = partial, self.spec.rms_norm_eps
        rows = slots if delta is not None else None
        if peers is not None:
            return all_reduce_add_rms_norm(
                residual, y, norm, eps, peers.parts, delta, rows, pdl, is_sent, peers.deltas
            )
        if self._comm is not ALONE:
            if delta is not None:
                add_delta(y, delta, slots)
            y, delta, rows = self._comm.all_reduce(y), None, None
        return add_rms_norm(residual, y, norm, eps, delta, rows, pdl=pdl)


def fused_modules(shape: ModelShape) -> tuple[FusedModule, FusedModule, FusedModule, FusedModule]:
    """qkv, o, gate_up, down."""

    def module(*names: str) -> FusedModule:
        indices = [PROJECTIONS.index(name) for name in names]
        widths = tuple(shape.widths(i).out_features for i in indices)
        return FusedModule(indices[0], shape.widths(indices[0]).in_features, widths)

    return (
        module("q_proj", "k_proj", "v_proj"),
        module("o_proj"),
        module("gate_proj", "up_proj"),
        module("down_proj"),
    )
