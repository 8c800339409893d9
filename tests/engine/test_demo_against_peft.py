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

    def check(self, rows: list[Row]) -> list[RequestOutput]:
        """Of one batch, in that order."""
        outputs = self.engine.generate([r.prompt for r in rows], GREEDY, [r.adapter for r in rows])
        for row, output in zip(rows, outputs, strict=True):
            assert output.adapter == row.adapter
            self.reference.check_greedy(row.prompt, output, row.adapter)
        return outputs


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    model = prepare_base_model(progress=False)
    engine = Engine(EngineConfig(model=str(model), num_threads=1))
    load_adapters(engine)
    yield Setup(engine, PeftReference(model, ADAPTERS), demo_rows(engine.tokenizer))
    engine.close()


@pytest.mark.parametrize("row", range(4))
def test_alone(setup: Setup, row: int) -> None:
    (output,) = setup.check([setup.rows[row]])
    if row == 0:
        assert "Paris" in output.text


@pytest.mark.parametrize("is_reversed", [False, True])
def test_mixed(setup: Setup, is_reversed: bool) -> None:
    """FR-40, FR-45: of any two rows, each has once been before the other."""
    setup.check(setup.rows[::-1] if is_reversed else setup.rows)


@pytest.mark.slow
def test_mixed_in_every_order(setup: Setup) -> None:
    """FR-40, FR-45: 24 of them."""
    for rows in itertools.permutations(setup.rows):
        setup.check(list(rows))
