"""Small tensors to the GPU without waiting, neither for it nor for adapters on their way."""

from __future__ import annotations

from collections import deque

import torch

from kernels.host_read.triton import read_host


class Uploads:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # pinned memory is another's as soon as it is dropped; nobody else knows that a kernel still reads it
        self._in_flight: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the current stream, always the same; elements are multiples of 4 bytes."""
        while self._in_flight and self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()
        pinned = tensor.contiguous().pin_memory()
        out = torch.empty_like(pinned, device=self._device)
        read_host(pinned, out)
        has_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        has_read.record()
        self._in_flight.append((pinned, has_read))
        return out
