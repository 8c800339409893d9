"""Choosing tokens from Llama-3's vocabulary: python -m kernels.sampling.bench

Floor: the logits once. Logits of one row lie in the L2.
"""

from __future__ import annotations

from functools import partial

import torch

from kernels.sampling import reference
from kernels.sampling.triton import Logprobs, RowParams, SamplingWorkspace, logprobs, sample
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

VOCAB = 128256
FILTERS: dict[str, tuple[float, int, float, float]] = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_p 0.95": (0.8, 0, 0.95, 0.0),
    "top_k 50, top_p 0.95": (0.8, 50, 0.95, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
    "top_p 0.95, temperature 2 (searches rows)": (2.0, 0, 0.95, 0.0),
}


def main() -> int:
    torch.manual_seed(0)
    for num_rows in (1, 64, 256):
        for dtype in (torch.bfloat16, torch.float32):
            measure(num_rows, dtype)
    return 0


def measure(num_rows: int, dtype: torch.dtype) -> None:
    copies = num_copies(num_rows * VOCAB * dtype.itemsize, least=2)
    logits = [_logits(num_rows).to(dtype) for _ in range(min(copies, 32))]
    out = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    workspace = SamplingWorkspace.allocate(num_rows, VOCAB, "cuda")
    floor_us = logits[0].nbytes / READ_BYTES_PER_US
    name = f"{num_rows} rows {str(dtype).removeprefix('torch.')}"
    argmax_us = graph_us([partial(torch.argmax, x, dim=-1) for x in logits])
    for case, filters in FILTERS.items():
        params = _params(num_rows, *filters)
        sample(logits[0], params, workspace, out)
        num_different = int((out != _reference(logits[0], params)).sum())
        # a number may lie within rounding of the border of two tokens, if tokens are many
        assert num_different <= (num_rows // 20 if filters[0] > 1 else 0), f"{case}: {num_different}"
        us = graph_us([partial(sample, x, params, workspace, out) for x in logits])
        report(f"{case}, {name}", us, floor_us, torch_argmax_us=round(argmax_us, 2))
    best = Logprobs.allocate(num_rows, 20, "cuda")
    num_top = torch.full((num_rows,), 5, dtype=torch.int32, device="cuda")
    us = graph_us([partial(logprobs, x, out, num_top, workspace, best) for x in logits])
    want = reference.top_logprobs(logits[-1].float().log_softmax(dim=-1), 5)
    assert torch.equal(best.token_ids[:, :5], want.token_ids)
    torch.testing.assert_close(best.logprobs[:, :5], want.logprobs, rtol=1e-5, atol=1e-5)
    report(f"logprobs 5, {name}", us, floor_us)


def _logits(num_rows: int) -> torch.Tensor:
    """The token of rank r has a probability of about r^-1.6."""
    ranks = torch.rand(num_rows, VOCAB, device="cuda").argsort(dim=-1)
    return (ranks + 1).float().log_().mul_(-1.6) + torch.rand(num_rows, 1, device="cuda") * 20


def _params(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> RowParams:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return RowParams(
        temperature=column(temperature),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p),
        log_min_p=column(min_p).log(),
        seeds=torch.arange(num_rows, device="cuda"),
        positions=torch.arange(num_rows, device="cuda"),
    )


def _reference(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """On the same device."""
    if params.temperature[0] == 0:
        return reference.top_logprobs(logits.float(), 1).token_ids[:, 0]
    values = reference.scale_by_temperature(logits.float(), params.temperature)
    values = reference.keep_min_p(values, params.log_min_p.exp())
    if params.top_k[0] > 0:
        values = reference.keep_top_k(values, params.top_k.long())
    if params.top_p[0] < 1:
        values = reference.keep_top_p(values, params.top_p)
    uniforms = reference.philox_uniform(params.seeds.cpu(), params.positions.cpu()).cuda()
    return reference.choose(values, uniforms)


if __name__ == "__main__":
    raise SystemExit(main())
