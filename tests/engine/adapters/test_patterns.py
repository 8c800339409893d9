from __future__ import annotations

import random
import time

import pytest
from peft.utils.other import get_pattern_key

from engine.adapters.patterns import Patterns
from engine.shape import PROJECTIONS

MODULES = [
    f"{root}layers.{layer}.{'mlp' if index >= 4 else 'self_attn'}.{projection}"
    for root in ("model.", "model.language_model.")
    for layer in (0, 1, 10, 11, 125)
    for index, projection in enumerate(PROJECTIONS)
]
KEYS = [
    "q_proj", "self_attn.q_proj", r"self_attn\.(q|v)_proj", r"layers\.\d+\.mlp.*",
    "layers.1.self_attn.q_proj", "^model.layers.0.self_attn.k_proj", r"model\.layers\.1[01]?\..*proj$",
    ".*down_proj", "proj", "_proj", r"(?:up|gate)_proj", "layers.[0-9]+.mlp.up_proj", "nothing",
    r"1.self_attn.q_proj",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_key_matches_the_modules_that_it_matches_in_peft(key: str) -> None:
    """FR-10."""
    patterns = Patterns({key: 3})
    for module in MODULES:
        want = 3 if get_pattern_key([key], module) == key else None
        assert patterns.find(module) == want, module


def test_the_first_matching_key_wins_as_in_peft() -> None:
    rng = random.Random(0)
    for _ in range(50):
        values = {key: index for index, key in enumerate(rng.sample(KEYS, 6))}
        patterns = Patterns(values)
        for module in MODULES:
            assert patterns.find(module) == values.get(get_pattern_key(list(values), module))


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+$", "(a|a)*", "((a|b)|c)", "a|b", "(a|b", "a**", "a{1,99}", "(?=a)", r"(a)\1", r"\w+",
        "[^a]", "[9-0]", "a++", ".*.*.*.*", "", "x" * 300, "(a|b)" * 20,
    ],
)  # fmt: skip
def test_a_key_that_could_match_for_long_is_refused(key: str) -> None:
    with pytest.raises(ValueError):
        Patterns({key: 1})


def test_many_keys_together_are_bounded_too() -> None:
    with pytest.raises(ValueError):
        Patterns({f".*a.*b.*{index}": 1 for index in range(3)})
    with pytest.raises(ValueError):
        Patterns({f"layers.{index}.q_proj": 1 for index in range(3000)})


def test_the_slowest_accepted_keys_match_a_large_model_in_seconds() -> None:
    patterns = Patterns({".*.*.*x": 1, ".*.*z": 2} | {f"layers.{i}.mlp.up_proj": i for i in range(500)})
    started = time.perf_counter()
    for layer in range(126):
        for projection in PROJECTIONS:
            patterns.find(f"model.language_model.layers.{layer}.self_attn.{projection}")
    assert time.perf_counter() - started < 10
