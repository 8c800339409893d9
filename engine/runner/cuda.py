"""The GPU backend: steps of few tokens replay a captured graph, larger ones run eagerly.

Nothing in `submit` waits for the GPU: sampled tokens stay there, and the next step may be submitted before
`collect` has them.

A graph is captured for each bucket of tokens, with adapters and without, for decodes alone and with prefill
chunks among them. What differs between steps (tokens, pages, adapters) is read from StepInputs and from the
adapter table at fixed addresses, so that a graph which was captured before any adapter was loaded serves
every mix of adapters later. Steps that run eagerly take about as long as their launches, or longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.adapters.image import AdapterImage
from engine.config import EngineConfig
from engine.model.llama_cuda import AfterBase, BesideBase, Branch, CudaLlama, NoAdapters, OntoBase
from engine.model.loading import LlamaWeights
from engine.model.spec import ModelSpec
from engine.plan import ScheduledChunk, StepPlan
from engine.runner.adapter_copies import AdapterCopies, measure_copies
from engine.runner.base import SampledToken
from engine.runner.buckets import Buckets
from engine.runner.cuda_sampler import FIELDS, CudaSampler
from engine.runner.step_inputs import Batch, StepInputs
from engine.runner.warm_up import mixed_steps
from engine.sampling_params import SamplingParams
from engine.shape import NUM_PROJECTIONS
from engine.stopwatch import Stopwatch
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.gpu import is_at_least_hopper
from kernels.linear.tiles import MOST_TILE_ROWS
from kernels.paged_attention.triton import AttentionWorkspace, plan_attention
from kernels.sgmv import AdapterTable, Split
from kernels.sgmv.exchange import most_columns
from kernels.sgmv.handover import WORD, Handover, num_words
from kernels.sgmv.lists import ListCounts, lists_size, write_lists
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan
from kernels.sgmv.workspace import SgmvWorkspace


class _Kind(NamedTuple):
    """Of a graph. Decodes are as many sequences as tokens; with a prefill chunk there are fewer."""

    bucket: int  # tokens
    has_prefill: bool
    has_adapters: bool


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [bucket, E]


class CudaRunner:
    max_in_flight = 2
    copy_bytes_per_s: float

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        config: EngineConfig,
        num_pages: int,
        page_tokens: int,
        max_model_len: int,
        comm: Comm = ALONE,
        split: Split | None = None,
    ) -> None:
        """`spec.shape` and `weights`: what this rank holds. `split`: adapters are dealt out to ranks so."""
        device = weights.embed.device
        shape = spec.shape
        self._pool = torch.zeros(
            num_pages, shape.page_elems(page_tokens), dtype=weights.embed.dtype, device=device
        )
        self._kv_pages = self._pool.view(
            -1, shape.num_layers, 2, page_tokens, shape.num_kv_heads, shape.head_dim
        )
        self._table = AdapterTable.empty(
            config.max_adapters, shape.num_layers, NUM_PROJECTIONS, config.max_rank, device
        )
        self._copies = AdapterCopies(self._pool, self._table)
        self._sampler = CudaSampler(
            config.max_num_seqs, shape.vocab_size, spec.eos_token_ids, self.max_in_flight, device
        )
        self._config = config
        self._split = split
        self._max_model_len = max_model_len
        self._page_tokens = page_tokens
        self._poison = config.debug
        max_tokens, max_seqs, max_rank = config.max_num_batched_tokens, config.max_num_seqs, config.max_rank
        buckets = Buckets.plan(max_seqs, max_tokens)
        self._model, fused_rows = _build_model(
            spec, weights, config, max_model_len, comm, buckets.most_tokens
        )
        self._buckets = buckets = buckets.limit_prefill(fused_rows)
        most = buckets.most_decodes
        self._most_ahead = min(most, fused_rows) if is_at_least_hopper(device) else 0
        graph_plans = {bucket: decode_plan(bucket, max_rank) for bucket in buckets.decode}
        graph_plans |= {bucket: prefill_plan(bucket, max_seqs, max_rank) for bucket in buckets.prefill}
        eager_plan = prefill_plan(max_tokens, max_seqs, max_rank)
        self._graph_inputs = self._step_inputs(buckets.most_tokens, *graph_plans.values())
        self._eager_inputs = self._step_inputs(max_tokens, eager_plan)
        self._attention = AttentionWorkspace.allocate(
            most, max_tokens, shape.num_heads, shape.num_kv_heads, shape.head_dim, device
        )
        self._handover = None
        if split is not None:
            self._handover = self._share(comm, split, graph_plans[most], buckets.most_tokens)
        self._sgmv = {b: self._workspace(plan, self._graph_inputs) for b, plan in graph_plans.items()}
        self._eager_sgmv = self._workspace(eager_plan, self._eager_inputs)
        self._logits = torch.empty(
            config.max_num_seqs, len(weights.lm_head), dtype=weights.embed.dtype, device=device
        )
        # cuBLAS takes ten milliseconds for a number of rows that it has not seen
        self._logit_rows = [b for b in buckets.decode if b < max_seqs] + [max_seqs]
        self._last_step = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._can_capture = comm.can_be_captured
        self._graphs: dict[_Kind, _Captured] = {}

    def warm_up(self, watch: Stopwatch | None = None) -> None:
        """Nothing is compiled or captured while serving, and what steps need has been allocated."""
        watch = watch or Stopwatch()
        self.copy_bytes_per_s = measure_copies(self._pool)
        with watch.part("compile"):
            self._take_steps()
            for num_rows in self._logit_rows:
                hidden = self._logits.new_zeros(num_rows, self._model.spec.shape.hidden_size)
                self._model.logits(hidden, self._logits[:num_rows])
        with watch.part("capture"):
            self._capture_all()
        self._take_steps()  # capturing made PyTorch give back what steps had left to later ones
        if self._poison:
            self._pool.fill_(torch.nan)

    def _take_steps(self) -> None:
        """Of every kind, the largest ones too."""
        table, ranks = self._table, self._copies.ranks
        table.put(
            0,
            torch.zeros_like(table.tile_offsets[0]),
            torch.full_like(table.ranks[0], self._config.max_rank),
            torch.zeros_like(table.scales[0]),
        )
        ranks[0] = self._config.max_rank
        config = self._config
        for plan, params in mixed_steps(
            config.max_num_batched_tokens, config.max_num_seqs, self._max_model_len, self._page_tokens
        ):
            self._warm_up_step(plan, params)
        table.clear(0)
        ranks[0] = 0

    def _capture_all(self) -> None:
        if not self._can_capture:
            return
        memory = None
        for bucket in reversed(self._buckets.all):  # the largest first: the others fit into its memory
            for has_prefill, has_adapters in itertools.product((False, True), repeat=2):
                is_taken = has_prefill or bucket <= self._buckets.most_decodes
                if is_taken and self._num_seqs(bucket, has_prefill) > 0:
                    kind = _Kind(bucket, has_prefill, has_adapters)
                    captured = self._capture(kind, memory)
                    self._graphs[kind] = captured
                    memory = memory or captured.graph.pool()

    def _num_seqs(self, bucket: int, has_prefill: bool) -> int:
        """That its graphs have room for."""
        return min(bucket - has_prefill, self._buckets.most_decodes)

    def _warm_up_step(self, plan: StepPlan, params: SamplingParams) -> None:
        for chunk in plan.chunks:
            self.start(chunk.request_id, params, 0, chunk.token_ids)
        self.submit(plan, {})
        self.collect()
        for chunk in plan.chunks:
            self.finish(chunk.request_id)

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        self._sampler.start(request_id, params, seed, prompt_token_ids)

    def finish(self, request_id: str) -> None:
        self._sampler.finish(request_id)

    @torch.inference_mode()
    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        for request_id in plan.preempted:
            self._sampler.release(request_id)
        self._apply_memory(plan, images)
        self._compute(plan)
        self._last_step.record()

    def _compute(self, plan: StepPlan) -> None:
        num_tokens = plan.num_tokens
        if not plan.chunks:
            self._sampler.skip()
        elif num_tokens <= self._buckets.most_tokens and self._graphs:
            self._replay(plan.chunks, num_tokens)
        else:
            self._run_eagerly(plan.chunks, num_tokens)

    def collect(self) -> list[SampledToken]:
        return self._sampler.collect()

    def close(self) -> None:
        """NCCL puts off its own end for as long as there are graphs that have captured its launches."""
        self._graphs.clear()

    def _replay(self, chunks: Sequence[ScheduledChunk], num_tokens: int) -> None:
        inputs = self._graph_inputs
        bucket = self._buckets.holding(num_tokens)
        has_prefill = num_tokens > len(chunks)
        num_seqs = self._num_seqs(bucket, has_prefill)
        batch = inputs.write(chunks, bucket, num_seqs, self._sampler.slot)
        if batch.has_adapters:
            self._write_lists(self._sgmv[bucket], batch, inputs)
        self._sampler.write(batch.sampled, inputs.host)
        inputs.copy(num_seqs)
        self._copies.wait(segment.slot for segment in batch.segments)
        captured = self._graphs[_Kind(bucket, has_prefill, batch.has_adapters)]
        captured.graph.replay()
        self._sample(captured.hidden, batch, inputs)

    def _run_eagerly(self, chunks: Sequence[ScheduledChunk], num_tokens: int) -> None:
        inputs = self._eager_inputs
        batch = inputs.write(chunks, num_tokens, len(chunks), self._sampler.slot)
        branch: Branch = NoAdapters(pdl=False)
        if batch.has_adapters:
            counts = self._write_lists(self._eager_sgmv, batch, inputs)
            branch = AfterBase(self._eager_sgmv, counts)
        self._sampler.write(batch.sampled, inputs.host)
        inputs.copy(len(chunks))
        if batch.has_adapters:
            self._eager_sgmv.resolve()
        slots = [segment.slot for segment in batch.segments]
        hidden = self._forward(
            inputs, num_tokens, len(chunks), branch, lambda layer: self._copies.wait_for_layer(layer, slots)
        )
        self._sample(hidden, batch, inputs)

    def _sample(self, hidden: torch.Tensor, batch: Batch, inputs: StepInputs) -> None:
        num = len(batch.sampled)
        num_rows = next(rows for rows in self._logit_rows if rows >= num) if num else 0
        rows = hidden[inputs.device["rows"][:num_rows]]
        logits = self._model.logits(rows, self._logits[:num_rows])
        self._sampler.sample(batch.sampled, logits[:num], inputs.host, inputs.device)

    def _forward(
        self,
        step_inputs: StepInputs,
        num_tokens: int,
        num_seqs: int,
        branch: Branch,
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        inputs = step_inputs.device
        attention = plan_attention(
            self._attention,
            inputs["context_lens"][:num_seqs],
            inputs["cu_query_lens"][: num_seqs + 1],
            num_tokens,
        )
        return self._model.hidden(
            inputs["token_ids"][:num_tokens],
            self._sampler.sampled,
            inputs["positions"][:num_tokens],
            inputs["kv_slots"][:num_tokens],
            inputs["slots"][:num_tokens],
            inputs["page_table"][:num_seqs],
            attention,
            self._kv_pages,
            branch,
            before_layer,
        )

    @torch.inference_mode()
    def _capture(self, kind: _Kind, memory: Any) -> _Captured:
        workspace, branch = self._sgmv[kind.bucket], self._branch(kind)
        inputs, num_seqs = self._graph_inputs, self._num_seqs(kind.bucket, kind.has_prefill)
        inputs.write((), kind.bucket, num_seqs, self._sampler.slot)  # padding rows only
        inputs.host["lists"][:] = 0
        inputs.copy(num_seqs)

        def forward() -> torch.Tensor:
            if kind.has_adapters:
                workspace.resolve()
            return self._forward(inputs, kind.bucket, num_seqs, branch)

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            hidden = forward()
        return _Captured(graph, hidden)

    def _branch(self, kind: _Kind) -> Branch:
        pdl = kind.bucket <= self._most_ahead
        if not kind.has_adapters:
            return NoAdapters(pdl)
        workspace = self._sgmv[kind.bucket]
        return BesideBase(workspace, pdl) if workspace.plan.kind == "decode" else OntoBase(workspace)

    def _step_inputs(self, max_tokens: int, *plans: SgmvPlan) -> StepInputs:
        return StepInputs(
            max_tokens=max_tokens,
            max_seqs=self._buckets.most_decodes,
            max_pages=-(-self._max_model_len // self._page_tokens),
            lists_size=max(map(lists_size, plans)),
            page_tokens=self._page_tokens,
            settings=FIELDS,
            device=self._pool.device,
        )

    def _workspace(self, plan: SgmvPlan, inputs: StepInputs) -> SgmvWorkspace:
        lists = inputs.device["lists"][: lists_size(plan)]
        return SgmvWorkspace(
            plan, self._model.modules, self._pool, self._table, lists, self._split, self._handover
        )

    def _share(self, comm: Comm, split: Split, plan: SgmvPlan, most_rows: int) -> Handover | None:
        """What fully sharded adapters need of the ranks' memory: in decode for plans of up to this one's
        tokens, else for steps of up to `most_rows`.
        """
        modules = self._model.modules
        sets = comm.peer_buffers(num_words(plan, modules, split), 1, WORD)
        columns = most_columns(modules, plan.max_rank, split)
        plane_sets = comm.peer_buffers(most_rows, columns, torch.float32)
        if sets is None or plane_sets is None:
            return None
        num_layers, num_projections = self._table.ranks.shape[1:]
        return Handover(sets, plane_sets, split, num_layers * num_projections, lambda: comm.least(0))

    def _write_lists(self, workspace: SgmvWorkspace, batch: Batch, inputs: StepInputs) -> ListCounts:
        plan = workspace.plan
        step = 0 if self._handover is None else self._handover.next_step()
        lists = inputs.host["lists"][: lists_size(plan)]
        return write_lists(plan, batch.segments, self._copies.ranks, lists, step)

    def _apply_memory(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        for eviction in plan.evictions:
            self._copies.evict(eviction.slot)
        if self._poison and plan.freed_pages:
            self._pool[list(plan.freed_pages)] = torch.nan
            self._last_step.record()
        for load in plan.loads:
            after_steps = load.after_steps or self._poison
            self._copies.start(replace(load, after_steps=after_steps), images[load.digest], self._last_step)


def _build_model(
    spec: ModelSpec,
    weights: LlamaWeights,
    config: EngineConfig,
    max_model_len: int,
    comm: Comm,
    most_rows: int,
) -> tuple[CudaLlama, int]:
    """And for how many rows at most its sums over the ranks are kernels like all others.

    NCCL sums what has more rows, maybe on another stream: nothing is launched ahead behind that.
    """
    hidden_size, dtype = spec.shape.hidden_size, weights.embed.dtype
    peers = comm.peer_buffers(most_rows, hidden_size, dtype)
    delta_peers = logit_peers = None
    if peers is not None:
        delta_peers = comm.peer_buffers(MOST_TILE_ROWS, hidden_size, dtype)
        logit_peers = comm.column_buffers(config.max_num_seqs, dtype)
    model = CudaLlama(spec, weights, max_model_len, comm, peers, delta_peers, logit_peers)
    if comm is ALONE:
        return model, config.max_num_batched_tokens
    return model, 0 if peers is None else peers[0].max_rows
