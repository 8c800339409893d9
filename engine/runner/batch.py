"""One step's work as tensors: which tokens, where their keys and values go, whose adapter applies.

Knows nothing of requests or scheduling: the runner gives page ids and adapter slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.plan import ScheduledChunk
from kernels.sgmv.table import Segment


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences, sorted by adapter slot; N rows of logits. All tensors int64."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    kv_slots: torch.Tensor  # [T], page_id * page_tokens + offset in the page
    page_table: torch.Tensor  # [S, P], padded with 0
    context_lens: torch.Tensor  # [S], this step's tokens included
    query_lens: torch.Tensor  # [S]
    cu_query_lens: torch.Tensor  # [S + 1]
    logits_indices: torch.Tensor  # [N], rows of the hidden states
    segments: tuple[Segment, ...]  # cover [0, T) in order; tokens without an adapter first
    order: tuple[int, ...]  # [N]: logits row i belongs to the order[i]-th of the scheduled sequences


def build_batch(seqs: Sequence[ScheduledChunk], device: torch.device | str, page_tokens: int) -> ForwardBatch:
    """`seqs` must not be empty. Everything goes to the device in one copy."""
    rows = sorted(range(len(seqs)), key=lambda i: seqs[i].adapter_slot)
    ordered = [seqs[i] for i in rows]
    query_lens = np.array([len(seq.token_ids) for seq in ordered])
    ends = query_lens.cumsum()
    wanted = [row for row, seq in enumerate(ordered) if seq.samples]
    fields = {
        "token_ids": np.concatenate([seq.token_ids for seq in ordered]),
        "positions": np.concatenate([_positions(seq) for seq in ordered]),
        "kv_slots": np.concatenate([_kv_slots(seq, page_tokens) for seq in ordered]),
        "page_table": _page_table(ordered),
        "context_lens": query_lens + [seq.start for seq in ordered],
        "query_lens": query_lens,
        "cu_query_lens": np.concatenate(([0], ends)),
        "logits_indices": ends[wanted] - 1,
    }
    return ForwardBatch(
        **_to_device(fields, device),
        segments=_segments(ordered, ends.tolist()),
        order=tuple(rows[row] for row in wanted),
    )


def _positions(seq: ScheduledChunk) -> np.ndarray:
    return np.arange(seq.start, seq.start + len(seq.token_ids))


def _kv_slots(seq: ScheduledChunk, page_tokens: int) -> np.ndarray:
    pages, offsets = np.divmod(_positions(seq), page_tokens)
    return np.asarray(seq.page_ids)[pages] * page_tokens + offsets


def _page_table(seqs: Sequence[ScheduledChunk]) -> np.ndarray:
    table = np.zeros((len(seqs), max(len(seq.page_ids) for seq in seqs)), dtype=np.int64)
    for row, seq in zip(table, seqs, strict=True):
        row[: len(seq.page_ids)] = seq.page_ids
    return table


def _segments(seqs: Sequence[ScheduledChunk], ends: Sequence[int]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0
    for seq, end in zip(seqs, ends, strict=True):
        if segments and segments[-1].slot == seq.adapter_slot:
            segments[-1] = segments[-1]._replace(end=end)
        else:
            segments.append(Segment(seq.adapter_slot, start, end))
        start = end
    return tuple(segments)


def _to_device(fields: dict[str, np.ndarray], device: torch.device | str) -> dict[str, torch.Tensor]:
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in fields.values()]))
    parts = torch.split(packed.to(device, torch.int64), [array.size for array in fields.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(fields.items(), parts, strict=True)}
