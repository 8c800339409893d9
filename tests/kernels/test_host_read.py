"""Host memory read by a kernel is what it was."""

from __future__ import annotations

import pytest
import torch

from kernels.host_read.reference import read_host as reference
from kernels.host_read.triton import read_host
from tests.kernels.triton_cases import DEVICE


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_equals_the_reference(count: int, dtype: torch.dtype) -> None:
    source = torch.arange(count, dtype=dtype)
    want = torch.full((count + 3,), -1, dtype=dtype)
    reference(source, want[:count])
    got = torch.full((count + 3,), -1, dtype=dtype).to(DEVICE)
    read_host(source.pin_memory() if DEVICE == "cuda" else source, got[:count])
    assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
def test_overtakes_copies_that_were_issued_before() -> None:
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pages = torch.zeros(200, 1 << 20, dtype=torch.int16, pin_memory=True)
    pool = torch.empty_like(pages, device="cuda")
    source = torch.arange(4096, dtype=torch.int32).pin_memory()
    out = torch.zeros(4096, dtype=torch.int32, device="cuda")
    read_host(source, out)  # compiles
    torch.cuda.synchronize()
    copied, read = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(copies):
        for page, target in zip(pages, pool, strict=True):
            target.copy_(page, non_blocking=True)
        copied.record()
    read_host(source, out)
    read.record()
    read.synchronize()
    assert not copied.query(), "400 MiB have arrived before 16 KiB"  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), source)
