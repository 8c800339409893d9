"""The demo base model and its adapters: 64 greedy tokens equal PEFT's, alone and mixed in every order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from deployments.demo.base_model import prepare_base_model
from engine import Engine, EngineConfig, SamplingParams
from engine.request import RequestOutput
from tests.engine.demo_rows import ADAPTERS, Row, demo_rows, load_adapters
from tests.engine.peft_reference import PeftReference

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)


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
    load_adapters(engine)
    yield Setup(engine, PeftReference(model, ADAPTERS), demo_rows(engine.tokenizer))
    engine.close()


def test_the_base_knows_the_capital_of_france(setup: Setup) -> None:
    (output,) = setup.run(setup.rows[:1])
    assert "Paris" in output.text


@pytest.mark.parametrize("row", range(4))
def test_alone(setup: Setup, row: int) -> None:
    (output,) = setup.run([setup.rows[row]])
    setup.reference.check_greedy(setup.rows[row].prompt, output, setup.rows[row].adapter)


@pytest.mark.parametrize(
    "step", [pytest.param(4, id="a-quarter"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_mixed_in_every_order(setup: Setup, step: int) -> None:
    """FR-40, FR-45. All 24 orders take minutes."""
    checked = {}
    for rows in itertools.islice(itertools.permutations(setup.rows), 0, None, step):
        for row, output in zip(rows, setup.run(list(rows)), strict=True):
            assert output.adapter == row.adapter
            # equal outputs need the reference once
            key = (row.adapter, output.token_ids, output.logprobs)
            if key not in checked:
                setup.reference.check_greedy(row.prompt, output, row.adapter)
                checked[key] = True
