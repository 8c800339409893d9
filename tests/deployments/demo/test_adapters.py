"""The committed adapters are what they say, and change what the base model answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployments import demo
from deployments.demo.base_model import prepare_base_model
from deployments.demo.prompts import SHOWCASES
from engine import Engine, EngineConfig, SamplingParams
from tests.deployments.demo.behaviour import BEHAVIOURS, Behaviour

ADAPTER_DIR = Path(demo.__file__).parent / "adapters"
MAX_BYTES = 5_000_000
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True, slots=True)
class Expected:
    name: str
    rank: int
    targets: set[str]
    use_rslora: bool = False


EXPECTED = (
    Expected("support-triage", rank=8, targets=ATTENTION | MLP),
    Expected("sql", rank=16, targets=ATTENTION),
    Expected("pirate", rank=32, targets={"q_proj", "v_proj"}, use_rslora=True),
)


def test_the_three_adapters_are_there_and_each_has_a_showcase_and_a_check() -> None:
    names = {expected.name for expected in EXPECTED}
    assert {folder.name for folder in ADAPTER_DIR.iterdir()} == names
    assert {showcase.adapter for showcase in SHOWCASES} == names
    assert {behaviour.adapter for behaviour in BEHAVIOURS} == names


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda expected: expected.name)
class TestFiles:
    def test_the_config_says_how_it_was_trained(self, expected: Expected) -> None:
        config = json.loads((ADAPTER_DIR / expected.name / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA"
        assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
        assert config["inference_mode"] is True
        assert config["r"] == expected.rank
        assert set(config["target_modules"]) == expected.targets
        assert config["use_rslora"] is expected.use_rslora

    def test_the_weights_have_the_rank_and_are_small(self, expected: Expected) -> None:
        from safetensors import safe_open

        weights = ADAPTER_DIR / expected.name / "adapter_model.safetensors"
        assert weights.stat().st_size <= MAX_BYTES
        with safe_open(weights, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        assert len(shapes) == 30 * len(expected.targets) * 2
        for name, shape in shapes.items():
            assert shape[0 if name.endswith("lora_A.weight") else 1] == expected.rank


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=str(prepare_base_model(progress=False))))
    for expected in EXPECTED:
        report = engine.load_adapter(expected.name, str(ADAPTER_DIR / expected.name))
        assert report["bound"] == report["present"] == 30 * len(expected.targets) * 2
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare_base_model(progress=False))


def ask(engine: Engine, tokenizer: Any, prompts: tuple[str, ...], adapter: str | None) -> list[str]:
    token_ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]
    params = SamplingParams(temperature=0, max_tokens=64)
    outputs = engine.generate(token_ids, params, adapters=[adapter] * len(prompts))
    return [output.text for output in outputs]


@pytest.mark.cluster
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.adapter)
class TestBehaviour:
    def test_the_adapter_does_its_task_on_prompts_it_never_saw(
        self, engine: Engine, tokenizer: Any, behaviour: Behaviour
    ) -> None:
        shown = tuple(showcase.prompt for showcase in SHOWCASES if showcase.adapter == behaviour.adapter)
        prompts = behaviour.held_out + shown
        answers = ask(engine, tokenizer, prompts, behaviour.adapter)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert behaviour.holds(prompt, answer), (prompt, answer)

    def test_the_base_model_does_not(self, engine: Engine, tokenizer: Any, behaviour: Behaviour) -> None:
        answers = ask(engine, tokenizer, behaviour.held_out, None)
        for prompt, answer in zip(behaviour.held_out, answers, strict=True):
            assert not behaviour.holds(prompt, answer), (prompt, answer)
