"""For which numbers of tokens the GPU backend captures graphs. Plain ints."""

from __future__ import annotations

from dataclasses import dataclass, replace

DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
PREFILL_BUCKETS = (320, 384, 448, 512, 640, 768, 896, 1024, 1280)
"""Of steps with prefill chunks. To launch a larger one of Llama-3-8B took the host of an H200 31 ms, about as
long as 1280 tokens run."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A step of few enough tokens takes the smallest one that holds it."""

    decode: tuple[int, ...]  # ascending
    prefill: tuple[int, ...]  # larger than these, and only for steps with prefill chunks

    @classmethod
    def plan(cls, max_seqs: int, max_tokens: int) -> Buckets:
        """Decodes of all sequences have one, and few enough tokens for the kernels of decodes."""
        most = max(max_seqs, min(DECODE_BUCKETS[-1], max_tokens))
        return cls(
            (*(b for b in DECODE_BUCKETS if b < most), most),
            tuple(b for b in PREFILL_BUCKETS if most < b <= max_tokens),
        )

    def limit_prefill(self, max_tokens: int) -> Buckets:
        return replace(self, prefill=tuple(b for b in self.prefill if b <= max_tokens))

    @property
    def all(self) -> tuple[int, ...]:
        return self.decode + self.prefill

    @property
    def most_decodes(self) -> int:
        return self.decode[-1]

    @property
    def most_tokens(self) -> int:
        return self.all[-1]

    def holding(self, num_tokens: int) -> int:
        """Of `most_tokens` at most."""
        return next(bucket for bucket in self.all if bucket >= num_tokens)
