"""The GPU's choice of tokens against the reference's, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.sampling import reference, triton
from kernels.sampling.triton import Logprobs, Penalties, RowParams, SamplingWorkspace, sample
from tests.kernels.triton_cases import DEVICE, DTYPES

EDGE_SEEDS = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 32]


@dataclass(frozen=True, slots=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


FILTERS = [
    Row(),
    Row(temperature=0.6),
    Row(top_k=1),
    Row(top_k=7),
    Row(top_k=150),
    Row(top_k=10_000),
    Row(top_p=1e-9),
    Row(top_p=0.5),
    Row(top_p=0.99, temperature=2.5),
    Row(min_p=0.05),
    Row(min_p=1.0),
    Row(min_p=1e-30, top_k=3),
    Row(top_k=20, top_p=0.7, min_p=0.01, temperature=1.5),
    Row(temperature=1e-45),
    Row(temperature=0.0, top_k=3),
]


def params_of(rows: list[Row]) -> RowParams:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(DEVICE)

    return RowParams(
        temperature=column([row.temperature for row in rows], torch.float32),
        top_k=column([row.top_k for row in rows], torch.int32),
        top_p=column([row.top_p for row in rows], torch.float32),
        log_min_p=column([row.min_p for row in rows], torch.float32).cpu().log().to(DEVICE),
        seeds=column([row.seed for row in rows], torch.int64),
        positions=column([row.position for row in rows], torch.int64),
    )


def make_workspace(logits: Tensor) -> SamplingWorkspace:
    workspace = SamplingWorkspace.allocate(len(logits), logits.shape[1], DEVICE)
    for tensor in (workspace.best, workspace.masses, workspace.cuts, workspace.list_values):
        tensor.fill_(torch.nan)
    for tensor in (workspace.tokens, workspace.list_tokens):
        tensor.fill_(-7)
    return workspace


def got(logits: Tensor, rows: list[Row]) -> list[int]:
    out = torch.full((len(rows),), -1, device=DEVICE)
    sample(logits.to(DEVICE), params_of(rows), make_workspace(logits), out)
    return out.tolist()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks even of small rows, with room for a few values only."""
    monkeypatch.setattr(triton, "CHUNK", 64)
    monkeypatch.setattr(triton, "LIST", 16)
    monkeypatch.setattr(triton, "ROW_BLOCK", 128)


def want(logits: Tensor, rows: list[Row]) -> list[int]:
    """The order of operations of the CPU's sampler."""
    chosen = []
    for line, row in zip(logits.float().cpu(), rows, strict=True):
        if row.temperature == 0:
            chosen.append(min(torch.nonzero(line == line.max()).flatten().tolist()))
            continue
        uniform = reference.philox_uniform(torch.tensor([row.seed]), torch.tensor([row.position]))
        chosen.append(int(reference.choose(filtered(line[None], row), uniform)))
    return chosen


def filtered(values: Tensor, row: Row) -> Tensor:
    values = reference.scale_by_temperature(values, torch.tensor([row.temperature]))
    if row.min_p > 0:
        values = reference.keep_min_p(values, torch.tensor([row.min_p]))
    if 0 < row.top_k < values.shape[1]:
        values = reference.keep_top_k(values, torch.tensor([row.top_k]))
    if row.top_p < 1:
        values = reference.keep_top_p(values, torch.tensor([row.top_p]))
    return values


def make_logits(num_rows: int, vocab_size: int, tied: bool = False, seed: int = 0) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if tied else logits


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tied", [False, True])
def test_draws_the_reference_s_token(tied: bool) -> None:
    rows = [
        Row(row.temperature, row.top_k, row.top_p, row.min_p, 100 + i, i) for i, row in enumerate(FILTERS)
    ]
    logits = make_logits(len(rows), 203, tied)
    logits[:, 11] = -torch.inf
    assert got(logits, rows) == want(logits, rows)


def test_numbers_are_those_of_the_cpu() -> None:
    """Over a flat distribution the token shows a number's first bits."""
    rows = [Row(seed=seed, position=position) for seed in EDGE_SEEDS for position in (0, 1, 1 << 33)]
    logits = torch.zeros(len(rows), 4096)
    assert got(logits, rows) == want(logits, rows)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_token_is_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = make_logits(5, 500, tied=True).to(dtype)
    rows = [Row(temperature=0)] * 5
    assert got(logits, rows) == want(logits, rows)
    assert got(torch.full((2, 70), -torch.inf), rows[:2]) == [0, 0]


def test_a_row_s_token_does_not_depend_on_the_others() -> None:
    rows = [Row(top_p=0.9, seed=s) for s in range(3)]
    logits = make_logits(3, 200)
    together = got(logits, rows)
    assert [got(logits[[i]], [rows[i]])[0] for i in range(3)] == together


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
def test_nan_logits_are_not_chosen() -> None:
    rows = [Row(), Row(top_k=2), Row(top_p=0.5), Row(temperature=0)]
    logits = torch.full((4, 100), torch.nan)
    assert all(0 <= token < 100 for token in got(logits, rows))
    logits[:, 70] = -3.0
    assert got(logits, rows) == [70] * 4


