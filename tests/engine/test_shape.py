from __future__ import annotations

import dataclasses

import pytest

from engine.shape import PROJECTIONS, RANK_BLOCK, ModelShape, Widths

LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
TINY = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
)


def test_a_page_of_llama_3_8b_in_bf16_is_2_mib() -> None:
    assert LLAMA_8B.page_elems(page_tokens=16) * 2 == 2 << 20
    assert LLAMA_8B.fit_page_tokens(16) == 16


def test_the_widths_are_those_of_the_projections() -> None:
    widths = {name: LLAMA_8B.widths(i) for i, name in enumerate(PROJECTIONS)}
    assert widths == {
        "q_proj": Widths(4096, 4096),
        "k_proj": Widths(4096, 1024),
        "v_proj": Widths(4096, 1024),
        "o_proj": Widths(4096, 4096),
        "gate_proj": Widths(4096, 14336),
        "up_proj": Widths(4096, 14336),
        "down_proj": Widths(14336, 4096),
    }


def test_heads_may_be_wider_together_than_the_hidden_state() -> None:
    wide = dataclasses.replace(TINY, head_dim=32)
    assert wide.widths(PROJECTIONS.index("q_proj")) == (64, 128)
    assert wide.widths(PROJECTIONS.index("o_proj")) == (128, 64)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
def test_a_page_is_doubled_until_the_largest_tile_fits_and_no_further(page_tokens: int) -> None:
    """FR-37: a tile never straddles a page."""
    fitted = TINY.fit_page_tokens(page_tokens)
    assert TINY.max_tile_elems == RANK_BLOCK * 128
    assert TINY.page_elems(fitted) >= TINY.max_tile_elems
    assert fitted == page_tokens or TINY.page_elems(fitted // 2) < TINY.max_tile_elems
    assert fitted in [page_tokens << i for i in range(8)]
