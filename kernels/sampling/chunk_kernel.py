"""What a row's chunks contribute, each read once by a program of its own. See kernels.sampling.triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.row_ops import LOG2_E, load_values

MAX_CUTS = tl.constexpr(16)


@triton.jit
def chunk_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    num_top_ptr: tl.tensor,
    best_ptr: tl.tensor,
    token_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    list_values_ptr: tl.tensor,
    list_tokens_ptr: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    FOR_LOGPROBS: tl.constexpr,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Best value and token; the mass, relative to that value; a list of the values above a cut.

    For logprobs the row's temperature is 1 and num_top tells whether it takes part (>= 0) and wants a list.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    stat = row * tl.num_programs(0) + chunk
    if FOR_LOGPROBS:
        num_top = tl.load(num_top_ptr + row)
        if num_top < 0:
            return
        wants_list = num_top > 0
        wants_mass = num_top >= 0
        rate = LOG2_E
    else:
        temperature = tl.load(temperature_ptr + row)
        filters = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0)
        wants_list = (temperature > 0) & (filters | (tl.load(log_min_p_ptr + row) > float("-inf")))
        wants_mass = temperature > 0
        rate = LOG2_E / tl.maximum(temperature, 1e-30)

    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_values(logits_ptr + row * stride_row, entry, vocab_size)
    best = tl.max(values, axis=0)
    tl.store(best_ptr + stat, best)
    tl.store(token_ptr + stat, tl.min(tl.where(values == best, entry, vocab_size - 1), axis=0))
    if wants_mass:
        pivot = tl.where(best > float("-inf"), best, 0.0)
        tl.store(mass_ptr + stat, tl.sum(tl.exp2((values - pivot) * rate), axis=0))
    if wants_list:
        cut = _cut(values, best, LIST)
        listed = (values > cut).to(tl.int32)
        place = tl.cumsum(listed, axis=0) - 1
        num_listed = tl.sum(listed, axis=0)
        tl.store(cut_ptr + stat, cut)
        tl.store(list_values_ptr + stat * LIST + place, values, mask=listed > 0)
        tl.store(list_tokens_ptr + stat * LIST + place, entry, mask=listed > 0)
        unused = tl.arange(0, LIST)
        minus_inf = tl.full([LIST], float("-inf"), tl.float32)
        tl.store(list_values_ptr + stat * LIST + unused, minus_inf, mask=unused >= num_listed)
        tl.store(list_tokens_ptr + stat * LIST + unused, unused * 0, mask=unused >= num_listed)


@triton.jit
def _cut(values: tl.tensor, best: tl.tensor, LIST: tl.constexpr) -> tl.tensor:
    """A value above which lie at most LIST others, and half of that if bisection finds such a place."""
    is_finite = values > float("-inf")
    num_finite = tl.sum(is_finite.to(tl.int32), axis=0)
    cut = best
    if num_finite <= LIST:
        cut = tl.zeros_like(best) + float("-inf")
    else:
        low = tl.sum(tl.where(is_finite, values, 0.0), axis=0) / num_finite.to(tl.float32)
        num_above = num_finite * 0
        step = num_finite * 0
        while (num_above < LIST // 2) & (step < MAX_CUTS):
            middle = (low + cut) * 0.5
            num = tl.sum((values > middle).to(tl.int32), axis=0)
            fits = num <= LIST
            cut = tl.where(fits, middle, cut)
            num_above = tl.where(fits, num, num_above)
            low = tl.where(fits, low, middle)
            step += 1
    return cut
