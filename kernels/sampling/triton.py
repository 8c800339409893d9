"""Choosing the next token on the GPU, without the CPU: what kernels.sampling.reference does, row by row.

    logits (fp32) -> penalize_ -> sample -> record_tokens
    logits, untouched -> logprobs

logit_bias is add_bias_ of the reference, whose entries change from step to step; everything here has fixed
shapes and runs eagerly or in a captured graph alike. Numbers are Philox draws of (seed, position), as on the
CPU, and sums differ in rounding only, so that both choose the same token, but for a number that lies within
rounding of the border of two tokens. A row's result is the same bits whatever the other rows are.

A row is read once, by a program for each chunk of it, which lists the chunk's best values: all those above a
cut. Nothing above the highest cut of a row is missing from its list, and there filters usually end; if one
reaches further down (a nucleus of many hundred tokens), the row is searched, ten times slower or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.chunk_kernel import chunk_kernel
from kernels.sampling.logprobs_kernel import logprobs_kernel
from kernels.sampling.sample_kernel import sample_kernel

CHUNK = 1024  # what one warp holds in registers
LIST = 64
"""Listed values of a chunk, at most."""

ROW_BLOCK = 4096
ROW_WARPS = 16

PENALTY_BLOCK = 2048
IN_PROMPT = 1 << 30
"""In a history: the token is in the prompt. Lower bits count it in the output."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """How each row chooses, on the device; written in place from step to step."""

    temperature: Tensor  # [B] float32, 0: greedy
    top_k: Tensor  # [B] int32, 0: all
    top_p: Tensor  # [B] float32, 1: all
    log_min_p: Tensor  # [B] float32, -inf: all
    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int64: tokens chosen before


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of each row, and what its request has seen so far."""

    history: Tensor  # [slots, V] int32: occurrences in the output, + IN_PROMPT
    slots: Tensor  # [B] int32: row of the history, -1: no penalties
    repetition: Tensor  # [B] float32
    frequency: Tensor  # [B] float32
    presence: Tensor  # [B] float32


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Device memory that one call fills and uses; C chunks a row."""

    best: Tensor  # [B, C] float32
    tokens: Tensor  # [B, C] int32, of the best
    masses: Tensor  # [B, C] float32, the best having 1
    cuts: Tensor  # [B, C] float32
    list_values: Tensor  # [B, C, LIST] float32, unused entries -inf
    list_tokens: Tensor  # [B, C, LIST] int32

    @classmethod
    def allocate(cls, max_num_rows: int, vocab_size: int, device: torch.device | str) -> SamplingWorkspace:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(
                max_num_rows, triton.cdiv(vocab_size, CHUNK), *shape, dtype=dtype, device=device
            )

        return cls(
            best=empty(),
            tokens=empty(dtype=torch.int32),
            masses=empty(),
            cuts=empty(),
            list_values=empty(LIST),
            list_tokens=empty(LIST, dtype=torch.int32),
        )


class Logprobs(NamedTuple):
    chosen: Tensor  # [B] float32
    token_ids: Tensor  # [B, K] int64, best first, the smaller id first among equals
    logprobs: Tensor  # [B, K] float32

    @classmethod
    def allocate(cls, max_num_rows: int, k: int, device: torch.device | str) -> Logprobs:
        return cls(
            torch.empty(max_num_rows, device=device),
            torch.empty(max_num_rows, k, dtype=torch.int64, device=device),
            torch.empty(max_num_rows, k, device=device),
        )


def sample(logits: Tensor, params: RowParams, workspace: SamplingWorkspace, out: Tensor) -> None:
    """out[b] = the token of row b, int64: argmax, or temperature, min_p, top_k, top_p and a draw.

    logits [B, V] fp32, fp16 or bf16, rows contiguous, not changed. The others have B rows or more.
    """
    num_rows, vocab_size = logits.shape
    assert vocab_size < 1 << 24
    num_chunks = _read_chunks(logits, params, None, workspace)
    sample_kernel[(num_rows,)](
        logits,
        out,
        params.temperature,
        params.top_k,
        params.top_p,
        params.log_min_p,
        params.seeds,
        params.positions,
        workspace.best,
        workspace.tokens,
        workspace.masses,
        workspace.cuts,
        workspace.list_values,
        workspace.list_tokens,
        logits.stride(0),
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        LIST=LIST,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks),
        ROW_BLOCK=ROW_BLOCK,
        NUM_ROW_BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, ROW_BLOCK)),
        num_warps=ROW_WARPS,
    )


def logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Tensor, workspace: SamplingWorkspace, out: Logprobs
) -> None:
    """Log-probabilities of token_ids [B] and of the num_top[b] best tokens of each row, at most K.

    num_top [B] int32: of rows with -1 nothing is read or written. logits as in `sample`.
    """
    num_rows, vocab_size = logits.shape
    assert out.token_ids.stride() == out.logprobs.stride()
    num_chunks = _read_chunks(logits, None, num_top, workspace)
    logprobs_kernel[(num_rows,)](
        logits,
        token_ids,
        num_top,
        out.chosen,
        out.token_ids,
        out.logprobs,
        workspace.best,
        workspace.masses,
        workspace.cuts,
        workspace.list_values,
        workspace.list_tokens,
        logits.stride(0),
        out.logprobs.stride(0),
        vocab_size,
        num_chunks,
        LIST=LIST,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks),
        ROW_BLOCK=ROW_BLOCK,
        num_warps=ROW_WARPS,
    )


def _read_chunks(
    logits: Tensor, params: RowParams | None, num_top: Tensor | None, workspace: SamplingWorkspace
) -> int:
    """For `sample` (params) or `logprobs` (num_top); returns the number of chunks."""
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)
    assert logits.stride(1) == 1
    assert workspace.list_values.shape[1:] == (num_chunks, LIST)
    chunk_kernel[(num_chunks, num_rows)](
        logits,
        params and params.temperature,
        params and params.top_k,
        params and params.top_p,
        params and params.log_min_p,
        num_top,
        workspace.best,
        workspace.tokens,
        workspace.masses,
        workspace.cuts,
        workspace.list_values,
        workspace.list_tokens,
        logits.stride(0),
        vocab_size,
        FOR_LOGPROBS=params is None,
        LIST=LIST,
        CHUNK=CHUNK,
        num_warps=1,
    )
    return num_chunks


def penalize_(logits: Tensor, penalties: Penalties) -> None:
    """The reference's penalize_, in place, with the histories' tokens; logits [B, V] float32."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert penalties.history.is_contiguous()
    _penalize_kernel[(num_rows, triton.cdiv(vocab_size, PENALTY_BLOCK))](
        logits,
        penalties.history,
        penalties.slots,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        logits.stride(0),
        penalties.history.shape[1],
        vocab_size,
        IN_PROMPT=IN_PROMPT,
        BLOCK=PENALTY_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # the reference's bits
    )


