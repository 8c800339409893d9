"""The GPU engine's tokens are the reference's tokens, in graphs and eagerly, with any adapters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.peft_reference import PeftReference
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)
ADAPTERS: dict[str, dict[str, Any]] = {
    "r1-q": {"rank": 1, "targets": ["q_proj"]},
    "r4-all": {"rank": 4, "targets": ALL_LINEAR},
    "r8-down": {"rank": 8, "targets": ["down_proj"]},
    "r24-qv-rslora": {"rank": 24, "targets": ["q_proj", "v_proj"], "use_rslora": True},
    "r64-all": {"rank": 64, "targets": ALL_LINEAR, "lora_alpha": 16},
}


class Setup:
    def __init__(self, path: Path) -> None:
        self.base = make_llama(
            path / "base",
            hidden_size=256,
            intermediate_size=512,
            head_dim=128,  # in bfloat16, one launch for rotary embedding, KV write and attention
            num_attention_heads=4,
            initializer_range=0.05,
        )
        self.adapters = {
            name: make_adapter(self.base, path / name, seed=seed, **settings)
            for seed, (name, settings) in enumerate(ADAPTERS.items())
        }
        self.reference = PeftReference(self.base, self.adapters)

    def engine(self, dtype: str, **config: Any) -> Engine:
        settings = {"num_pages": 600, "max_num_seqs": 16, "max_rank": 64, "debug": True} | config
        engine = Engine(EngineConfig(model=str(self.base), device="cuda", dtype=dtype, **settings))  # type: ignore[arg-type]
        for name, path in self.adapters.items():
            engine.load_adapter(name, str(path))
        return engine


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(setup: Setup, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = setup.engine(request.param)
    yield engine
    engine.close()


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_alone(setup: Setup, engine: Engine, name: str | None) -> None:
    tokens = prompt(1, 37)
    (output,) = engine.generate([tokens], GREEDY, [name])
    setup.reference.check_greedy(tokens, output, name, engine.config.dtype)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batch_in_any_order(setup: Setup, engine: Engine, seed: int) -> None:
    """FR-39, FR-40: graphs captured without adapters, prefill chunks beside decodes, buckets not full."""
    names: list[str | None] = [None, None, *ADAPTERS, "r4-all", "r64-all", "r64-all"]
    random.Random(seed).shuffle(names)
    prompts = [prompt(100 * seed + i, 1 + 17 * i) for i in range(len(names))]
    outputs = engine.generate(prompts, GREEDY, names)
    for tokens, output, name in zip(prompts, outputs, names, strict=True):
        setup.reference.check_greedy(tokens, output, name, engine.config.dtype)


@pytest.mark.parametrize("num_long", [1, 2, 5])  # in a small and a large graph, and in none
def test_prefill_chunks_beside_decodes(setup: Setup, engine: Engine, num_long: int) -> None:
    names: list[str | None] = ["r4-all", None, "r64-all", "r1-q", "r4-all", "r8-down", None]
    prompts = [prompt(i, 290 if i < num_long else 5) for i in range(len(names))]
    outputs = engine.generate(prompts, GREEDY, names)
    for tokens, output, name in zip(prompts, outputs, names, strict=True):
        setup.reference.check_greedy(tokens, output, name, engine.config.dtype)


def test_sampled_tokens_equal_the_cpu_backend(setup: Setup) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=32, repetition_penalty=1.2)
    outputs = []
    for device in ("cuda", "cpu"):
        engine = Engine(
            EngineConfig(model=str(setup.base), device=device, dtype="float32", num_pages=300, max_rank=64)
        )
        engine.load_adapter("r4-all", str(setup.adapters["r4-all"]))
        outputs.append(engine.generate([prompt(3, 20)] * 2, params, [None, "r4-all"]))
        engine.close()
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]


def test_small_pool_preempts_and_evicts_without_a_trace(setup: Setup) -> None:
    names: list[str | None] = [None, "r4-all", "r8-down", "r1-q", None, "r4-all", "r24-qv-rslora"]
    engine = Engine(
        EngineConfig(
            model=str(setup.base), device="cuda", dtype="float32", num_pages=46, max_num_batched_tokens=48,
            max_num_seqs=8, max_rank=64, max_adapters=3, debug=True,
        )
    )  # fmt: skip
    for adapter in {name for name in names if name}:
        engine.load_adapter(adapter, str(setup.adapters[adapter]))
    prompts = [prompt(i % 3, 60) for i in range(len(names))]
    for _ in range(2):
        outputs = engine.generate(prompts, GREEDY, names)
        for tokens, output, name in zip(prompts, outputs, names, strict=True):
            setup.reference.check_greedy(tokens, output, name, engine.config.dtype)
    assert engine.stats()["preemptions"] + sum(engine.stats()["evictions"]["hbm"].values()) > 0
    engine.close()
