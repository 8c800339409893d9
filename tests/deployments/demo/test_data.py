"""The training data keeps the promises that it teaches, and holds no prompt that we test or show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments import demo
from deployments.demo.prompts import SHOWCASES
from tests.deployments.demo.behaviour import BEHAVIOURS, Behaviour

DATA_DIR = Path(demo.__file__).parent / "data"


def records(adapter: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA_DIR / f"{adapter}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.adapter)
class TestData:
    def test_every_record_is_one_turn_that_behaves(self, behaviour: Behaviour) -> None:
        for record in records(behaviour.adapter):
            assert record.keys() == {"user", "assistant"}
            assert behaviour.holds(record["user"], record["assistant"]), record

    def test_no_prompt_appears_twice(self, behaviour: Behaviour) -> None:
        prompts = [record["user"].casefold() for record in records(behaviour.adapter)]
        assert len(set(prompts)) == len(prompts) >= 100

    def test_held_out_and_shown_prompts_are_not_in_it(self, behaviour: Behaviour) -> None:
        shown = [showcase.prompt for showcase in SHOWCASES if showcase.adapter == behaviour.adapter]
        assert len(shown) == 1
        trained = {record["user"].casefold() for record in records(behaviour.adapter)}
        assert trained.isdisjoint(prompt.casefold() for prompt in (*behaviour.held_out, *shown))


def test_sql_is_tested_on_tables_it_never_saw() -> None:
    trained = {record["user"].partition("\n")[0] for record in records("sql")}
    sql = next(behaviour for behaviour in BEHAVIOURS if behaviour.adapter == "sql")
    assert trained.isdisjoint(prompt.partition("\n")[0] for prompt in sql.held_out)
