"""Choosing the next token from logits: the specification, in plain PyTorch, vectorised over rows.

Knows nothing of requests: rows of logits [B, V] float32, per-row parameters [B], sparse entries
(rows, token_ids) [E]. The order in which a caller applies the operations is stated in `engine.sampler`.

Random numbers are counter-based, so that a row's draw depends on its seed and position alone, not on the
batch around it or on how often it was computed: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011), Philox4x32 with 10 rounds. A draw takes one number and inverts the cumulative
distribution; a race of exponential clocks would need a number for each token of the vocabulary.

Every result of a row is the same bits whatever the other rows are. Sums over the vocabulary therefore go
through softmax and cumsum, whose order of summation does not depend on the number of rows, as sum's does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
UINT32 = 0xFFFFFFFF

TOP_P_PREFIX = 1024
"""Best tokens looked at first for top-p: a nucleus seldom is larger, and a full sort costs ten times more."""


class TopLogprobs(NamedTuple):
    token_ids: Tensor  # [B, K] int64, best first, the smaller id first among equals
    logprobs: Tensor  # [B, K] float32


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for a counter of four words and a key of two; words are int64 in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # int64 wraps around, and the masks make the 64-bit product unsigned again
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0 = (p1 >> 32 & UINT32) ^ c1 ^ k0
        c2 = (p0 >> 32 & UINT32) ^ c3 ^ k1
        c1, c3 = p1 & UINT32, p0 & UINT32
        k0, k1 = k0 + PHILOX_WEYL[0] & UINT32, k1 + PHILOX_WEYL[1] & UINT32
    return c0, c1, c2, c3


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B] float64 in (0, 1) from int64: seeds [B] are the key, positions [B] the counter's low half."""
    zero = torch.zeros_like(seeds)
    w0, w1, _, _ = philox4x32(
        (positions & UINT32, positions >> 32 & UINT32, zero, zero),
        (seeds & UINT32, seeds >> 32 & UINT32),
    )
    # 52 bits and a half: exact, and neither 0 nor 1
    return ((w0 << 20 | w1 >> 12).double() + 0.5) * 2.0**-52


def add_bias_(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """logits[row, token] += bias, in place; -inf forbids the token. Entries [E] may repeat."""
    logits.index_put_((rows, token_ids), bias, accumulate=True)


def penalize_(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """In place, for entries [E] of distinct (row, token): tokens of the prompt or the output.

    `counts` [E]: occurrences in the output, 0 for a token of the prompt alone. Penalties [B] by row:
    l = l / repetition if l > 0 else l * repetition;  l -= frequency * count;  l -= presence if count > 0
    """
    values = logits[rows, token_ids]
    strength = repetition[rows]
    values = torch.where(values > 0, values / strength, values * strength)
    values -= frequency[rows] * counts
    values -= presence[rows] * (counts > 0)
    logits[rows, token_ids] = values


def scale_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - max) / temperature, for temperature [B] > 0. The best token's value is 0."""
    # subtracted first: a tiny temperature then gives 0 and -inf, never inf - inf
    best = logits.max(dim=-1, keepdim=True).values
    return (logits - best) / temperature.clamp(min=1e-30)[:, None]


def keep_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """-inf for tokens less likely than min_p [B] times the likeliest one. Needs values whose maximum is 0."""
    return scaled.masked_fill(scaled < min_p.log()[:, None], -torch.inf)


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """-inf for all but the k best tokens; 1 <= top_k [B]. Among equals the smaller id is better."""
    num_best = top_k.clamp(max=logits.shape[1])
    keys = _ordered_keys(logits)
    best = keys.topk(int(num_best.max())).values
    return logits.masked_fill(keys < best.gather(1, num_best[:, None] - 1), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """-inf for all but the smallest set of best tokens with a probability of at least top_p [B]."""
    keys = _ordered_keys(logits)
    probs = logits.softmax(dim=-1)
    prefix = min(TOP_P_PREFIX, logits.shape[1])
    threshold, found = _nucleus_threshold(keys, probs, top_p, prefix)
    rest = (~found).nonzero()[:, 0]
    if len(rest):
        threshold[rest], _ = _nucleus_threshold(keys[rest], probs[rest], top_p[rest], logits.shape[1])
    return logits.masked_fill(keys < threshold, -torch.inf)


def choose(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [B] int64 drawn from softmax(logits), by inversion of uniforms [B] float64 in (0, 1)."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    # relative to the total, which rounding keeps from being 1; the first above it has a probability above 0
    target = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return chosen.clamp(max=logits.shape[1] - 1)  # NaN logits: any token, but one that exists


def top_logprobs(logprobs: Tensor, k: int) -> TopLogprobs:
    token_ids = _token_ids(_ordered_keys(logprobs).topk(k).values)
    return TopLogprobs(token_ids, logprobs.gather(1, token_ids))


def _nucleus_threshold(keys: Tensor, probs: Tensor, top_p: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Key of each row's last kept token [B, 1], and whether the `prefix` best tokens settle it [B]."""
    best = keys.topk(prefix).values
    mass = probs.gather(1, _token_ids(best)).cumsum(dim=-1)
    num_short = (mass < top_p[:, None]).sum(dim=-1)  # tokens before the one that reaches top_p
    last = num_short.clamp(max=prefix - 1)
    return best.gather(1, last[:, None]), num_short < prefix


def _ordered_keys(values: Tensor) -> Tensor:
    """Distinct int64 [B, V] that order a row's float32 values, among equals by smaller token id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    # negative floats descend as integers: flip all but their sign
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    ids = torch.arange(values.shape[1], device=values.device)
    return (ordered.long() << 32) | (UINT32 - ids)


def _token_ids(keys: Tensor) -> Tensor:
    return UINT32 - (keys & UINT32)
