"""Two ranks on GPUs give the tokens of one: over NCCL with a GPU each, over gloo where there is one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.config import Dtype
from engine.request import RequestOutput
from tests.engine.peft_reference import PeftReference
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.9, seed=11, max_tokens=24, repetition_penalty=1.2, ignore_eos=True
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "r4-all": {"rank": 4, "targets": ALL_LINEAR},
    "r8-down": {"rank": 8, "targets": ["down_proj"]},
    "r24-all": {"rank": 24, "targets": ALL_LINEAR},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_equal_one(tmp_path: Path, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-38, FR-45."""
    monkeypatch.setattr("engine.building.GROUPS_ON_GPUS", True)
    base = make_llama(
        tmp_path / "base",
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        num_attention_heads=8,
        initializer_range=0.05,
    )
    adapters = {
        name: make_adapter(base, tmp_path / name, seed=seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }
    names = [None, *ADAPTERS, "r4-all"]
    prompts = [[(7 * i + j) % 256 for j in range(3 + 19 * i)] for i in range(len(names))]

    def run(world: int) -> tuple[list[RequestOutput], list[RequestOutput]]:
        engine = Engine(
            EngineConfig(
                model=str(base), device="cuda", dtype=dtype, num_pages=300, max_num_seqs=8, max_rank=24,
                tensor_parallel_size=world,
            )
        )  # fmt: skip
        for name, path in adapters.items():
            engine.load_adapter(name, str(path))
        outputs = engine.generate(prompts, GREEDY, names), engine.generate(prompts, SAMPLED, names)
        engine.close()
        return outputs

    reference = PeftReference(base, adapters)

    def check(outputs: list[RequestOutput]) -> None:
        for prompt, output, name in zip(prompts, outputs, names, strict=True):
            reference.check_greedy(prompt, output, name, dtype)

    greedy, sampled_alone = run(1)
    check(greedy)
    greedy, sampled = run(2)
    check(greedy)
    if dtype == "float32":
        assert [o.token_ids for o in sampled] == [o.token_ids for o in sampled_alone]
