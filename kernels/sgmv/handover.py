"""What lies between A and B of fully sharded adapters, handed from rank to rank by the launches themselves.

For decode on GPUs that share memory (kernels.peers), in the place of `kernels.sgmv.split.exchange`: a shrink
writes its partial sums to the ranks whose expand takes them, this one too, and the expand waits for those of
its own tiles and adds them. So they cross the link while other parts are computed, and no launch lies in
between. By output every rank gets all sums; by input each gets those of the rows that it was dealt.

Several programs of an expand read the same sum, so none can make it EMPTY again, as in kernels.peers. Instead
each goes as one word of 64 bits with the call's tag, as in the LL protocol of NCCL: who finds another tag
waits. One set is for calls by output, one for those by input, and these take turns. So between two calls of a
set lies a sum over the ranks, which needs what all of them have computed from the first one: nobody writes a
set that another rank still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.peers.triton import EMPTY, PeerSets
from kernels.sgmv.exchange import exchange_planes
from kernels.sgmv.lists import STEP_FIELD
from kernels.sgmv.plan import SgmvPlan
from kernels.sgmv.split import Split, exchange
from kernels.sgmv.table import FusedModule

WORD = torch.int64

_STEP = tl.constexpr(STEP_FIELD)
# what a launch hands over, by how the base's weight is split
NOTHING = tl.constexpr(0)
BY_OUTPUT = tl.constexpr(1)
BY_INPUT = tl.constexpr(2)


class HandoverArguments(NamedTuple):
    """Of a shrink and its expand."""

    words: tuple[torch.Tensor, ...]  # of each rank
    part: int  # words of each sender there
    num_calls: int
    how: int
    rank: int
    world: int

    @classmethod
    def none(cls, unused: torch.Tensor) -> HandoverArguments:
        return cls((unused,), 0, 0, NOTHING.value, 0, 1)


@dataclass(slots=True)
class Handover:
    """How ranks that share memory exchange what they must: as said above, or else by `exchange_planes`.

    Of both kinds of sets, the first is for calls by output, the second for those by input.
    """

    sets: PeerSets  # [ranks, words, 1] of WORD
    plane_sets: PeerSets  # [ranks, rows, most_columns(...)] fp32
    split: Split
    num_calls: int  # rows of the resolved tiles, of which each call has one as its number
    wait_for_all: Callable[[], object]  # ranks, and what they have launched on their current streams
    _step: int = 0

    def has_room(self, plan: SgmvPlan, modules: Iterable[FusedModule]) -> bool:
        """For steps under this plan to hand over; those that are too large exchange."""
        return plan.kind == "decode" and num_words(plan, modules, self.split) <= self.sets[0].max_rows

    def next_step(self) -> int:
        """Its number, for the lists; all ranks must call it alike. Tags come again only behind a clearing."""
        if self._step == self._last_step:
            self.wait_for_all()
            for peers in self.sets:
                peers.rows[peers.rank].view(torch.uint8).fill_(EMPTY)
            self.wait_for_all()
            self._step = 0
        self._step += 1
        return self._step

    @property
    def _last_step(self) -> int:
        """Tags are not negative, as EMPTY is."""
        return (1 << 31) // self.num_calls - 1

    def arguments(self, module: FusedModule) -> HandoverArguments:
        by_output = self.split.by_output[module.projection]
        peers, how = (self.sets[0], BY_OUTPUT) if by_output else (self.sets[1], BY_INPUT)
        return HandoverArguments(
            peers.rows, peers.max_rows, self.num_calls, how.value, peers.rank, len(peers.rows)
        )

    def exchange(self, planes: torch.Tensor, module: FusedModule) -> torch.Tensor:
        """Where nothing is handed over; planes [splits, T, columns] as of kernels.sgmv.split.exchange."""
        by_output = self.split.by_output[module.projection]
        peers = self.plane_sets[0 if by_output else 1]
        if planes.shape[1] > peers.max_rows:
            return exchange(planes, self.split, by_output)
        return exchange_planes(planes, peers, by_output)


def num_words(plan: SgmvPlan, modules: Iterable[FusedModule], split: Split) -> int:
    """That a rank may hand to one at once in a step under this plan."""
    each = split.most_rows(plan.max_rank)
    return max(
        plan.shrink.num_splits(module.in_features) * plan.max_tokens * len(module.widths) * each
        for module in modules
    )


@triton.jit
def call_tag(lists_ptr: tl.tensor, call: tl.tensor, calls: tl.tensor) -> tl.tensor:
    """Of call number `call` of `calls` in the step that the lists are of."""
    return tl.load(lists_ptr + _STEP) * calls + call


@triton.jit
def hand_over(
    sums: tl.tensor,
    inside: tl.tensor,
    tag: tl.tensor,
    words_ptrs: tl.tuple,
    at: tl.tensor,
    first: tl.tensor,
    COLUMNS: tl.constexpr,
    HOW: tl.constexpr,
    WORLD: tl.constexpr,
) -> None:
    """sums [tokens, ranks] fp32, of the rank rows from `first`; `at`: where the first token's lie."""
    token = tl.arange(0, sums.shape[0])[:, None]
    row = first + tl.arange(0, sums.shape[1])[None, :]
    low = sums.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = tag.to(tl.int64) << 32 | low
    for peer in tl.static_range(WORLD):
        if HOW == BY_OUTPUT:
            tl.store(words_ptrs[peer] + at + token * COLUMNS + row, word, mask=inside)
        else:  # dealt to the ranks in turn
            is_theirs = inside & (row % WORLD == peer)
            tl.store(words_ptrs[peer] + at + token * COLUMNS + row // WORLD, word, mask=is_theirs)


@triton.jit
def take(words_ptrs: tl.tensor, inside: tl.tensor, tag: tl.tensor) -> tl.tensor:
    """Sums once they have come, fp32; zeros elsewhere."""
    word = tl.load(words_ptrs, mask=inside, other=0, volatile=True)
    while tl.max((inside & ((word >> 32).to(tl.int32) != tag)).to(tl.int32)) != 0:
        word = tl.load(words_ptrs, mask=inside, other=0, volatile=True)
    return tl.where(inside, word.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
