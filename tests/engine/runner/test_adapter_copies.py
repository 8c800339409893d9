"""Pages that follow each other, in host memory and in the pool, are copied together."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from engine.adapters.host_memory import HostArena
from engine.runner.adapter_copies import _last_pages, _runs
from tests.engine.adapters.adapter_dirs import PAGE_ELEMS, load, lora_tensors, write_adapter


def test_runs_cover_every_page_once_and_follow_in_both_memories() -> None:
    rng = random.Random(0)
    arena = HostArena(1 << 20, torch.float16)
    for _ in range(50):
        held = [arena.take(rng.randrange(1, 30)) for _ in range(5)]
        del held[rng.randrange(5)]
        pages = arena.take(40)
        ids = sorted(rng.sample(range(60), 40))
        start, stop = sorted(rng.sample(range(41), 2))
        covered: list[int] = []
        for first, count in _runs(pages, tuple(ids), start, stop):
            assert ids[first : first + count] == list(range(ids[first], ids[first] + count))
            assert all(pages.follows(i) for i in range(first + 1, first + count))
            covered += range(first, first + count)
        assert covered == list(range(start, stop))


def test_a_fresh_image_into_a_fresh_pool_is_one_copy() -> None:
    pages = HostArena(1 << 20, torch.float16).take(20)
    assert list(_runs(pages, tuple(range(7, 27)), 0, 20)) == [(0, 20)]


def test_a_layer_waits_for_the_last_page_that_it_or_one_before_has_a_tile_in(tmp_path: Path) -> None:
    tensors = lora_tensors(rank=8)
    image = load(write_adapter(tmp_path / "a", tensors), page_elems=PAGE_ELEMS)
    pages = _last_pages(image)
    ends = [int(layer.max()) // PAGE_ELEMS for layer in image.tile_offsets]
    assert pages == [max(ends[: i + 1]) for i in range(len(ends))]
    assert pages[-1] == image.num_pages - 1


def test_layers_without_tiles_wait_for_those_before(tmp_path: Path) -> None:
    image = load(write_adapter(tmp_path / "a", lora_tensors(projections=["q_proj"], layers=[1])))
    assert _last_pages(image)[0] == 0
