"""Sampling on the GPU: the settings of each running request, by slot, and the launches. Waits for nothing.

A request has a slot from its first sampled token until it ends or is preempted. The newest token of a slot
stays on the device, where the next step finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.request import TokenLogprob
from engine.runner.base import SampledToken
from engine.runner.uploads import Uploads
from engine.sampler import bias_entries
from engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from engine.sampling_state import SamplingState
from kernels.sampling import reference
from kernels.sampling.triton import (
    Logprobs,
    Penalties,
    RowParams,
    SamplingWorkspace,
    logprobs,
    penalize_,
    record_tokens,
    sample,
    start_history,
)

_SETTINGS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "log_min_p": np.float32,
    "seeds": np.int64,
    "num_sampled": np.int64,  # before this step
    "repetition": np.float32,
    "frequency": np.float32,
    "presence": np.float32,
    "history_slots": np.int32,  # -1: no penalties
    "num_top": np.int32,  # log-probabilities of so many best tokens, -1: none at all
}

FIELDS = _SETTINGS | {"sample_slots": np.int64}
"""What `write` fills for each row of logits."""


@dataclass(slots=True)
class _Results:
    """Pinned copies of one step's tokens and log-probabilities, on their way to the host."""

    token_ids: torch.Tensor  # [S] int64
    logprobs: Logprobs
    copied: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    request_ids: tuple[str, ...]
    states: tuple[SamplingState, ...]
    num_top: list[int]
    results: _Results


