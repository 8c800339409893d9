"""The demo model on a GPU: its tokens are the CPU backend's, and PEFT's, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deployments.demo.base_model import prepare_base_model
from engine import Engine, EngineConfig, SamplingParams
from engine.config import Device, Dtype
from engine.request import RequestOutput
from tests.engine.demo_rows import ADAPTERS, Row, demo_rows, every_row, load_adapters
from tests.engine.peft_reference import CONTRACTS, PeftReference, chosen

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")

Answers = list[tuple[Row, RequestOutput]]  # every row in one batch, then some of them alone


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_base_model(progress=False)


@pytest.fixture(scope="module")
def reference(model: Path) -> PeftReference:
    return PeftReference(model, ADAPTERS)


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> Answers:
    return answer(model, "cpu", "float32")


@pytest.fixture(scope="module")
def on_gpu(model: Path) -> dict[Dtype, Answers]:
    return {dtype: answer(model, "cuda", dtype) for dtype in DTYPES}


def answer(model: Path, device: Device, dtype: Dtype) -> Answers:
    config = EngineConfig(
        str(model), device, dtype, max_num_seqs=16, num_pages=1000, max_rank=64, prefix_cache=False
    )
    engine = Engine(config)
    load_adapters(engine)
    rows = every_row(engine.tokenizer)
    outputs = engine.generate([row.prompt for row in rows], GREEDY, [row.adapter for row in rows])
    alone = demo_rows(engine.tokenizer)
    for row in alone:
        outputs += engine.generate([row.prompt], GREEDY, [row.adapter])
    engine.close()
    return list(zip(rows + alone, outputs, strict=True))


@pytest.fixture(scope="module")
def rounding(model: Path, reference: PeftReference, on_gpu: dict[Dtype, Answers]) -> torch.Tensor:
    """What bfloat16 costs PEFT: its errors of the log-probabilities of the tokens that we chose.

    FR-45's 0.05 is of a model of two layers; in this one of thirty, PEFT is off by more than 0.1.
    """
    coarse = PeftReference(model, ADAPTERS, torch.bfloat16)
    errors = []
    for row, output in on_gpu["bfloat16"]:
        exact, rounded = (
            chosen(judge.forced(row.prompt, output.token_ids, row.adapter), output)
            for judge in (reference, coarse)
        )
        errors.append((rounded - exact).abs())
    return torch.cat(errors)


def test_float32_keeps_the_contract(reference: PeftReference, on_gpu: dict[Dtype, Answers]) -> None:
    """FR-45."""
    for row, output in on_gpu["float32"]:
        reference.check_greedy(row.prompt, output, row.adapter)


def test_bfloat16_rounds_no_worse_than_peft(
    reference: PeftReference, on_gpu: dict[Dtype, Answers], rounding: torch.Tensor
) -> None:
    errors = [reference.errors(row.prompt, output, row.adapter) for row, output in on_gpu["bfloat16"]]
    ours = torch.cat([error.logprobs for error in errors])
    assert float(ours.mean()) <= 1.25 * float(rounding.mean())
    assert float(ours.max()) <= 1.5 * float(rounding.max())
    assert float(torch.cat([error.gaps for error in errors]).max()) <= tie(rounding)


def test_float32_tokens_are_those_of_the_cpu_backend(
    reference: PeftReference, on_cpu: Answers, on_gpu: dict[Dtype, Answers]
) -> None:
    check_equal(reference, on_cpu, on_gpu["float32"], CONTRACTS["float32"].tie)


def test_bfloat16_tokens_are_those_of_the_cpu_backend(
    reference: PeftReference, on_cpu: Answers, on_gpu: dict[Dtype, Answers], rounding: torch.Tensor
) -> None:
    check_equal(reference, on_cpu, on_gpu["bfloat16"], tie(rounding))


def tie(rounding: torch.Tensor) -> float:
    """Two tokens may change places where their distance is less than what both may be off."""
    return 2 * float(rounding.max())


def check_equal(reference: PeftReference, expected: Answers, answers: Answers, tie: float) -> None:
    """The same tokens up to the first near tie: what follows it has another context."""
    for (row, theirs), (_, ours) in zip(expected, answers, strict=True):
        pairs = zip(theirs.token_ids, ours.token_ids, strict=True)
        differing = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differing is not None:
            logprobs = reference.forced(row.prompt, theirs.token_ids, row.adapter)[differing]
            gap = logprobs[theirs.token_ids[differing]] - logprobs[ours.token_ids[differing]]
            assert abs(float(gap)) <= tie, f"{row.adapter}: token {differing} differs"