def record_tokens(token_ids: Tensor, penalties: Penalties) -> None:
    """Counts token_ids [B] int64 in the histories of the rows that have one; slots are distinct."""
    _record_kernel[(len(token_ids),)](
        token_ids, penalties.history, penalties.slots, penalties.history.shape[1], num_warps=1
    )


def start_history(history: Tensor, prompt_token_ids: Tensor, output_token_ids: Tensor) -> None:
    """A request takes over a row [V] of the histories. Outputs: what a preempted request has already."""
    history.zero_()
    history.index_add_(0, output_token_ids, torch.ones_like(output_token_ids, dtype=torch.int32))
    history[prompt_token_ids] |= IN_PROMPT


@triton.jit
def _penalize_kernel(
    logits_ptr: tl.tensor,
    history_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_history: tl.tensor,
    vocab_size: tl.tensor,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(history_ptr + slot * stride_history + token, mask=token < vocab_size, other=0)
    at = logits_ptr + row * stride_row + token
    x = tl.load(at, mask=seen != 0, other=0.0)
    count = seen & (IN_PROMPT - 1)
    strength = tl.zeros_like(x) + tl.load(repetition_ptr + row)
    x = tl.where(x > 0, tl.div_rn(x, strength), x * strength)
    x -= tl.load(frequency_ptr + row) * count.to(tl.float32)
    x -= tl.load(presence_ptr + row) * (count > 0).to(tl.float32)
    tl.store(at, x, mask=seen != 0)


@triton.jit
def _record_kernel(
    token_ids_ptr: tl.tensor, history_ptr: tl.tensor, slots_ptr: tl.tensor, stride_history: tl.tensor
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        at = history_ptr + slot * stride_history + tl.load(token_ids_ptr + row)
        tl.store(at, tl.load(at) + 1)
