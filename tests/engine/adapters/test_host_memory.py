"""Pages of images come from slabs and go back there."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from engine.adapters.host_memory import HostArena, HostPages
from engine.adapters.page_file import PageFile

PAGE_ELEMS = 1 << 20  # 32 pages of 2 MiB a slab
SLAB = 64 << 20


def arena() -> HostArena:
    return HostArena(PAGE_ELEMS, torch.bfloat16)


def addresses(pages: HostPages) -> set[int]:
    return {page.data_ptr() for page in pages}


def test_pages_are_as_asked_for() -> None:
    pages = arena().take(40)
    assert len(pages) == 40
    assert len(addresses(pages)) == 40
    assert {(page.shape, page.dtype) for page in pages} == {((PAGE_ELEMS,), torch.bfloat16)}
    assert pages.nbytes == 40 * PAGE_ELEMS * 2


def test_what_an_image_leaves_the_next_one_takes() -> None:
    memory = arena()
    first = memory.take(20)
    held = addresses(first)
    del first
    gc.collect()
    assert len(addresses(memory.take(20)) & held) == 20


def test_mixed_sizes_leave_no_gaps() -> None:
    """Adapters of many ranks come and go: no more slabs than the most pages held at once need."""
    memory = arena()
    rng = random.Random(0)
    held: list[HostPages] = []
    most = 0
    for _ in range(2000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            held.append(memory.take(rng.randrange(1, 160)))
        most = max(most, sum(map(len, held)))
        assert sum(map(len, held)) == len(set().union(*map(addresses, held)) if held else ())
    assert memory.num_bytes == -(-most * PAGE_ELEMS * 2 // SLAB) * SLAB


def test_a_slab_that_cannot_be_mapped_loses_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where descriptors have run out, which each slab takes one of."""

    def fail(*args: object) -> None:
        raise OSError

    memory = arena()
    with monkeypatch.context() as patch:
        patch.setattr(PageFile, "_slab", fail)
        for _ in range(3):
            with pytest.raises(OSError):
                memory.take(20)
    assert len(memory.take(32)) == 32
    assert memory.num_bytes == SLAB


def test_a_fresh_slab_is_one_span() -> None:
    pages = arena().take(20)
    assert all(pages.follows(i) for i in range(1, 20))
    span = pages.span(3, 5)
    assert span.shape == (5 * PAGE_ELEMS,)
    for number, page in enumerate(pages):
        page.fill_(number)
    assert [int(part[-1]) for part in span.chunk(5)] == [3, 4, 5, 6, 7]


def test_pages_of_two_slabs_do_not_follow_each_other() -> None:
    pages = arena().take(40)  # 32 a slab
    neighbours = [pages.follows(i) for i in range(1, 40)]
    assert neighbours.count(False) >= 1
    for i in (i for i in range(1, 40) if neighbours[i - 1]):
        assert torch.equal(pages.span(i - 1, 2), torch.cat([pages[i - 1], pages[i]]))


def test_memory_is_ready_before_it_is_needed() -> None:
    memory = arena()
    memory.reserve(3 * SLAB - 1).join()
    assert memory.num_bytes == 3 * SLAB
    assert len(addresses(memory.take(96))) == 96
    assert memory.num_bytes == 3 * SLAB


def test_a_page_larger_than_a_slab() -> None:
    memory = HostArena(SLAB, torch.float32)
    assert len(memory.take(2)) == 2
    assert memory.num_bytes == 2 * SLAB * 4


def test_threads_never_share_a_page() -> None:
    memory = arena()
    clashes = []

    def use(number: int) -> None:
        for _ in range(200):
            pages = memory.take(7)
            for page in pages:
                page[0] = number
            if any(page[0] != number for page in pages):
                clashes.append(number)

    threads = [threading.Thread(target=use, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