def make_penalties(num_rows: int, vocab_size: int) -> Penalties:
    """Every third row has none."""
    slots = torch.arange(num_rows, dtype=torch.int32).flip(0)
    slots[::3] = -1
    return Penalties(
        history=torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=DEVICE),
        slots=slots.to(DEVICE),
        repetition=torch.tensor([0.5, 1.0, 1.7, 1.3] * num_rows, device=DEVICE)[:num_rows],
        frequency=torch.tensor([-1.0, 0.0, 0.25] * num_rows, device=DEVICE)[:num_rows],
        presence=torch.tensor([-2.0, 0.0, 0.5, 0.1, 0.3] * num_rows, device=DEVICE)[:num_rows],
    )


def test_penalties_are_the_reference_s_bits() -> None:
    """From a prompt, an output of before, and tokens recorded step by step."""
    num_rows, vocab_size = 7, 400
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> Tensor:
        return torch.randint(vocab_size, (count,), generator=generator)

    penalties = make_penalties(num_rows, vocab_size)
    penalties.history.fill_(99)
    prompts, outputs = [tokens(30) for _ in range(num_rows)], [tokens(20) for _ in range(num_rows)]
    for row, slot in enumerate(penalties.slots.tolist()):
        if slot >= 0:
            triton.start_history(penalties.history[slot], prompts[row].to(DEVICE), outputs[row].to(DEVICE))
    for _ in range(5):
        step = tokens(num_rows)
        triton.record_tokens(step.to(DEVICE), penalties)
        outputs = [torch.cat((output, step[[row]])) for row, output in enumerate(outputs)]

    logits = make_logits(num_rows, vocab_size)
    penalized = logits.to(DEVICE)
    triton.penalize_(penalized, penalties)

    for row, slot in enumerate(penalties.slots.tolist()):
        seen = torch.tensor(sorted({*prompts[row].tolist(), *outputs[row].tolist()}))
        counts = (outputs[row][:, None] == seen).sum(0)
        if slot >= 0:
            reference.penalize_(
                logits,
                torch.full_like(seen, row),
                seen,
                counts,
                penalties.repetition.cpu(),
                penalties.frequency.cpu(),
                penalties.presence.cpu(),
            )
    assert torch.equal(penalized.cpu(), logits)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_equal_the_reference(dtype: torch.dtype) -> None:
    num_top = [-1, 0, 1, 6, 20]
    logits = make_logits(5, 150, tied=dtype != torch.float32).to(dtype)
    chosen = torch.tensor([3, 149, 0, 77, 5])
    out = Logprobs(*(tensor.fill_(-5) for tensor in Logprobs.allocate(5, 20, DEVICE)))
    triton.logprobs(
        logits.to(DEVICE),
        chosen.to(DEVICE),
        torch.tensor(num_top, dtype=torch.int32, device=DEVICE),
        make_workspace(logits),
        out,
    )
    raw = logits.float().log_softmax(-1)
    for row, count in enumerate(num_top):
        best = reference.top_logprobs(raw[[row]], max(count, 1))
        got_ids, got_logprobs = out.token_ids[row].cpu(), out.logprobs[row].cpu()
        assert got_ids[: max(count, 0)].tolist() == best.token_ids[0][: max(count, 0)].tolist()
        torch.testing.assert_close(
            got_logprobs[: max(count, 0)], best.logprobs[0][: max(count, 0)], atol=2e-6, rtol=1e-6
        )
        assert (got_ids[max(count, 0) :] == -5).all()
        assert (got_logprobs[max(count, 0) :] == -5).all()
    torch.testing.assert_close(
        out.chosen[1:].cpu(), raw.gather(1, chosen[:, None])[1:, 0], atol=2e-6, rtol=1e-6
    )
    assert float(out.chosen[0]) == -5


def is_choice(line: Tensor, row: Row, token: int) -> bool:
    """Whether the number lies in the token's part of the unit interval, give or take 2e-5."""
    if row.temperature == 0:
        return token == int(line.argmax())
    values = filtered(line.float().cpu()[None], row)[0].double()
    ends = values.softmax(-1).cumsum(-1)
    uniform = float(reference.philox_uniform(torch.tensor([row.seed]), torch.tensor([row.position])))
    start = float(ends[token - 1]) if token else 0.0
    return start - 2e-5 <= uniform <= float(ends[token]) + 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, 2.5, 6.0])
def test_a_real_vocabulary(dtype: torch.dtype, scale: float) -> None:
    """Nearly always the CPU's token. A captured graph gives the tokens of positions written after it."""
    rows = [
        Row(row.temperature, row.top_k, row.top_p, row.min_p, 7 * i, 5) for i, row in enumerate(FILTERS * 3)
    ]
    logits = (make_logits(len(rows), 128_256) / 3 * scale).to(dtype)
    tokens = got(logits, rows)
    differing = [i for i, token in enumerate(want(logits, rows)) if token != tokens[i]]
    assert len(differing) <= 3
    assert all(is_choice(logits[i], rows[i], tokens[i]) for i in differing)

    params, workspace = params_of(rows), make_workspace(logits)
    out, device_logits = torch.empty(len(rows), dtype=torch.int64, device=DEVICE), logits.to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    params.positions.fill_(1)
    with torch.cuda.graph(graph):
        sample(device_logits, params, workspace, out)
    params.positions.fill_(5)
    graph.replay()
    assert out.tolist() == tokens
