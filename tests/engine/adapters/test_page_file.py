"""Two mappings of one file of pages."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import torch

from engine.adapters.page_file import SLAB_BYTES, PageFile

PAGE_ELEMS = 5_000_000  # some bytes of a slab belong to no page


def test_what_one_writes_the_other_reads() -> None:
    ours = PageFile(PAGE_ELEMS, torch.float16)
    theirs = PageFile(PAGE_ELEMS, torch.float16, os.dup(ours.fd))
    ours.grow(1)
    last = ours.pages_per_slab - 1
    theirs.page(last).fill_(3)
    assert torch.equal(ours.page(last), torch.full((PAGE_ELEMS,), 3.0, dtype=torch.float16))
    ours.grow(3)
    for number in range(3 * ours.pages_per_slab):
        ours.page(number).fill_(number)
    assert [int(theirs.page(n)[-1]) for n in range(3 * ours.pages_per_slab)] == list(
        range(3 * ours.pages_per_slab)
    )


def test_fresh_pages_are_zero_and_a_slab_has_whole_huge_pages() -> None:
    file = PageFile(PAGE_ELEMS, torch.float16)
    file.grow(1)
    assert file.slab_bytes % (2 << 20) == 0
    assert file.slab_bytes - SLAB_BYTES < 2 << 20
    assert not file.page(0).any()


def test_it_is_closed_when_nobody_has_a_page() -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = PageFile(PAGE_ELEMS, torch.float16)
    file.grow(1)
    page = file.page(0)
    del file
    page.fill_(1)  # still mapped
    del page
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_limit_of_descriptors_is_raised() -> None:
    script = (
        "import resource; from engine.adapters.page_file import raise_fd_limit; raise_fd_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 256 && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) == min(hard if hard != resource.RLIM_INFINITY else 1 << 16, 1 << 16)
