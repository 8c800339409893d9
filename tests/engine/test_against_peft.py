"""Our tokens are PEFT's tokens: tiny random Llamas, random adapters of every kind, alone and mixed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.peft_reference import PeftReference
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)

ADAPTERS: dict[str, dict[str, Any]] = {
    "r1-q": {"rank": 1, "targets": ["q_proj"]},
    "r4-all": {"rank": 4, "targets": ALL_LINEAR},
    "r8-down": {"rank": 8, "targets": ["down_proj"]},
    "r24-qv-rslora": {"rank": 24, "targets": ["q_proj", "v_proj"], "use_rslora": True},
    "r64-all": {"rank": 64, "targets": ALL_LINEAR, "lora_alpha": 16},
    "patterns": {
        "rank": 8,
        "targets": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"up_proj": 40},
    },
    "layer-1-only": {"rank": 16, "targets": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
}

BASES: dict[str, dict[str, Any]] = {
    "untied-gqa": {},
    "tied-mha": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


class Setup:
    def __init__(self, path: Path, base: str) -> None:
        self.base = make_llama(path / "base", **BASES[base])
        self.adapters = {
            name: make_adapter(self.base, path / name, seed=seed, **settings)
            for seed, (name, settings) in enumerate(ADAPTERS.items())
        }
        self.reference = PeftReference(self.base, self.adapters)

    def engine(self, names: Iterable[str] = ADAPTERS, **config: Any) -> Engine:
        engine = Engine(EngineConfig(model=str(self.base), debug=True, **{"num_pages": 400} | config))
        for name in names:
            engine.load_adapter(name, str(self.adapters[name]))
        return engine


@pytest.fixture(scope="module", params=list(BASES))
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("peft"), request.param)


@pytest.fixture(scope="module")
def engine(setup: Setup) -> Iterator[Engine]:
    engine = setup.engine()
    yield engine
    engine.close()


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_alone(setup: Setup, engine: Engine, name: str | None) -> None:
    """FR-01, 10, 42, 45: scale, rank and alpha patterns, subsets of projections and layers."""
    tokens = prompt(1, 37)
    (output,) = engine.generate([tokens], GREEDY, [name])
    assert len(output.token_ids) == 64
    setup.reference.check_greedy(tokens, output, name)


def test_every_adapter_changes_the_answer(setup: Setup, engine: Engine) -> None:
    """FR-04: a ready adapter never equals the base."""
    tokens = prompt(2, 20)
    names = [None, *ADAPTERS]
    outputs = engine.generate([tokens] * len(names), GREEDY, names)
    logprobs = [tuple(lp.logprob for lp in output.logprobs or ()) for output in outputs]
    assert len(set(logprobs)) == len(names)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batch_in_any_order(setup: Setup, engine: Engine, seed: int) -> None:
    """FR-40: rows of all ranks, with and without an adapter, repeated and not adjacent."""
    names: list[str | None] = [None, None, *ADAPTERS, "r4-all", "r64-all"]
    random.Random(seed).shuffle(names)
    prompts = [prompt(100 * seed + i, 1 + 13 * i) for i in range(len(names))]
    outputs = engine.generate(prompts, GREEDY, names)
    for tokens, output, name in zip(prompts, outputs, names, strict=True):
        assert output.adapter == name
        setup.reference.check_greedy(tokens, output, name)


def test_base_rows_do_not_notice_adapters(setup: Setup, engine: Engine) -> None:
    """FR-40: base rows of a mixed batch are bit-equal to the same batch without adapters."""
    prompts = [prompt(i, 9 + i) for i in range(4)]
    names: list[str | None] = [None, "r64-all", None, "r4-all"]
    mixed = engine.generate(prompts, GREEDY, names)
    plain = engine.generate(prompts, GREEDY)
    for row in (0, 2):
        assert mixed[row].token_ids == plain[row].token_ids
        assert mixed[row].logprobs == plain[row].logprobs


def test_one_slot_serves_adapters_in_turn(setup: Setup) -> None:
    """FR-25: what an adapter does not cover is not left over from the one before it."""
    engine = setup.engine(max_adapters=1, prefetch=False)
    tokens = prompt(3, 21)
    for name in ("r64-all", "r1-q", "r64-all", "r8-down", "r4-all", "r1-q"):
        (output,) = engine.generate([tokens], GREEDY, [name])
        setup.reference.check_greedy(tokens, output, name)
    assert engine.stats()["adapters"]["r1-q"]["evictions"] == {"slot": 1}
    engine.close()


def test_small_pool_preempts_and_evicts_without_a_trace(setup: Setup) -> None:
    """Preemption by recompute, evictions and prefix hits change no token."""
    names: list[str | None] = [None, "r4-all", "r8-down", "patterns", "r1-q", None, "r4-all", "r24-qv-rslora"]
    adapters = [name for name in names if name]
    engine = setup.engine(dict.fromkeys(adapters), num_pages=40, max_num_batched_tokens=48, max_num_seqs=8)
    prompts = [prompt(i % 3, 30) for i in range(len(names))]
    for _ in range(2):
        outputs = engine.generate(prompts, GREEDY, names)
        for tokens, output, name in zip(prompts, outputs, names, strict=True):
            setup.reference.check_greedy(tokens, output, name)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert sum(stats["evictions"]["hbm"].values()) > 0
    engine.close()


def test_chunked_prefill_equals_whole_prefill(setup: Setup) -> None:
    tokens = prompt(5, 150)
    for budget in (1, 7, 64, 512):
        engine = setup.engine(max_num_batched_tokens=budget, max_num_seqs=1, prefix_cache=False)
        (output,) = engine.generate([tokens], GREEDY, ["r64-all"])
        setup.reference.check_greedy(tokens, output, "r64-all")
        engine.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])  # of any two, each is first once
def test_prefix_cache_keeps_adapters_apart(setup: Setup, order: tuple[int, ...]) -> None:
    """FR-22: the same prompt under another adapter never reuses its KV; under the same one it does."""
    engine = setup.engine()
    tokens = prompt(6, 70)
    names = [(None, "r4-all", "r64-all")[i] for i in order]
    for name in names:
        (output,) = engine.generate([tokens], GREEDY, [name])
        assert output.num_cached_tokens == 0
    for name in names:
        (output,) = engine.generate([tokens], GREEDY, [name])
        assert output.num_cached_tokens == 64
        setup.reference.check_greedy(tokens, output, name)
    engine.close()


def test_a_reload_in_place_is_the_new_version_from_its_first_token(tmp_path: Path) -> None:
    """FR-22: as on a cold server, with nothing from the cache; a reload of the same bytes still finds it."""
    setup = Setup(tmp_path, "untied-gqa")
    engine = setup.engine(names=())
    tokens = prompt(7, 70)
    in_place = tmp_path / "in-place"
    for version, num_cached in (("r4-all", 0), ("r64-all", 0), ("r64-all", 64), ("r4-all", 0)):
        shutil.copytree(setup.adapters[version], in_place, dirs_exist_ok=True, copy_function=shutil.copyfile)
        engine.load_adapter("a", str(in_place))
        (output,) = engine.generate([tokens], GREEDY, ["a"])
        assert output.num_cached_tokens == num_cached
        setup.reference.check_greedy(tokens, output, version)
    engine.close()


def store_as(path: Path, dtypes: dict[str, torch.dtype]) -> None:
    """`dtypes`: of A and of B."""
    file = path / "adapter_model.safetensors"
    tensors = {name: t.to(dtypes[name.split("lora_")[1][0]]) for name, t in load_file(file).items()}
    save_file(tensors, file)


@pytest.mark.parametrize(("lora_a", "lora_b"), [("float16", "float16"), ("float32", "float16")])
def test_adapters_of_any_stored_type_keep_the_contract_of_a_bfloat16_base(
    tmp_path: Path, lora_a: str, lora_b: str
) -> None:
    """FR-19, FR-45: against a float32 reference, alone and in a batch of 32."""
    base = make_llama(tmp_path / "base", initializer_range=0.05)
    paths = {
        "q": make_adapter(base, tmp_path / "q", rank=8, targets=["q_proj", "v_proj"], seed=1),
        "all": make_adapter(base, tmp_path / "all", rank=16, targets=ALL_LINEAR, seed=2, lora_alpha=4),
    }
    for path in paths.values():
        store_as(path, {"A": getattr(torch, lora_a), "B": getattr(torch, lora_b)})
    reference = PeftReference(base, paths)
    engine = Engine(EngineConfig(model=str(base), dtype="bfloat16", debug=True, num_pages=400))
    for adapter, path in paths.items():
        engine.load_adapter(adapter, str(path))
    rows = [None, "q", "all", "q"] * 8
    prompts = [prompt(i, 1 + i) for i in range(len(rows))]
    outputs = engine.generate(prompts, GREEDY, rows)
    outputs += engine.generate(prompts[:1], GREEDY, rows[:1]) + engine.generate(
        prompts[1:2], GREEDY, rows[1:2]
    )
    for tokens, output, name in zip(prompts + prompts[:2], outputs, rows + rows[:2], strict=True):
        reference.check_greedy(tokens, output, name, "bfloat16")
    engine.close()
