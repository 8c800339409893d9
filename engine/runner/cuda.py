"""The GPU backend: decode steps replay a captured graph, all others run eagerly.

A graph is captured for each bucket of rows, with adapters and without. What differs between steps (tokens,
pages, adapters) is read from StepInputs and from the adapter table at fixed addresses, so that a graph which
was captured before any adapter was loaded serves every mix of adapters later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.adapters.image import AdapterImage
from engine.config import EngineConfig
from engine.model.llama_cuda import AfterBase, BesideBase, Branch, CudaLlama, NoAdapters
from engine.model.loading import LlamaWeights
from engine.model.spec import ModelSpec
from engine.plan import StepPlan
from engine.runner.base import SampledToken
from engine.runner.step_inputs import Batch, StepInputs
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sampling_state import SamplingState
from engine.shape import NUM_PROJECTIONS
from kernels.paged_attention.triton import AttentionWorkspace, plan_attention
from kernels.sgmv import AdapterTable, absolute_offsets
from kernels.sgmv.lists import ListCounts, lists_size, write_lists
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan
from kernels.sgmv.workspace import SgmvWorkspace

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [bucket, V]


class CudaRunner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        config: EngineConfig,
        num_pages: int,
        page_tokens: int,
        max_model_len: int,
    ) -> None:
        device = weights.embed.device
        shape = spec.shape
        self._model = CudaLlama(spec, weights, max_model_len)
        self._pool = torch.zeros(
            num_pages, shape.page_elems(page_tokens), dtype=weights.embed.dtype, device=device
        )
        self._kv_pages = self._pool.view(
            -1, shape.num_layers, 2, page_tokens, shape.num_kv_heads, shape.head_dim
        )
        self._table = AdapterTable.empty(
            config.max_adapters, shape.num_layers, NUM_PROJECTIONS, config.max_rank, device
        )
        self._slot_ranks = np.zeros(config.max_adapters, np.int32)
        self._sampler = Sampler(spec.eos_token_ids)
        self._states: dict[str, SamplingState] = {}
        self._poison = config.debug
        self._buckets = [b for b in BUCKETS if b < config.max_num_seqs] + [config.max_num_seqs]
        decode_plans = {bucket: decode_plan(bucket, config.max_rank) for bucket in self._buckets}
        self._prefill_plan = prefill_plan(config.max_num_batched_tokens, config.max_num_seqs, config.max_rank)
        plans = [*decode_plans.values(), self._prefill_plan]
        self._inputs = StepInputs(
            max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_seqs=config.max_num_seqs,
            max_pages=-(-max_model_len // page_tokens),
            lists_size=max(map(lists_size, plans)),
            page_tokens=page_tokens,
            device=device,
        )
        self._attention = AttentionWorkspace.allocate(
            config.max_num_seqs, config.max_num_batched_tokens, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, device,
        )  # fmt: skip
        self._sgmv = {bucket: self._workspace(plan) for bucket, plan in decode_plans.items()}
        self._prefill_sgmv = self._workspace(self._prefill_plan)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        if self._poison:
            self._pool.fill_(torch.nan)

    def warm_up(self) -> None:
        """Compile every kernel and capture every graph: nothing of that happens while serving."""
        memory = None
        for bucket in reversed(self._buckets):  # the largest first: the others fit into its memory
            for with_adapters in (False, True):
                captured = self._capture(bucket, with_adapters, memory)
                self._graphs[bucket, with_adapters] = captured
                memory = memory or captured.graph.pool()

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        self._states[request_id] = SamplingState(params, seed, prompt_token_ids)

    def finish(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> list[SampledToken]:
        self._apply_memory(plan, images)
        if not plan.chunks:
            return []
        self._copied.synchronize()  # the host side of the inputs is free again
        num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        if num_tokens == len(plan.chunks):
            logits, batch = self._decode(plan)
        else:
            logits, batch = self._mixed(plan, num_tokens)
        return self._sample(logits, batch)

    def _decode(self, plan: StepPlan) -> tuple[torch.Tensor, Batch]:
        bucket = next(b for b in self._buckets if b >= len(plan.chunks))
        batch = self._inputs.write(plan.chunks, bucket, bucket)
        if batch.has_adapters:
            self._write_lists(self._sgmv[bucket], batch)
        self._copy()
        captured = self._graphs[bucket, batch.has_adapters]
        captured.graph.replay()
        return captured.logits[: len(batch.sampled)], batch

    def _mixed(self, plan: StepPlan, num_tokens: int) -> tuple[torch.Tensor, Batch]:
        batch = self._inputs.write(plan.chunks, num_tokens, len(plan.chunks))
        branch: Branch = NoAdapters()
        if batch.has_adapters:
            counts = self._write_lists(self._prefill_sgmv, batch)
            branch = AfterBase(self._prefill_sgmv, counts)
        self._copy()
        if batch.has_adapters:
            self._prefill_sgmv.resolve()
        hidden = self._forward(num_tokens, len(plan.chunks), branch)
        rows = self._inputs.device["rows"][: len(batch.sampled)]
        return self._model.logits(hidden[rows]), batch

    def _forward(self, num_tokens: int, num_seqs: int, branch: Branch) -> torch.Tensor:
        inputs = self._inputs.device
        attention = plan_attention(
            self._attention,
            inputs["context_lens"][:num_seqs],
            inputs["cu_query_lens"][: num_seqs + 1],
            num_tokens,
        )
        return self._model.hidden(
            inputs["token_ids"][:num_tokens],
            inputs["positions"][:num_tokens],
            inputs["kv_slots"][:num_tokens],
            inputs["slots"][:num_tokens],
            inputs["page_table"][:num_seqs],
            attention,
            self._kv_pages,
            branch,
        )

    @torch.inference_mode()
    def _capture(self, bucket: int, with_adapters: bool, memory: Any) -> _Captured:
        workspace = self._sgmv[bucket]
        branch: Branch = BesideBase(workspace) if with_adapters else NoAdapters()
        self._inputs.write((), bucket, bucket)  # padding rows only
        self._inputs.host["lists"][:] = 0
        self._copy()

        def forward() -> torch.Tensor:
            if with_adapters:
                workspace.resolve()
            return self._model.logits(self._forward(bucket, bucket, branch))

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            logits = forward()
        return _Captured(graph, logits)

    def _workspace(self, plan: SgmvPlan) -> SgmvWorkspace:
        model = self._model
        modules = (model.qkv, model.o, model.gate_up, model.down)
        lists = self._inputs.device["lists"][: lists_size(plan)]
        return SgmvWorkspace(plan, modules, self._pool, self._table, lists)

    def _write_lists(self, workspace: SgmvWorkspace, batch: Batch) -> ListCounts:
        plan = workspace.plan
        return write_lists(
            plan, batch.segments, self._slot_ranks, self._inputs.host["lists"][: lists_size(plan)]
        )

    def _copy(self) -> None:
        self._inputs.copy()
        self._copied.record()

    def _apply_memory(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        for eviction in plan.evictions:
            self._table.clear(eviction.slot)
        if self._poison and plan.freed_pages:
            self._pool[list(plan.freed_pages)] = torch.nan
        for digest, slot, page_ids in plan.loads:
            image = images[digest]
            for page, page_id in zip(image.pages, page_ids, strict=True):
                self._pool[page_id].copy_(page, non_blocking=True)
            offsets = absolute_offsets(image.tile_offsets, page_ids, self._pool.shape[1])
            self._table.put(slot, offsets, image.ranks, image.scales)
            self._slot_ranks[slot] = image.rank

    def _sample(self, logits: torch.Tensor, batch: Batch) -> list[SampledToken]:
        if not batch.sampled:
            return []
        states = [self._states[request_id] for request_id in batch.sampled]
        sampled = self._sampler.sample(logits.float(), states)
        for state, token_id in zip(states, sampled.token_ids, strict=True):
            state.append(token_id)
        return [
            SampledToken(*row) for row in zip(batch.sampled, sampled.token_ids, sampled.logprobs, strict=True)
        ]