class CudaSampler:
    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_results: int,
        device: torch.device,
    ) -> None:
        """`num_results`: steps that may be in flight at once."""
        self.sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._uploads = Uploads(device)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._settings = {name: np.zeros(num_slots, kind) for name, kind in _SETTINGS.items()}
        self._has_bias = np.zeros(num_slots, np.bool_)
        self._states: dict[str, SamplingState] = {}
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(num_slots))
        self._workspace = SamplingWorkspace.allocate(num_slots, vocab_size, device)
        self._history = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._token_ids = torch.empty(num_slots, dtype=torch.int64, device=device)
        self._logprobs = Logprobs.allocate(num_slots, MAX_TOP_LOGPROBS, device)
        self._results = [_pinned_results(num_slots) for _ in range(num_results)]
        self._in_flight: list[_Step] = []

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        self._states[request_id] = SamplingState(params, seed, prompt_token_ids)

    def finish(self, request_id: str) -> None:
        self.release(request_id)
        self._states.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """The request does not run any more; what it has sampled is kept."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._states[request_id].num_outputs = int(self._settings["num_sampled"][slot])
            self._free_slots.append(slot)

    def slot(self, request_id: str) -> int:
        """Of a request that has sampled a token since it runs."""
        return self._slots[request_id]

    def write(self, request_ids: Sequence[str], host: dict[str, np.ndarray]) -> None:
        """Fill FIELDS for rows of logits that belong to these requests, and count a token for each."""
        slots = np.array([self._slots.get(r, -1) for r in request_ids], np.int64)
        for row in np.flatnonzero(slots < 0).tolist():
            slots[row] = self._take_slot(request_ids[row])
        num = len(slots)
        host["sample_slots"][:num] = slots
        for name, values in self._settings.items():
            host[name][:num] = values[slots]
        self._settings["num_sampled"][slots] += 1

    def sample(
        self,
        request_ids: tuple[str, ...],
        logits: torch.Tensor,
        host: dict[str, np.ndarray],
        device: dict[str, torch.Tensor],
    ) -> None:
        """Launch the choice of a token for each row of logits [N, V], after `write` and its copy."""
        states = tuple(self._states[r] for r in request_ids)
        num_top = host["num_top"][: len(states)].tolist()
        results = self._next_results()
        if states:
            self._launch(states, logits, host, device, results, max(num_top) >= 0)
        results.copied.record()
        self._in_flight.append(_Step(request_ids, states, num_top, results))

    def skip(self) -> None:
        """A step that computes nothing."""
        results = self._next_results()
        results.copied.record()
        self._in_flight.append(_Step((), (), [], results))

    def collect(self) -> list[SampledToken]:
        """Wait for the oldest step's tokens."""
        step = self._in_flight.pop(0)
        step.results.copied.synchronize()
        token_ids = step.results.token_ids[: len(step.request_ids)].tolist()
        sampled = []
        for row, (request_id, state, token_id) in enumerate(
            zip(step.request_ids, step.states, token_ids, strict=True)
        ):
            state.record(token_id)
            num_top = step.num_top[row]
            logprob = _token_logprob(step.results.logprobs, row, token_id, num_top) if num_top >= 0 else None
            sampled.append(SampledToken(request_id, token_id, logprob))
        return sampled

    def _next_results(self) -> _Results:
        """The buffers of the step before the last one, which has been collected."""
        results = self._results.pop(0)
        self._results.append(results)
        return results

    def _launch(
        self,
        states: Sequence[SamplingState],
        logits: torch.Tensor,
        host: dict[str, np.ndarray],
        device: dict[str, torch.Tensor],
        results: _Results,
        with_logprobs: bool,
    ) -> None:
        num = len(states)
        chosen = self._token_ids[:num]
        slots = host["sample_slots"][:num]
        penalties = self._penalties(device, num) if (host["history_slots"][:num] >= 0).any() else None
        has_bias = self._has_bias[slots].any()
        edited = logits.float() if penalties or has_bias else logits
        if has_bias:
            for state, position in zip(states, host["num_sampled"][:num].tolist(), strict=True):
                state.num_outputs = position
            entries = bias_entries(states, self._eos_token_ids)
            if entries:
                reference.add_bias_(edited, *self._uploads.put(*entries.tensors(torch.float32)))
        if penalties:
            penalize_(edited, penalties)
        fields = ("temperature", "top_k", "top_p", "log_min_p", "seeds", "num_sampled")
        sample(edited, RowParams(*(device[name] for name in fields)), self._workspace, chosen)
        if penalties:
            record_tokens(chosen, penalties)
        self.sampled.index_copy_(0, device["sample_slots"][:num], chosen)
        results.token_ids[:num].copy_(chosen, non_blocking=True)
        if with_logprobs:
            logprobs(logits, chosen, device["num_top"][:num], self._workspace, self._logprobs)
            for there, here in zip(results.logprobs, self._logprobs, strict=True):
                there[:num].copy_(here[:num], non_blocking=True)

    def _penalties(self, device: dict[str, torch.Tensor], num: int) -> Penalties:
        names = ("history_slots", "repetition", "frequency", "presence")
        return Penalties(self._history, *(device[name][:num] for name in names))

    def _take_slot(self, request_id: str) -> int:
        state = self._states[request_id]
        params = state.params
        slot = self._free_slots.pop()
        self._slots[request_id] = slot
        values = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "log_min_p": np.log(params.min_p) if params.min_p > 0 else -np.inf,
            "seeds": state.seed,
            "num_sampled": state.num_outputs,
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "history_slots": slot if params.penalizes else -1,
            "num_top": -1 if params.logprobs is None else params.logprobs,
        }
        for name, value in values.items():
            self._settings[name][slot] = value
        self._has_bias[slot] = bool(state.bias) or params.min_tokens > state.num_outputs
        if params.penalizes:
            self._start_history(slot, state)
        return slot

    def _start_history(self, slot: int, state: SamplingState) -> None:
        seen = torch.from_numpy(np.array(state.seen_token_ids))
        outputs = seen.repeat_interleave(torch.from_numpy(np.array(state.output_counts)))
        start_history(self._history[slot], *self._uploads.put(seen, outputs))


def _pinned_results(num_rows: int) -> _Results:
    k = MAX_TOP_LOGPROBS
    return _Results(
        torch.empty(num_rows, dtype=torch.int64, pin_memory=True),
        Logprobs(
            torch.empty(num_rows, pin_memory=True),
            torch.empty(num_rows, k, dtype=torch.int64, pin_memory=True),
            torch.empty(num_rows, k, pin_memory=True),
        ),
        torch.cuda.Event(),  # type: ignore[no-untyped-call]
    )


def _token_logprob(results: Logprobs, row: int, token_id: int, num_top: int) -> TokenLogprob:
    ids, values = results.token_ids[row, :num_top].tolist(), results.logprobs[row, :num_top].tolist()
    return TokenLogprob(token_id, float(results.chosen[row]), tuple(zip(ids, values, strict=True)))
