"""Log-probabilities of a row's chosen token and best ones, from its chunks. See kernels.sampling.triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.row_ops import LOG2_E, NO_KEY, load_keys, ordered_key


@triton.jit
def logprobs_kernel(
    logits_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_top_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    top_logprobs_ptr: tl.tensor,
    best_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    list_values_ptr: tl.tensor,
    list_tokens_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_top: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    LIST: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
) -> None:
    """A program a row. The whole row is read for tokens that may not be in the list."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_top_ptr + row)
    if num_top < 0:
        return
    chunk = tl.arange(0, NUM_CHUNKS)
    stat = row * num_chunks + chunk
    maxima = tl.load(best_ptr + stat, mask=chunk < num_chunks, other=float("-inf"))
    masses = tl.load(mass_ptr + stat, mask=chunk < num_chunks, other=0.0)
    best = tl.max(maxima, axis=0)
    log_mass = tl.log(tl.sum(masses * tl.exp2((maxima - best) * LOG2_E), axis=0))
    row_ptr = logits_ptr + row * stride_row
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, chosen - best - log_mass)
    if num_top > 0:
        cut = tl.max(tl.load(cut_ptr + stat, mask=chunk < num_chunks, other=float("-inf")), axis=0)
        entry = tl.arange(0, NUM_CHUNKS * LIST)
        first = row * num_chunks * LIST
        count = num_chunks * LIST
        keys, _ = load_keys(list_values_ptr + first, entry, count, best, LOG2_E)
        tokens = tl.load(list_tokens_ptr + first + entry, mask=entry < count, other=0)
        to_ids = top_ids_ptr + row * stride_top
        to_logprobs = top_logprobs_ptr + row * stride_top
        last_key = _store_best(
            keys, tokens, row_ptr, vocab_size, best, log_mass, num_top, to_ids, to_logprobs, True, ROW_BLOCK
        )
        if last_key <= ordered_key(cut):
            _store_best(
                keys,
                tokens,
                row_ptr,
                vocab_size,
                best,
                log_mass,
                num_top,
                to_ids,
                to_logprobs,
                False,
                ROW_BLOCK,
            )


@triton.jit
def _store_best(
    keys: tl.tensor,
    tokens: tl.tensor,
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    best: tl.tensor,
    log_mass: tl.tensor,
    num_top: tl.tensor,
    top_ids_ptr: tl.tensor,
    top_logprobs_ptr: tl.tensor,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """For each of the best a pass: the largest key behind the last one's, among equals the smallest token.

    Returns the key of the last one.
    """
    key = tl.zeros_like(num_top) + 0x7FFFFFFF
    token = tl.zeros_like(num_top) - 1
    for rank in range(num_top):
        if IS_LIST:
            is_behind = (keys < key) | ((keys == key) & (tokens > token))
            next_key = tl.where(is_behind, keys, NO_KEY)
            next_token = tokens
        else:
            next_key = tl.full([BLOCK], NO_KEY, tl.int32)
            next_token = tl.zeros([BLOCK], tl.int32)
            for first in range(0, vocab_size, BLOCK):
                entry = first + tl.arange(0, BLOCK)
                row_keys, _ = load_keys(row_ptr, entry, vocab_size, best, LOG2_E)
                is_behind = (row_keys < key) | ((row_keys == key) & (entry > token))
                # tokens ascend: an equal of what a place has seen already is worse
                is_better = is_behind & (row_keys > next_key)
                next_key = tl.where(is_better, row_keys, next_key)
                next_token = tl.where(is_better, entry, next_token)
        key = tl.max(next_key, axis=0)
        token = tl.min(tl.where(next_key == key, next_token, 0x7FFFFFFF), axis=0)
        value = tl.load(row_ptr + token).to(tl.float32)
        tl.store(top_ids_ptr + rank, token.to(tl.int64))
        tl.store(top_logprobs_ptr + rank, value - best - log_mass)
    return key
