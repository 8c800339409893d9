"""The sampler, against a naive one that takes one row and one token at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.sampler import SampledTokens, Sampler
from engine.sampling_params import SamplingParams, derive_seed
from engine.sampling_state import SamplingState
from kernels.sampling import reference

EOS = 2
VOCAB_SIZE = 24


def random_params(rng: random.Random) -> SamplingParams:
    def some(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_p=some(rng.uniform(0.05, 0.99), 1.0),
        top_k=rng.choice([0, 0, -1, 1, 3, 10, 1000]),
        min_p=some(rng.uniform(0.01, 0.5), 0.0),
        min_tokens=rng.choice([0, 0, 2, 6]),
        stop_token_ids=rng.choice([(), (5,), (0, 7)]),
        ignore_eos=rng.random() < 0.3,
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        repetition_penalty=some(rng.uniform(0.3, 2), 1.0),
        logit_bias={rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9)} if rng.random() < 0.4 else {},
        logprobs=rng.choice([None, 0, 1, 4]),
    )


class Row:
    """A choice in both forms: the sampler's state and the plain lists that the naive sampler reads."""

    def __init__(self, params: SamplingParams, seed: int, prompt: list[int], output: list[int]) -> None:
        self.params, self.seed, self.prompt, self.output = params, seed, prompt, output
        self.state = SamplingState(params, seed, prompt, output)


def random_row(rng: random.Random) -> Row:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
    output = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(8))]
    return Row(random_params(rng), rng.randrange(-(1 << 63), 1 << 63), prompt, output)


def naive_token(logits: list[float], row: Row) -> int:
    params, values = row.params, list(logits)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(row.output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))):
            values[token] = -math.inf
    for token in {*row.prompt, *row.output}:
        value, count = values[token], row.output.count(token)
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        values[token] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    best_first = sorted(range(len(values)), key=lambda token: (-values[token], token))
    best = values[best_first[0]]
    if params.temperature == 0:
        return best_first[0]
    weights = [math.exp((value - best) / params.temperature) for value in values]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    for token in best_first[params.top_k :] if params.top_k > 0 else ():
        weights[token] = 0.0
    total, mass = sum(weights), 0.0
    for token in best_first:
        weight = weights[token]
        if mass >= params.top_p * total:
            weights[token] = 0.0
        mass += weight
    seed, position = torch.tensor([row.seed]), torch.tensor([len(row.output)])
    target, mass = float(reference.philox_uniform(seed, position)) * sum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > target:
            return token
    raise AssertionError("no token")


def random_logits(rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: Tensor, states: Sequence[SamplingState]) -> SampledTokens:
    return Sampler([EOS]).sample(logits.clone(), states)


def states_of(rows: Sequence[Row]) -> list[SamplingState]:
    return [row.state for row in rows]


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_of_the_naive_sampler(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(rng.choice([1, 2, 7, 133]))]
    logits = random_logits(len(rows), seed)
    expected = [naive_token(values, row) for values, row in zip(logits.tolist(), rows, strict=True)]
    assert sample(logits, states_of(rows)).token_ids == expected


@pytest.mark.parametrize("seed", range(10))
def test_neighbours_and_order_change_nothing(seed: int) -> None:
    """The same tokens and the same bits of log-probability, alone, reversed and among others."""
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(12)]
    logits = random_logits(12, seed)
    together = sample(logits, states_of(rows))
    backwards = sample(logits.flip(0), states_of(rows[::-1]))
    alone = [sample(logits[i : i + 1], [row.state]) for i, row in enumerate(rows)]
    assert backwards.token_ids[::-1] == together.token_ids == [one.token_ids[0] for one in alone]
    assert backwards.logprobs[::-1] == together.logprobs == [one.logprobs[0] for one in alone]


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    num_draws = 20_000
    states = [SamplingState(SamplingParams(), seed, [0]) for seed in range(num_draws)]
    tokens = Sampler([]).sample(probs.log().repeat(num_draws, 1), states).token_ids
    observed, expected = torch.bincount(torch.tensor(tokens), minlength=8), probs * num_draws
    assert ((observed - expected) ** 2 / expected).sum() < 30  # 7 degrees of freedom: 1 seed in 10,000


