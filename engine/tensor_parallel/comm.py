"""What the ranks of a group exchange in a step: two sums a layer, and the parts of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Comm(Protocol):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; `x` is used up."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Of each rank its columns, side by side in order of rank: [N, own] -> [N, all]."""


class Alone:
    """A group of one."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


class Ranks:
    """The default process group of torch.distributed, which must be initialised."""

    def __init__(self, widths: Sequence[int], max_rows: int) -> None:
        """`widths`: columns that each rank gives to `gather_columns`, of at most `max_rows` rows."""
        self.num_reduced = 0  # sums so far; a captured graph's count once
        self._widths = list(widths)
        self._max_rows = max_rows
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_reduced += 1
        dist.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape
        widest = max(self._widths)
        own, gathered = self._gather_buffers(x, widest)
        own[:num_rows, :width] = x
        # parts of the same size, since that is what is fast everywhere
        send = own[:num_rows].view(-1)
        receive = gathered.view(-1)[: len(self._widths) * len(send)]
        dist.all_gather_into_tensor(receive, send)
        parts = receive.view(len(self._widths), num_rows, widest)
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)

    def _gather_buffers(self, x: torch.Tensor, widest: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is None:
            own = x.new_zeros(self._max_rows, widest)
            self._buffers = own, x.new_empty(len(self._widths), self._max_rows, widest)
        return self._buffers
