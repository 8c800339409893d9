"""Which parameters are accepted, and that they survive a trip through JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams, check_token_ids, check_vocabulary, derive_seed


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1 << 31),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 1 << 63),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_wrong_value_is_refused_by_name(param: str, value: Any) -> None:
    """FR-53: max_tokens -1 or temperature -1 must not reach the engine."""
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{param: value})
    assert error.value.param == param


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert error.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 1e-300),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", (1 << 31) - 1),
        ("min_p", 1.0),
        ("seed", -(1 << 63)),
        ("max_tokens", 1),
        ("logprobs", 0),
        ("repetition_penalty", 100.0),
    ],
)
def test_the_edges_are_accepted(param: str, value: Any) -> None:
    assert getattr(SamplingParams(**{param: value}), param) == value


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=0.3,
            top_k=5,
            seed=-9,
            n=3,
            max_tokens=9,
            min_tokens=2,
            stop=("a", "終"),
            stop_token_ids=(4, 5),
            logit_bias={7: -100.0, 8: 1.5},
            logprobs=2,
        ),
    ],
)
def test_json_keeps_everything(params: SamplingParams) -> None:
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(stop_token_ids=(3, 256)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(logit_bias={256: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_a_token_that_the_model_lacks_is_refused(params: SamplingParams, param: str) -> None:
    """FR-53."""
    with pytest.raises(InvalidRequest) as error:
        check_vocabulary(params, vocab_size=256)
    assert error.value.param == param


def test_the_whole_vocabulary_is_accepted() -> None:
    check_vocabulary(SamplingParams(stop_token_ids=(0, 255), logit_bias={0: 1.0, 255: -1.0}), vocab_size=256)
    check_token_ids(range(256), 256, "prompt")


@pytest.mark.parametrize(
    ("params", "penalizes"),
    [
        (SamplingParams(), False),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
    ],
)
def test_penalizes_if_any_penalty_is_set(params: SamplingParams, penalizes: bool) -> None:
    assert params.penalizes is penalizes


def test_derived_seeds_are_those_of_splitmix64() -> None:
    expected = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert tuple(derive_seed(0, index) % (1 << 64) for index in range(3)) == expected


def test_derived_seeds_differ_and_fit_64_bits() -> None:
    """FR-55: equal seeds made the choices of one request equal."""
    seeds = {
        derive_seed(seed, index) for seed in (0, 7, -1, (1 << 63) - 1, -(1 << 63)) for index in range(128)
    }
    assert len(seeds) == 5 * 128
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)
