"""The GPU's small linears against products in single precision."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.tiles import FEW_ROWS, FEW_ROWS_BESIDE, FULL_ROWS, Tile
from kernels.linear.triton import linear, small_linear, tile_for
from kernels.sgmv.plan import decode_plan
from kernels.sgmv.table import RANK_BLOCK
from tests.kernels.triton_cases import poisoned, randn

HALF_DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}  # relative, Frobenius: one rounding


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    want = x.float() @ weight.float().T
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("tile", [FEW_ROWS, *FULL_ROWS])
@pytest.mark.parametrize(("num_rows", "columns", "in_features"), [(1, 64, 512), (3, 70, 264), (16, 9, 40)])
def test_widths_that_no_tile_divides(
    num_rows: int, columns: int, in_features: int, tile: Tile, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = randn(num_rows, in_features, dtype=dtype), randn(columns, in_features, dtype=dtype)
    got = small_linear(x, weight, tile, poisoned(num_rows, columns, dtype=dtype))
    assert error(got, x, weight) < TOLERANCE[dtype]


def test_tiles_are_chosen_by_rows_and_columns() -> None:
    def columns(num_rows: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> int | None:
        tile = tile_for(num_rows, torch.empty(*shape, dtype=dtype))
        return None if tile is None else tile.columns

    assert [columns(rows, 4096, 4096) for rows in (1, 16, 17, 64, 65)] == [64, 64, None, 32, None]
    assert [columns(64, width, 4096) for width in (6144, 28672)] == [64, 128]
    assert columns(1, 576, 576) is None, "too small"
    assert columns(1, 4096, 4100) is None, "not aligned"
    assert columns(1, 4096, 4096, dtype=torch.float32) is None


def test_a_shrink_finds_room_beside_our_products() -> None:
    """In the shared memory of an H200's multiprocessor; each CTA takes a KiB more than it asks for."""
    for tile in (FEW_ROWS_BESIDE, *FULL_ROWS):
        linear_bytes = tile.num_stages * (tile.rows + tile.columns) * tile.block_k * 2
        shrink = decode_plan(tile.rows, 64).shrink
        shrink_bytes = (shrink.num_stages - 1) * (shrink.rows + RANK_BLOCK) * shrink.block_k * 2
        assert linear_bytes + 1024 + shrink_bytes + 1024 <= 228 << 10


def test_no_rows() -> None:
    weight = randn(8, 16, dtype=torch.float16)
    assert small_linear(weight[:0], weight, FEW_ROWS, weight.new_empty(0, 8)).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 17, 64, 133])
def test_real_sizes_and_dependent_launches(num_rows: int) -> None:
    """Two in a row, the second starting before the first has ended, give the same bits as one by one."""
    torch.manual_seed(0)
    up = randn(14336, 4096, dtype=torch.bfloat16, scale=0.02)
    down = randn(4096, 14336, dtype=torch.bfloat16, scale=0.02)
    x = randn(num_rows, 4096, dtype=torch.bfloat16)
    middle = linear(x, up)
    want = linear(middle, down)
    assert error(middle, x, up) < TOLERANCE[torch.bfloat16]
    assert error(want, middle, down) < TOLERANCE[torch.bfloat16]
    buffer, out = torch.empty_like(middle), torch.empty_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.fill_(torch.nan)
        linear(x, up, buffer, pdl=True)
        linear(buffer, down, out, pdl=True)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
