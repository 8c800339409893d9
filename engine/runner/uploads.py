"""Small tensors to the GPU without waiting, neither for it nor for adapters on their way."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import torch

from kernels.host_read.triton import read_host

RING_BYTES = 8 << 20
_ALIGN = 16


class Uploads:
    """A ring of memory that is pinned once, so that the step loop pins none."""

    def __init__(
        self,
        device: torch.device,
        ring_bytes: int = RING_BYTES,
        make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._make_event = make_event
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        # bytes ever written and ever read; what lies between is still to be read
        self._head = 0
        self._tail = 0
        # of each upload: the head behind it, and its reading
        self._in_flight: deque[tuple[int, torch.cuda.Event]] = deque()

    def put(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """On the current stream, always the same."""
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        ends = list(itertools.accumulate(sizes, initial=0))
        start = self._reserve(ends[-1])
        source = self._ring[start : start + ends[-1]]
        out = torch.empty_like(source, device=self._device)
        for tensor, begin in zip(tensors, ends, strict=False):
            _as(source[begin : begin + tensor.nbytes], tensor).copy_(tensor)
        read_host(source, out)
        has_read = self._make_event()
        has_read.record()
        self._in_flight.append((self._head, has_read))
        return [
            _as(out[begin : begin + tensor.nbytes], tensor)
            for tensor, begin in zip(tensors, ends, strict=False)
        ]

    def _reserve(self, num_bytes: int) -> int:
        """Where they go. Waits only if the ring is full of what the device has not read yet."""
        while self._in_flight and self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self._release()
        if num_bytes > len(self._ring):
            while self._in_flight:
                self._release()
            self._ring = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=self._ring.is_pinned())
            self._head = self._tail = 0
        size = len(self._ring)
        if self._head % size + num_bytes > size:
            self._head += -self._head % size  # no upload lies around the end
        while self._in_flight and self._head + num_bytes - self._tail > size:
            self._release()
        start = self._head % size
        self._head += num_bytes
        return start

    def _release(self) -> None:
        self._tail, has_read = self._in_flight.popleft()
        has_read.synchronize()


def _as(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return data.view(like.dtype).view(like.shape)
