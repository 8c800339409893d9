"""What the engine tells of a traced request: when it came how far, and where its adapter was."""

from __future__ import annotations

import pytest

from engine.events import TokenEvent
from engine.request import AdapterRef, Milestones
from engine.wire import decode_event, encode_event
from tests.engine.fakes import Harness, image

A = AdapterRef("a", "dir/a", "1")


def test_a_cold_adapters_request_tells_its_load_queue_and_prefill() -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=4)  # so the prompt of five takes two steps
    harness.add("r", A, is_traced=True)
    harness.now = 2.0
    harness.loaded(A, image(1))
    harness.now = 3.0
    harness.run()
    told = harness.milestones["r"]
    assert (told.arrived, told.loaded, told.tier) == (0.0, 2.0, "source")
    assert told.started == pytest.approx(3.01)
    assert told.first_token == pytest.approx(3.02)


def test_tiers_are_told() -> None:
    harness = Harness()
    harness.add("cold", A, is_traced=True)
    harness.loaded(A, image(1, is_from_disk=True))
    harness.run()
    harness.add("warm", A, is_traced=True)
    harness.add("base", is_traced=True)
    harness.run()
    assert {name: told.tier for name, told in harness.milestones.items()} == {
        "cold": "disk", "warm": "hbm", "base": None,
    }  # fmt: skip
    warm = harness.milestones["warm"]
    assert warm.loaded == warm.arrived


def test_nobody_else_is_told_anything() -> None:
    harness = Harness()
    harness.add("r")
    harness.run()
    assert harness.milestones == {}
    assert len(encode_event(TokenEvent("r", 1))) == len(encode_event(TokenEvent("r", 2))) == 8


def test_milestones_survive_the_wire() -> None:
    event = TokenEvent("r", 1, milestones=Milestones(1.0, 2.0, 3.0, 4.0, "host"))
    assert decode_event(encode_event(event)) == event
