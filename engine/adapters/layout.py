"""Where an adapter's tiles lie in pages. Pure ints: the scheduler counts pages with it.

A tile is (layer, projection, A or B, rank block of at most RANK_BLOCK rows): rows x in or rows x out
elements, contiguous, never over the edge of a page. What an adapter takes:

    elements = sum over its modules of rank x (in + out)
    pages    = elements / page_elems, plus the gaps

The gaps come to two pages at most for any set of projections of an 8B model with pages of 16 tokens, and to
none where it is all-linear of rank 16. Where a tile takes most of a page, pages may be half empty, not more.

Layers are placed in order, and in a layer the large tiles first, each in the first page with room: small
tiles fill the gaps that large ones leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import AdapterRefused
from engine.shape import NUM_PROJECTIONS, RANK_BLOCK, ModelShape


class Tile(NamedTuple):
    layer: int
    projection: int
    side: int  # 0: A, 1: B
    block: int
    rows: int
    width: int
    offset: int  # elements from the start of the first page


@dataclass(frozen=True, slots=True)
class ImageLayout:
    tiles: tuple[Tile, ...]
    free: tuple[int, ...]  # elements at the end of each page that no tile covers

    @property
    def num_pages(self) -> int:
        return len(self.free)


Ranks = Mapping[tuple[int, int], int]
"""(layer, projection) -> rank, of the adapted modules."""


RowsOf = Callable[[int, int, int], int]
"""(projection, side, rank) -> rows of that side that are to be placed."""


def all_rows(projection: int, side: int, rank: int) -> int:
    return rank


def num_elements(shape: ModelShape, ranks: Ranks, rows_of: RowsOf = all_rows) -> int:
    return sum(
        rows_of(projection, side, rank) * width
        for (_, projection), rank in ranks.items()
        for side, width in enumerate(shape.widths(projection))
    )


def pages_needed(shape: ModelShape, ranks: Ranks, page_elems: int, rows_of: RowsOf = all_rows) -> int:
    return make_layout(shape, ranks, page_elems, rows_of).num_pages


def too_many_pages(num_pages: int, capacity: int, page_bytes: int) -> AdapterRefused:
    return AdapterRefused(
        f"the adapter needs {num_pages} pages ({num_pages * page_bytes} bytes), but only {capacity} pages "
        f"({capacity * page_bytes} bytes) of the pool can hold adapters",
        param="pool_bytes",
    )


def too_many_bytes(num_bytes: int, capacity: int) -> AdapterRefused:
    return AdapterRefused(
        f"the adapter needs {num_bytes} bytes of host memory, host_cache_bytes is {capacity}",
        param="host_cache_bytes",
    )


def make_layout(shape: ModelShape, ranks: Ranks, page_elems: int, rows_of: RowsOf = all_rows) -> ImageLayout:
    free: list[int] = []
    open_pages: list[int] = []  # pages that a tile may still fit
    tiles = _tiles(shape, ranks, rows_of)
    smallest = min((tile.rows * tile.width for tile in tiles), default=0)
    placed = []
    for tile in tiles:
        size = tile.rows * tile.width
        assert size <= page_elems, "a page must hold the largest tile"
        page = next((page for page in open_pages if free[page] >= size), None)
        if page is None:
            page = len(free)
            free.append(page_elems)
            open_pages.append(page)
        placed.append(tile._replace(offset=(page + 1) * page_elems - free[page]))
        free[page] -= size
        if free[page] < smallest:
            open_pages.remove(page)
    return ImageLayout(tuple(placed), tuple(free))


def _tiles(shape: ModelShape, ranks: Ranks, rows_of: RowsOf) -> list[Tile]:
    """Not placed yet, in the order of placement."""
    widths = [shape.widths(projection) for projection in range(NUM_PROJECTIONS)]
    tiles = []
    for (layer, projection), rank in sorted(ranks.items()):
        for side, width in enumerate(widths[projection]):
            num_rows = rows_of(projection, side, rank)
            for block in range(-(-num_rows // RANK_BLOCK)):
                rows = min(RANK_BLOCK, num_rows - block * RANK_BLOCK)
                tiles.append(Tile(layer, projection, side, block, rows, width, offset=-1))
    return sorted(tiles, key=lambda tile: (tile.layer, -tile.rows * tile.width))
