"""The workloads that sgmv is measured on: how many tokens, whose adapters, of which ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ZIPF_SEEDS = {64: 289, 256: 8}  # 30 and 52 active adapters, the former of 832 ranks in the mixed case


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    mix: str  # same | distinct | zipf | the number of equal parts
    ranks: tuple[int, ...]  # of adapter i: ranks[i % len]
    must_us: float
    moonshot_us: float
    decode: bool = True

    def slots(self) -> list[int]:
        """The adapter of each token, sorted."""
        if self.mix == "same":
            return [0] * self.num_tokens
        if self.mix == "distinct":
            return list(range(self.num_tokens))
        if self.mix == "zipf":
            return _zipf(self.num_tokens)
        return [i * int(self.mix) // self.num_tokens for i in range(self.num_tokens)]

    @property
    def num_adapters(self) -> int:
        return {"same": 1, "distinct": self.num_tokens, "zipf": 64}.get(self.mix) or int(self.mix)


CASES = (
    Case("1 token, r16", 1, "same", (16,), 5, 0),
    Case("64 tokens, one adapter, r16", 64, "same", (16,), 18, 8),
    Case("64 tokens, zipf over 64, r16", 64, "zipf", (16,), 38, 25),
    Case("64 tokens, all distinct, r16", 64, "distinct", (16,), 55, 43),
    Case("64 tokens, zipf over 64, r8/16/32/64", 64, "zipf", (8, 16, 32, 64), 66, 43),
    Case("64 tokens, all distinct, r64", 64, "distinct", (64,), 180, 158),
    Case("256 tokens, zipf over 64, r16", 256, "zipf", (16,), 82, 55),
    Case("prefill 2048 tokens, 1 adapter, r16, LoRA alone", 2048, "1", (16,), 200, 130, decode=False),
    Case("prefill 2048 tokens, 4 adapters, r16, LoRA alone", 2048, "4", (16,), 200, 130, decode=False),
    Case("prefill 2048 tokens, 16 adapters, r16, LoRA alone", 2048, "16", (16,), 200, 130, decode=False),
)


def _zipf(num_tokens: int) -> list[int]:
    """Sorted draws from 64 adapters with p ~ 1/k."""
    weights = 1 / np.arange(1, 65)
    rng = np.random.default_rng(ZIPF_SEEDS[num_tokens])
    return sorted(rng.choice(64, num_tokens, p=weights / weights.sum()).tolist())
