"""One row's token, from its chunks: the best one, or a draw behind filters. See kernels.sampling.triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.row_ops import (
    ANY_TOKEN,
    LOG2_E,
    LOWEST_KEY,
    block_masses,
    draw_from_row,
    first_beyond,
    is_kept,
    load_keys,
    ordered_key,
    sum_kept,
    tighten,
)


@triton.jit
def sample_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    best_ptr: tl.tensor,
    token_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    list_values_ptr: tl.tensor,
    list_tokens_ptr: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    NUM_ROW_BLOCKS: tl.constexpr,
) -> None:
    """A program a row. Filters see the list, or the whole row if they reach below the list's cut."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    chunk = tl.arange(0, NUM_CHUNKS)
    stat = row * num_chunks + chunk
    maxima = tl.load(best_ptr + stat, mask=chunk < num_chunks, other=float("-inf"))
    tokens = tl.load(token_ptr + stat, mask=chunk < num_chunks, other=0x7FFFFFFF)
    best = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == best, tokens, 0x7FFFFFFF), axis=0)
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & (best > float("-inf")):
        temperature = tl.maximum(temperature, 1e-30)
        rate = LOG2_E / temperature
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where(top_k < vocab_size, top_k, 0)
        top_p = tl.load(top_p_ptr + row)
        log_min_p = tl.load(log_min_p_ptr + row)
        key = ordered_key(best + temperature * log_min_p)
        uniform = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        masses = tl.load(mass_ptr + stat, mask=chunk < num_chunks, other=0.0)
        masses = masses.to(tl.float64) * tl.exp2((maxima - best) * rate).to(tl.float64)
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")):
            cut = tl.max(tl.load(cut_ptr + stat, mask=chunk < num_chunks, other=float("-inf")), axis=0)
            mass = tl.sum(masses, axis=0).to(tl.float32)
            first = row * num_chunks * LIST
            token = _draw_filtered(
                list_values_ptr + first, list_tokens_ptr + first, num_chunks * LIST, row_ptr, vocab_size,
                best, rate, key, ordered_key(cut), mass, top_k, top_p, uniform,
                NUM_CHUNKS * LIST, ROW_BLOCK, NUM_ROW_BLOCKS,
            )  # fmt: skip
        else:
            token = draw_from_row(
                row_ptr, vocab_size, best, rate, key, ANY_TOKEN, masses, uniform, CHUNK, NUM_CHUNKS
            )
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _draw_filtered(
    list_values_ptr: tl.tensor,
    list_tokens_ptr: tl.tensor,
    list_size: tl.tensor,
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    lowest: tl.tensor,
    cut: tl.tensor,
    row_mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniform: tl.tensor,
    LIST_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    NUM_ROW_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """A token from the list, if the filters end above its cut, else from the whole row."""
    token, is_exact = _draw_from_list(
        list_values_ptr, list_tokens_ptr, list_size, best, rate, lowest, cut, row_mass, top_k, top_p, uniform,
        LIST_BLOCK,
    )  # fmt: skip
    if is_exact == 0:
        # stands in for the list, which is not looked at
        none = tl.arange(0, LIST_BLOCK)
        key, last_token, _ = _filter(
            none, none, none, row_ptr, vocab_size, best, rate, lowest, lowest, row_mass, top_k, top_p, False,
            ROW_BLOCK,
        )  # fmt: skip
        masses = block_masses(row_ptr, vocab_size, best, rate, key, last_token, ROW_BLOCK, NUM_ROW_BLOCKS)
        token = draw_from_row(
            row_ptr, vocab_size, best, rate, key, last_token, masses, uniform, ROW_BLOCK, NUM_ROW_BLOCKS
        )
    return token


@triton.jit
def _draw_from_list(
    values_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    lowest: tl.tensor,
    cut: tl.tensor,
    row_mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A token, and whether it is the row's (1)."""
    entry = tl.arange(0, BLOCK)
    keys, weights = load_keys(values_ptr, entry, count, best, rate)
    tokens = tl.load(tokens_ptr + entry, mask=entry < count, other=0)
    key, last_token, is_exact = _filter(
        keys,
        weights,
        tokens,
        values_ptr,
        count,
        best,
        rate,
        lowest,
        cut,
        row_mass,
        top_k,
        top_p,
        True,
        BLOCK,
    )
    wide = tl.where(is_kept(keys, tokens, key, last_token), weights, 0.0).to(tl.float64)
    nothing = tl.zeros_like(uniform)
    return first_beyond(wide, tokens, nothing, uniform * tl.sum(wide, axis=0), BLOCK), is_exact


@triton.jit
def _filter(
    keys: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    row_ptr: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    lowest: tl.tensor,
    cut: tl.tensor,
    row_mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """min-p, whose key is `lowest`, then top-k, then top-p of what they leave: key, last_token.

    And whether (1) all sums were over what lies above `cut`: only there does a list hold everything.
    """
    key = tl.maximum(lowest, cut)
    last_token = tl.zeros_like(key) + ANY_TOKEN
    if top_k > 0:
        key, last_token = tighten(
            keys,
            weights,
            tokens,
            row_ptr,
            count,
            best,
            rate,
            key,
            last_token,
            top_k.to(tl.float32),
            False,
            IS_LIST,
            BLOCK,
        )
    is_exact = tl.where((key > cut) | (lowest == LOWEST_KEY), 1, 0)
    if top_p < 1.0:
        mass = row_mass
        if (top_k > 0) | (lowest > LOWEST_KEY):
            is_exact = tl.where(key > cut, 1, 0)
            mass = sum_kept(
                keys, weights, tokens, row_ptr, count, best, rate, key, last_token, True, IS_LIST, BLOCK
            )
        key, last_token = tighten(
            keys,
            weights,
            tokens,
            row_ptr,
            count,
            best,
            rate,
            key,
            last_token,
            top_p * mass,
            True,
            IS_LIST,
            BLOCK,
        )
    return key, last_token, tl.where(key > cut, is_exact, 0)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """philox_uniform of the reference, float64 in (0, 1)."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32 & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    bits = (w0.to(tl.int64) << 20) | (w1.to(tl.int64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
