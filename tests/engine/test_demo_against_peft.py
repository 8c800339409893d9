"""The demo base model and its adapters: 64 greedy tokens equal PEFT's, alone and mixed in every order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from deployments.demo.base_model import prepare_base_model
from deployments.demo.prompts import ADAPTERS_DIR, SHOWCASES
from engine import Engine, EngineConfig, SamplingParams
from engine.request import RequestOutput
from tests.engine.peft_reference import PeftReference

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)


class Row(NamedTuple):
    adapter: str | None
    prompt: list[int]


class Setup(NamedTuple):
    engine: Engine
    reference: PeftReference
    rows: list[Row]

    def run(self, rows: list[Row]) -> list[RequestOutput]:
        return self.engine.generate([r.prompt for r in rows], GREEDY, [r.adapter for r in rows])


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    model = prepare_base_model(progress=False)
    engine = Engine(EngineConfig(model=str(model), num_threads=2))
    paths = {showcase.adapter: ADAPTERS_DIR / showcase.adapter for showcase in SHOWCASES}
    for name, path in paths.items():
        engine.load_adapter(name, str(path))
    rows = [Row(None, _chat(engine, "What is the capital of France?"))]
    rows += [Row(showcase.adapter, _chat(engine, showcase.prompt)) for showcase in SHOWCASES]
    yield Setup(engine, PeftReference(model, paths), rows)
    engine.close()


def _chat(engine: Engine, text: str) -> list[int]:
    # as the base's template renders it, its default system prompt included
    template = engine.tokenizer.chat_template
    assert template is not None
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [{"role": "user", "content": text}]
    rendered = (
        ImmutableSandboxedEnvironment()
        .from_string(template)
        .render(messages=messages, add_generation_prompt=True)
    )
    return engine.tokenizer.encode(rendered, add_special_tokens=False)


def test_the_base_knows_the_capital_of_france(setup: Setup) -> None:
    (output,) = setup.run(setup.rows[:1])
    assert "Paris" in output.text


@pytest.mark.parametrize("row", range(4))
def test_alone(setup: Setup, row: int) -> None:
    (output,) = setup.run([setup.rows[row]])
    setup.reference.check_greedy(setup.rows[row].prompt, output, setup.rows[row].adapter)


def test_mixed_in_every_order(setup: Setup) -> None:
    """FR-40, FR-45."""
    checked = {}
    for rows in itertools.permutations(setup.rows):
        for row, output in zip(rows, setup.run(list(rows)), strict=True):
            assert output.adapter == row.adapter
            # equal outputs need the reference once
            key = (row.adapter, output.token_ids, output.logprobs)
            if key not in checked:
                setup.reference.check_greedy(row.prompt, output, row.adapter)
                checked[key] = True
