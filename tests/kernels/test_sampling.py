"""Every operation of choosing a token, against a naive loop over rows and tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.sampling import reference

UINT32 = 0xFFFFFFFF
BATCHES = (2, 3, 7, 32)


def naive_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & UINT32, (k[1] + 0xBB67AE85) & UINT32]
    return c


def normal(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def tied(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Few distinct values, as logits of a 16-bit model have."""
    return normal(rows, vocab_size, seed).round()


def kept(filtered: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in filtered]


def best_first(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([UINT32] * 4, [UINT32] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    """Known answers of the authors' Random123."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert [int(word) for word in reference.philox4x32((c0, c1, c2, c3), (k0, k1))] == expected


def test_uniform_is_philox_of_seed_and_position() -> None:
    rng = random.Random(1)
    edges = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 32]
    seeds = edges + [rng.randrange(-(1 << 63), 1 << 63) for _ in range(200)]
    positions = [0, 1, 5, (1 << 32) + 3, 0, 7] + [rng.randrange(1 << 40) for _ in range(200)]
    expected = []
    for seed, position in zip(seeds, positions, strict=True):
        counter = [position & UINT32, position >> 32, 0, 0]
        w0, w1, _, _ = naive_philox(counter, [seed & UINT32, seed >> 32 & UINT32])
        expected.append(((w0 << 32 | w1) >> 12) / 2**52 + 2**-53)
    assert reference.philox_uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_uniform_fills_the_unit_interval_evenly(over: str) -> None:
    count, fixed = torch.arange(100_000), torch.full((100_000,), 7)
    uniforms = (
        reference.philox_uniform(count, fixed) if over == "seeds" else reference.philox_uniform(fixed, count)
    )
    assert uniforms.min() > 0
    assert uniforms.max() < 1
    observed = torch.histc(uniforms.float(), bins=100, min=0, max=1)
    chi_square = ((observed - 1000) ** 2 / 1000).sum()
    assert chi_square < 161  # 99 degrees of freedom: exceeded by one seed in 10,000


def test_bias_adds_up_and_forbids() -> None:
    logits = torch.zeros(2, 4)
    reference.add_bias_(
        logits,
        torch.tensor([0, 1, 1, 1]),
        torch.tensor([3, 0, 0, 2]),
        torch.tensor([1.5, 2.0, -torch.inf, -4.0]),
    )
    assert logits.tolist() == [[0, 0, 0, 1.5], [-math.inf, 0, -4.0, 0]]


def test_penalties_are_exact_and_touch_seen_tokens_only() -> None:
    rng = random.Random(2)
    logits = normal(7, 50)
    repetition = [rng.choice([0.5, 1.0, 1.7]) for _ in range(7)]
    frequency = [rng.choice([-1.0, 0.0, 0.25]) for _ in range(7)]
    presence = [rng.choice([-2.0, 0.0, 0.5]) for _ in range(7)]
    entries = [(row, token, rng.randrange(3)) for row in range(7) for token in rng.sample(range(50), row * 5)]
    expected = logits.double().clone()
    for row, token, count in entries:
        value = float(expected[row, token])
        value = value / repetition[row] if value > 0 else value * repetition[row]
        expected[row, token] = value - frequency[row] * count - (presence[row] if count else 0.0)
    rows, token_ids, counts = (torch.tensor(column) for column in zip(*entries, strict=True))
    untouched = torch.ones_like(logits, dtype=torch.bool)
    untouched[rows, token_ids] = False
    before = logits.clone()
    reference.penalize_(
        logits,
        rows,
        token_ids,
        counts,
        torch.tensor(repetition),
        torch.tensor(frequency),
        torch.tensor(presence),
    )
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[untouched], before[untouched])


def test_a_tiny_temperature_leaves_the_best_token() -> None:
    scaled = reference.scale_by_temperature(torch.tensor([[1.0, 90.0, 89.0]]), torch.tensor([1e-45]))
    assert scaled.softmax(-1).tolist() == [[0, 1, 0]]


def test_temperature_divides_the_distance_to_the_best() -> None:
    logits = normal(3, 20)
    temperature = torch.tensor([0.5, 1.0, 3.0])
    expected = (logits / temperature[:, None]).softmax(-1)
    torch.testing.assert_close(reference.scale_by_temperature(logits, temperature).softmax(-1), expected)


@pytest.mark.parametrize("values", [normal, tied])
def test_top_k_keeps_exactly_the_k_best(values: Callable[[int, int], Tensor]) -> None:
    logits = values(5, 40)
    top_k = [1, 2, 17, 40, 1000]
    expected = [set(best_first(row)[:k]) for row, k in zip(logits.tolist(), top_k, strict=True)]
    assert kept(reference.keep_top_k(logits, torch.tensor(top_k))) == expected


@pytest.mark.parametrize("values", [normal, tied])
@pytest.mark.parametrize("prefix", [1, 4, 1024])
def test_top_p_keeps_the_smallest_set_that_reaches_p(
    values: Callable[[int, int], Tensor], prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TOP_P_PREFIX", prefix)
    logits = values(6, 40)
    top_p = [1e-9, 0.2, 0.5, 0.9, 0.99, 0.999999]
    expected = []
    for row, p in zip(logits.tolist(), top_p, strict=True):
        probs, mass, nucleus = softmax(row), 0.0, set[int]()
        for token in best_first(row):
            if mass < p:
                nucleus.add(token)
            mass += probs[token]
        expected.append(nucleus)
    assert kept(reference.keep_top_p(logits, torch.tensor(top_p))) == expected


def test_top_p_of_a_flat_distribution_over_a_large_vocabulary() -> None:
    logits = torch.zeros(2, 4096)
    logits[0, 4095] = 20.0
    assert [len(row) for row in kept(reference.keep_top_p(logits, torch.tensor([0.5, 0.5])))] == [1, 2048]


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    logits = normal(4, 40)
    min_p = [0.0, 0.01, 0.3, 1.0]
    expected = [
        {token for token, prob in enumerate(softmax(row)) if prob >= p * max(softmax(row))}
        for row, p in zip(logits.tolist(), min_p, strict=True)
    ]
    scaled = reference.scale_by_temperature(logits, torch.ones(4))
    assert kept(reference.keep_min_p(scaled, torch.tensor(min_p))) == expected


def test_choice_inverts_the_cumulative_distribution() -> None:
    logits = (
        torch.tensor([-torch.inf, 0.25, -torch.inf, 0.5, 0.25, -torch.inf]).log().nan_to_num(nan=-torch.inf)
    )
    uniforms = [2.0**-53, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53]
    chosen = reference.choose(logits.expand(6, 6), torch.tensor(uniforms, dtype=torch.float64))
    assert chosen.tolist() == [1, 1, 3, 3, 4, 4]


def test_a_number_on_the_border_belongs_to_the_token_above() -> None:
    assert reference.choose(torch.zeros(1, 4), torch.tensor([0.5], dtype=torch.float64)).tolist() == [2]


def test_choice_among_nan_logits_exists() -> None:
    logits = torch.full((1, 5), torch.nan)
    assert 0 <= int(reference.choose(logits, torch.tensor([0.5], dtype=torch.float64))) < 5


def test_top_logprobs_are_the_best_first() -> None:
    logprobs = tied(3, 30).log_softmax(-1)
    top = reference.top_logprobs(logprobs, 5)
    assert top.token_ids.tolist() == [best_first(row)[:5] for row in logprobs.tolist()]
    assert torch.equal(top.logprobs, logprobs.gather(1, top.token_ids))


@pytest.mark.parametrize("rows", BATCHES)
def test_a_row_gives_the_same_bits_in_any_batch(rows: int) -> None:
    """Also where torch would split one long row over its threads."""
    logits = normal(rows, 33_333, seed=3, scale=1.0)
    uniforms = reference.philox_uniform(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    top_k = torch.arange(1, rows + 1) * 100
    top_p = torch.linspace(0.05, 0.95, rows)

    def run(part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scaled = reference.scale_by_temperature(logits[part], torch.full((rows,), 0.9)[part])
        top = reference.keep_top_k(scaled, top_k[part])
        nucleus = reference.keep_top_p(scaled, top_p[part])
        return top, nucleus, reference.choose(nucleus, uniforms[part]), logits[part].log_softmax(-1)

    together = run(slice(None))
    for row in {0, rows // 2, rows - 1}:
        alone = run(slice(row, row + 1))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
