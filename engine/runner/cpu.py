"""The CPU backend: reference ops in PyTorch over one pool tensor. For small models, laptops and CI."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from engine.adapters.image import AdapterImage
from engine.model.llama import Adapters, LlamaModel
from engine.model.loading import LlamaWeights
from engine.model.spec import ModelSpec
from engine.plan import StepPlan
from engine.runner.base import SampledToken
from engine.runner.batch import build_batch
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sampling_state import SamplingState
from engine.shape import NUM_PROJECTIONS
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.sgmv import AdapterViews, Split, SplitViews, absolute_offsets


class CpuRunner:
    max_in_flight = 1
    copy_bytes_per_s = math.inf

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        num_pages: int,
        page_tokens: int,
        max_model_len: int,
        poison: bool = False,
        comm: Comm = ALONE,
        split: Split | None = None,
    ) -> None:
        """`poison`: fill freed pages with NaN, so that a read of what is not there any more shows.

        `split`: adapters are fully sharded, like this.
        """
        shape = spec.shape
        self._page_tokens = page_tokens
        self._model = LlamaModel(spec, weights, max_model_len, comm)
        self._pool = torch.zeros(num_pages, shape.page_elems(page_tokens), dtype=weights.embed.dtype)
        self._adapters = _views(self._pool, spec, split)
        self._sampler = Sampler(spec.eos_token_ids)
        self._states: dict[str, SamplingState] = {}
        self._sampled: list[SampledToken] = []
        self._poison = poison
        if poison:
            self._pool.fill_(torch.nan)

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        self._states[request_id] = SamplingState(params, seed, prompt_token_ids)

    def finish(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    @torch.inference_mode()
    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        for eviction in plan.evictions:
            self._adapters.clear(eviction.slot)
        if self._poison and plan.freed_pages:
            self._pool[list(plan.freed_pages)] = torch.nan
        for load in plan.loads:
            self._load(images[load.digest], load.slot, load.page_ids)
        if plan.chunks:
            batch = build_batch(plan.chunks, "cpu", self._page_tokens)
            logits = self._model.forward(batch, self._pool, self._adapters)
            self._sampled = self._sample(logits, [plan.chunks[i].request_id for i in batch.order])

    def collect(self) -> list[SampledToken]:
        sampled, self._sampled = self._sampled, []
        return sampled

    def close(self) -> None: ...

    def _load(self, image: AdapterImage, slot: int, page_ids: tuple[int, ...]) -> None:
        for page, page_id in zip(image.pages, page_ids, strict=True):
            self._pool[page_id] = page
        offsets = absolute_offsets(image.tile_offsets, page_ids, self._pool.shape[1])
        self._adapters.put(slot, offsets, image.ranks, image.scales)

    def _sample(self, logits: torch.Tensor, request_ids: list[str]) -> list[SampledToken]:
        if not request_ids:
            return []
        states = [self._states[request_id] for request_id in request_ids]
        sampled = self._sampler.sample(logits, states)
        for state, token_id in zip(states, sampled.token_ids, strict=True):
            state.append(token_id)
        return [
            SampledToken(*row) for row in zip(request_ids, sampled.token_ids, sampled.logprobs, strict=True)
        ]


def _views(pool: torch.Tensor, spec: ModelSpec, split: Split | None) -> Adapters:
    widths = [spec.shape.widths(p) for p in range(NUM_PROJECTIONS)]
    return AdapterViews(pool, widths) if split is None else SplitViews(pool, widths, split)
