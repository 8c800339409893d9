"""Rotary embedding, KV write and attention, on a GPU in one launch, against the references in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pytest
import torch

from kernels import paged_attention
from kernels.paged_attention import rotary_attention as module
from kernels.paged_attention.reference import paged_attention as paged_attention_reference
from kernels.paged_attention.rotary_attention import has_one_launch, rotary_attention
from kernels.paged_attention.triton import DECODE_KEYS
from kernels.rotary.reference import rotary_kv_write as rotary_kv_write_reference
from tests.kernels.test_paged_attention_triton import LAYER, TOLERANCE, Case, make_case
from tests.kernels.triton_cases import DEVICE, DTYPES, ULP, adapter_slots, delta_of, randn

HEAD_DIM = 128


class Step(Case):
    """Its newest keys and values are not written yet."""

    @classmethod
    def of(cls, lens: Sequence[tuple[int, int]], **shape: object) -> Step:
        """`lens`: (query_len, context_len) of each sequence; a context of 0 is a padding row's."""
        case = make_case(lens, **{"head_dim": HEAD_DIM, **shape})  # type: ignore[arg-type]
        step = cls(*case)
        pages, page_tokens = step.kv_pages, step.kv_pages.shape[3]
        for slot in step.kv_slots.tolist():
            if slot >= 0:
                pages[slot // page_tokens, LAYER, :, slot % page_tokens] = torch.nan
        return step

    @property
    def kv_slots(self) -> torch.Tensor:
        """[T] int64"""
        page_tokens, slots = self.kv_pages.shape[3], []
        bounds = self.cu_query_lens.tolist()
        for row, context in enumerate(self.context_lens.tolist()):
            num_queries = bounds[row + 1] - bounds[row]
            for position in range(context - num_queries, context):
                page = int(self.page_table[row, position // page_tokens])
                slots.append(page * page_tokens + position % page_tokens if context else -1)
        return torch.tensor(slots, device=DEVICE)

    def check(self, with_delta: bool = False) -> None:
        num_kv_heads, head_dim = self.kv_pages.shape[4:]
        num_rows, num_heads = self.q.shape[:2]
        dtype = self.q.dtype
        qkv = randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        angles = randn(num_rows, head_dim // 2).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        delta = slots = None
        summed = qkv
        if with_delta:
            slots = adapter_slots(num_rows)
            delta = delta_of(qkv, slots)
            summed = torch.where(slots[:, None] >= 0, (qkv.float() + delta.float()).to(dtype), qkv)
        kv_slots = self.kv_slots
        real = kv_slots >= 0
        want_pages = self.kv_pages.clone()
        q = torch.zeros_like(self.q)
        q[real] = rotary_kv_write_reference(
            summed[real], cos[real], sin[real], want_pages, LAYER, kv_slots[real]
        )
        want = paged_attention_reference(
            q.float(), want_pages.float(), LAYER, self.page_table, self.context_lens, self.cu_query_lens
        )
        want[~real] = 0.0
        qkv[~real] = torch.nan

        got = rotary_attention(
            qkv, cos, sin, self.kv_pages, LAYER, kv_slots, self.page_table, self.plan(), delta, slots
        )
        assert got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < TOLERANCE[dtype]
        torch.testing.assert_close(
            self.kv_pages.float(), want_pages.float(), atol=ULP[dtype], rtol=ULP[dtype], equal_nan=True
        )
        assert not self.workspace.arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (2, 2), (16, 1), (6, 2)])
def test_lengths_around_pages_and_blocks(
    dtype: torch.dtype, with_delta: bool, num_heads: int, num_kv_heads: int
) -> None:
    contexts = [1, 2, 16, 17, DECODE_KEYS, DECODE_KEYS + 1, 2 * DECODE_KEYS + 17]
    lens = [(1, context) for context in contexts]
    Step.of(lens, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype).check(with_delta)


@pytest.mark.parametrize("num_programs", [1, 6, 400])
def test_a_long_context_is_cut_and_merged(num_programs: int) -> None:
    """In up to 20 splits, more than are merged at a time; the second one's last holds the new token alone."""
    contexts = (20 * DECODE_KEYS - 3, 2 * DECODE_KEYS + 1, 5)
    lens = [(1, context) for context in contexts]
    Step.of(lens, dtype=torch.float16, num_programs=num_programs).check()


@pytest.mark.parametrize("page_tokens", [8, 32, 64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_page_sizes(page_tokens: int, index_dtype: torch.dtype) -> None:
    lens = [(1, 150), (1, 37)]
    Step.of(lens, dtype=torch.float16, page_tokens=page_tokens, index_dtype=index_dtype).check(
        with_delta=True
    )


def test_padding_rows_give_zeros() -> None:
    Step.of([(1, 20), (1, 0), (1, 70), (1, 0)], dtype=torch.float16).check()


def test_other_steps_and_heads() -> None:
    """What two launches do everywhere."""
    Step.of([(1, 9), (20, 30), (1, 70)], dtype=torch.float16).check(with_delta=True)
    Step.of([(1, 9), (1, 70)], head_dim=24).check()


@pytest.mark.gpu
def test_takes_one_launch() -> None:
    def takes(**shape: object) -> bool:
        step = Step.of([(1, 9)], **{"dtype": torch.bfloat16, **shape})
        return has_one_launch(step.q, step.kv_pages)

    assert takes() == (torch.cuda.get_device_capability() >= (9, 0))
    assert not takes(head_dim=64)
    assert not takes(dtype=torch.float32)
    assert not takes(page_tokens=4)
    assert not takes(page_tokens=128)


@pytest.fixture
def no_gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with a Triton that lacks what the kernel needs."""
    monkeypatch.delattr(paged_attention, "rotary_decode_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "kernels.paged_attention.rotary_decode_kernel", None)
    module._kernel.cache_clear()
    yield
    module._kernel.cache_clear()


@pytest.mark.usefixtures("no_gluon")
def test_without_gluon_there_is_no_kernel_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert module._kernel() is None
    assert module._kernel() is None
    assert caplog.text.count("a launch more") == 1
    Step.of([(1, 70)], dtype=torch.float16).check()
