"""Sums and draws behind a filter, in a program that has a row to itself. See kernels.sampling.triton.

Entries are the row's tokens, read block by block, or its list, which lies in registers: keys, weights and
tokens, in the order of tokens. Keys order values as integers; a value weighs exp2((value - best) * rate). A
filter (key, last_token) keeps what lies above `key`, and of what equals it the tokens up to `last_token`, so
that ties are broken as kernels.sampling.reference breaks them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
NO_KEY = tl.constexpr(-2147483648)  # below every value's
ANY_TOKEN = tl.constexpr((1 << 24) - 1)  # up to here fp32 counts exactly


@triton.jit
def load_values(values_ptr: tl.tensor, entry: tl.tensor, count: tl.tensor) -> tl.tensor:
    """fp32; -inf past the last entry and for NaN, which is never chosen."""
    x = tl.load(values_ptr + entry, mask=entry < count, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def ordered_key(value: tl.tensor) -> tl.tensor:
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    # negative floats descend as integers: flip all but their sign
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_keys(
    values_ptr: tl.tensor, entry: tl.tensor, count: tl.tensor, best: tl.tensor, rate: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and weights; past the last entry NO_KEY and 0."""
    values = load_values(values_ptr, entry, count)
    return tl.where(entry < count, ordered_key(values), NO_KEY), tl.exp2((values - best) * rate)


@triton.jit
def is_kept(keys: tl.tensor, tokens: tl.tensor, key: tl.tensor, last_token: tl.tensor) -> tl.tensor:
    return (keys > key) | ((keys == key) & (tokens <= last_token))


@triton.jit
def sum_kept(
    keys: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    row_ptr: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last_token: tl.tensor,
    WEIGHTED: tl.constexpr,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Number, or (WEIGHTED) weight, of what a filter keeps of the list, or else of the row.

    Never falls as more is kept, rounding included: every sum is over the same places in the same order.
    """
    if IS_LIST:
        kept = is_kept(keys, tokens, key, last_token)
        total = tl.where(kept, weights if WEIGHTED else 1.0, 0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, count, BLOCK):
            token = first + tl.arange(0, BLOCK)
            row_keys, row_weights = load_keys(row_ptr, token, count, best, rate)
            in_row = is_kept(row_keys, token, key, last_token)
            total += tl.where(in_row, row_weights if WEIGHTED else 1.0, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def tighten(
    keys: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    row_ptr: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last_token: tl.tensor,
    target: tl.tensor,
    WEIGHTED: tl.constexpr,
    IS_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The filter that keeps the fewest best entries whose sum reaches `target`; as before if none does."""
    none = tl.zeros_like(last_token) - 1
    low = key.to(tl.int64)
    above = ordered_key(best).to(tl.int64) + 1
    while above - low > 1:
        middle = (low + above) >> 1
        over = (middle - 1).to(tl.int32)  # of integers: from `middle` on
        total = sum_kept(
            keys, weights, tokens, row_ptr, count, best, rate, over, none, WEIGHTED, IS_LIST, BLOCK
        )
        low = tl.where(total >= target, middle, low)
        above = tl.where(total >= target, above, middle)
    found = low.to(tl.int32)
    last_token = tl.where(found == key, last_token, ANY_TOKEN)
    num_equal = sum_kept(
        keys, weights, tokens, row_ptr, count, best, rate, found, last_token, False, IS_LIST, BLOCK
    ) - sum_kept(keys, weights, tokens, row_ptr, count, best, rate, found, none, False, IS_LIST, BLOCK)
    if num_equal > 1:
        while last_token - none > 1:
            middle_token = (none + last_token) >> 1
            total = sum_kept(
                keys,
                weights,
                tokens,
                row_ptr,
                count,
                best,
                rate,
                found,
                middle_token,
                WEIGHTED,
                IS_LIST,
                BLOCK,
            )
            last_token = tl.where(total >= target, middle_token, last_token)
            none = tl.where(total >= target, none, middle_token)
    return found, last_token


@triton.jit
def first_beyond(
    weights: tl.tensor, tokens: tl.tensor, before: tl.tensor, target: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The first token at which `before` + the weights so far, float64, exceed the target."""
    place = tl.arange(0, BLOCK)
    num_before = tl.sum((before + tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
    # the target may lie past the end, by rounding
    last = tl.max(tl.where(weights > 0, place, 0), axis=0)
    return tl.sum(tl.where(place == tl.minimum(num_before, last), tokens, 0), axis=0)


@triton.jit
def draw_from_row(
    row_ptr: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last_token: tl.tensor,
    masses: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The first token at which the weight of kept ones exceeds uniform * their total, the sum of `masses`.

    masses [NUM_BLOCKS] float64: of the kept ones in each block of BLOCK tokens.
    """
    ends = tl.cumsum(masses, axis=0)
    target = uniform * tl.max(ends, axis=0)
    block = tl.sum((ends <= target).to(tl.int32), axis=0)
    before = tl.max(tl.where(tl.arange(0, NUM_BLOCKS) < block, ends, 0.0), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    keys, weights = load_keys(row_ptr, token, count, best, rate)
    kept = is_kept(keys, token, key, last_token)
    return first_beyond(tl.where(kept, weights, 0.0).to(tl.float64), token, before, target, BLOCK)


@triton.jit
def block_masses(
    row_ptr: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last_token: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """What `draw_from_row` wants, where a filter makes the chunks' masses useless."""
    masses = tl.zeros([NUM_BLOCKS], tl.float64)
    for first in range(0, count, BLOCK):
        token = first + tl.arange(0, BLOCK)
        keys, weights = load_keys(row_ptr, token, count, best, rate)
        kept = is_kept(keys, token, key, last_token)
        mass = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
        masses = tl.where(tl.arange(0, NUM_BLOCKS) == first // BLOCK, mass, masses)
    return masses
