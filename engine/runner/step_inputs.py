"""A step's integers on their way to the GPU: one pinned buffer, one launch, views at fixed addresses.

    | token_ids | positions | kv_slots | slots |     T each
    | context_lens | cu_query_lens | rows |         S each, one more of cu_query_lens
    | settings for sampling |                       S each
    | lists |                                       of kernels.sgmv.lists
    | page_table |                                  S x P, last: only the rows in use are copied

Rows past the batch are padding: token 0, no KV slot (-1), no adapter (-1), context of 0; rows of logits past
the sampled ones are those of row 0.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.plan import PENDING, PageIds, ScheduledChunk
from kernels.host_read.reference import read_host
from kernels.host_read.triton import read_host as read_pinned
from kernels.sgmv.table import Segment

_ALIGN = 16  # bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """What the host has to know of the step that was written."""

    num_tokens: int
    num_seqs: int
    segments: tuple[Segment, ...]
    sampled: tuple[str, ...]  # request of each row of logits

    @property
    def has_adapters(self) -> bool:
        return any(segment.slot >= 0 for segment in self.segments)


class StepInputs:
    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_pages: int,
        lists_size: int,
        page_tokens: int,
        settings: Mapping[str, type[np.generic]],
        device: torch.device,
    ) -> None:
        self._page_tokens = page_tokens
        self._page_row_bytes = max_pages * np.dtype(np.int32).itemsize
        self._read_host = read_pinned if device.type == "cuda" else read_host
        fields: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "token_ids": (np.int64, (max_tokens,)),
            "positions": (np.int64, (max_tokens,)),
            "kv_slots": (np.int64, (max_tokens,)),
            "slots": (np.int32, (max_tokens,)),
            "context_lens": (np.int32, (max_seqs,)),
            "cu_query_lens": (np.int32, (max_seqs + 1,)),
            "rows": (np.int64, (max_seqs,)),
            **{name: (kind, (max_seqs,)) for name, kind in settings.items()},
            "lists": (np.int32, (lists_size,)),
            "page_table": (np.int32, (max_seqs, max_pages)),
        }
        sizes = [int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in fields.values()]
        offsets = np.concatenate(([0], np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes]))).tolist()
        self._host = torch.zeros(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(offsets[-1], dtype=torch.uint8, device=device)
        self._page_table_start = offsets[-2]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        for (name, (kind, shape)), offset, size in zip(fields.items(), offsets, sizes, strict=False):
            self.host[name] = self._host[offset : offset + size].numpy().view(kind).reshape(shape)
            dtype = getattr(torch, np.dtype(kind).name)
            self.device[name] = self._device[offset : offset + size].view(dtype).view(shape)

    def write(
        self,
        chunks: Sequence[ScheduledChunk],
        num_rows: int,
        num_seqs: int,
        slot_of: Callable[[str], int],
    ) -> Batch:
        """Fill the host side for `num_rows` tokens of `num_seqs` sequences, padding included.

        `slot_of`: where on the device a request's newest token lies; a pending one becomes -1 - slot.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copy before has read the host side
        order = sorted(chunks, key=operator.attrgetter("adapter_slot"))
        fields = zip(*order, strict=True) if order else [()] * len(ScheduledChunk._fields)
        request_ids, firsts, tokens, pages, adapters, samples = fields
        starts, slots = np.array(firsts, np.int64), np.array(adapters, np.int32)
        lengths = np.array(list(map(len, tokens)), np.int64)
        ends = lengths.cumsum()
        num_tokens = int(lengths.sum())
        positions = _ranges(starts, lengths)
        host, num = self.host, len(order)
        token_ids = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, num_tokens)
        last = ends - 1
        pending = np.flatnonzero(token_ids[last] == PENDING)
        token_ids[last[pending]] = [-1 - slot_of(request_ids[i]) for i in pending.tolist()]
        _fill(host["token_ids"], token_ids, num_rows, 0)
        _fill(host["positions"], positions, num_rows, 0)
        _fill(host["kv_slots"], self._write_pages(pages, positions, lengths), num_rows, -1)
        _fill(host["slots"], slots.repeat(lengths), num_rows, -1)
        _fill(host["context_lens"], starts + lengths, num_seqs, 0)
        # a padding sequence has one query, its padding row, as long as there are rows
        host["cu_query_lens"][: num + 1] = np.concatenate(([0], ends))
        padding = num_tokens + np.arange(num_seqs - num + 1)
        host["cu_query_lens"][num : num_seqs + 1] = np.minimum(padding, num_rows)
        _fill(host["rows"], last[np.array(samples, np.bool_)], len(host["rows"]), 0)
        return Batch(num_tokens, num, _segments(slots, ends), tuple(itertools.compress(request_ids, samples)))

    def copy(self, num_seqs: int) -> None:
        """To the device, on the current stream: page table rows of `num_seqs` sequences, and all else."""
        size = self._page_table_start + num_seqs * self._page_row_bytes
        self._read_host(self._host[:size], self._device[:size])
        if self._copied is not None:
            self._copied.record()

    def _write_pages(
        self, page_ids: Sequence[PageIds], positions: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """The page table; returns the KV slot of each token."""
        num_pages = np.array(list(map(len, page_ids)), np.int64)
        pages = np.frombuffer(b"".join(page_ids), np.int32)
        columns = np.arange(num_pages.max(initial=0))
        table = self.host["page_table"][: len(page_ids), : len(columns)]
        table[columns < num_pages[:, None]] = pages
        first = (num_pages.cumsum() - num_pages).repeat(lengths)
        page, offset = np.divmod(positions, self._page_tokens)
        kv_slots: np.ndarray = pages[first + page].astype(np.int64) * self._page_tokens + offset
        return kv_slots


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts [5, 0], lengths [2, 3] -> [5, 6, 0, 1, 2]."""
    before = lengths.cumsum() - lengths
    ranges: np.ndarray = np.arange(lengths.sum()) + (starts - before).repeat(lengths)
    return ranges


def _fill(field: np.ndarray, values: np.ndarray, size: int, padding: int) -> None:
    field[: len(values)] = values
    field[len(values) : size] = padding


def _segments(slots: np.ndarray, ends: np.ndarray) -> tuple[Segment, ...]:
    """Consecutive sequences of one slot are one segment."""
    if len(slots) == 0:
        return ()
    is_last = np.append(slots[1:] != slots[:-1], True)
    bounds = [0, *ends[is_last].tolist()]
    return tuple(
        Segment(slot, start, end)
        for slot, (start, end) in zip(slots[is_last].tolist(), itertools.pairwise(bounds), strict=True)
    )