def generate(seed: int, num_tokens: int = 30) -> list[int]:
    """Free-running output of one choice at temperature 1, over logits that depend on the position alone."""
    state, tokens = SamplingState(SamplingParams(), seed, [0]), []
    for position in range(num_tokens):
        tokens += sample(random_logits(1, position), [state]).token_ids
        state.append(tokens[-1])
    return tokens


def test_equal_seeds_give_equal_outputs() -> None:
    assert generate(7) == generate(7) != generate(8)


def test_choices_of_one_seed_differ_and_come_again() -> None:
    """FR-55: equal seeds made the choices of one request equal."""
    choices = [generate(derive_seed(7, index)) for index in range(3)]
    assert len({tuple(choice) for choice in choices}) == 3
    assert choices == [generate(derive_seed(7, index)) for index in range(3)]


def test_a_preempted_choice_goes_on_as_if_nothing_had_happened() -> None:
    rng = random.Random(3)
    for _ in range(50):
        row = random_row(rng)
        undisturbed = SamplingState(row.params, row.seed, row.prompt)
        for token_id in row.output:
            undisturbed.append(token_id)
        logits = random_logits(1, rng.randrange(100))
        assert sample(logits, [row.state]) == sample(logits, [undisturbed])


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(
        temperature=0.0, logit_bias={4: 100.0}, repetition_penalty=2.0, frequency_penalty=2.0, logprobs=3
    )
    logits = random_logits(1, 5)
    raw = logits.log_softmax(-1)[0]
    logprob = sample(logits, [SamplingState(params, 0, [0, 1, 2])]).logprobs[0]
    assert logprob is not None
    assert (logprob.token_id, logprob.logprob) == (4, float(raw[4]))
    best = raw.topk(3)
    assert logprob.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    asked = [None, 0, 2, 5, None]
    states = [SamplingState(SamplingParams(temperature=0.0, logprobs=k), 0, [0]) for k in asked]
    logprobs = sample(random_logits(5, 1), states).logprobs
    assert [None if one is None else len(one.top) for one in logprobs] == asked


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    state = SamplingState(SamplingParams(logprobs=20), 0, [0])
    (logprob,) = sample(random_logits(1, 1, vocab_size=8), [state]).logprobs
    assert logprob is not None
    assert sorted(token_id for token_id, _ in logprob.top) == list(range(8))


def test_greedy_and_top_1_agree_among_equals() -> None:
    """A 16-bit model's logits often tie: every way of asking for the best token has to name the same one."""
    logits = random_logits(64, 9).div(4).round()
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(temperature=0.0)):
        states = [SamplingState(params, seed, [0]) for seed in range(64)]
        assert sample(logits, states).token_ids == logits.argmax(-1).tolist()


def test_the_end_is_forbidden_until_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5,), logit_bias={5: 50.0})
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS], logits[0, 5], logits[0, 9] = 60.0, 55.0, 1.0
    state, tokens = SamplingState(params, 0, [0]), []
    for _ in range(3):
        tokens += sample(logits, [state]).token_ids
        state.append(tokens[-1])
    assert tokens == [9, 9, 5]


def test_an_ignored_eos_is_not_forbidden() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS] = 1.0
    params = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(logits, [SamplingState(params, 0, [0])]).token_ids == [EOS]


def test_greedy_rows_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    choose = reference.choose

    def counting(logits: Tensor, uniforms: Tensor) -> Tensor:
        drawn.append(len(logits))
        return choose(logits, uniforms)

    monkeypatch.setattr(reference, "choose", counting)
    greedy, random_ = SamplingParams(temperature=0.0), SamplingParams()
    logits = random_logits(3, 0)
    sample(logits, [SamplingState(greedy, 0, [0]) for _ in range(3)])
    assert drawn == []
    sample(logits, [SamplingState(params, 0, [0]) for params in (greedy, random_, greedy)])
    assert drawn == [1]


def test_a_plain_greedy_batch_leaves_its_logits_alone() -> None:
    logits = random_logits(3, 0)
    before = logits.clone()
    Sampler([EOS]).sample(logits, [SamplingState(SamplingParams(temperature=0.0), 0, [0])] * 3)
    assert torch.equal(logits, before)
