"""Our forward pass against transformers: chunked prefill, decode, mixed batches and mixed adapters."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.model.llama import LlamaModel
from engine.model.loading import load_weights
from engine.model.spec import load_model_spec
from engine.plan import ScheduledChunk
from engine.runner.batch import ForwardBatch, build_batch
from engine.shape import NUM_PROJECTIONS, PROJECTIONS
from kernels.sgmv import AdapterViews
from tests.kernels.tiles import Modules, TilePool, random_lora
from tests.tiny import make_llama

TOLERANCE = 1e-4  # FR-45, fp32
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(slots=True)
class Prompt:
    """A prompt that is fed in chunks; transformers says what its logits are."""

    token_ids: list[int]
    want: torch.Tensor  # [tokens, vocab]
    page_ids: list[int]
    slot: int = -1
    done: int = 0

    def schedule(self, num_tokens: int) -> ScheduledChunk:
        chunk = self.token_ids[self.done : self.done + num_tokens]
        return ScheduledChunk("", self.done, tuple(chunk), array("i", self.page_ids), self.slot, samples=True)


class Bench:
    """A model with its pool and adapters, beside a float32 reference with merged weights per adapter."""

    def __init__(self, path: Path, page_tokens: int, adapters: Sequence[Modules] = ()) -> None:
        spec = load_model_spec(str(path))
        self.page_tokens = spec.shape.fit_page_tokens(page_tokens) if adapters else page_tokens
        self.model = LlamaModel(spec, load_weights(spec, torch.float32))
        self.tiles = TilePool(150, spec.shape.page_elems(self.page_tokens), torch.float32)
        widths = [spec.shape.widths(p) for p in range(NUM_PROJECTIONS)]
        self.views = AdapterViews(self.tiles.pool, widths)
        self.references = {-1: LlamaForCausalLM.from_pretrained(path)}
        for slot, modules in enumerate(adapters):
            self.views.put(slot, *self.tiles.pack(modules, spec.shape.num_layers, NUM_PROJECTIONS))
            self.references[slot] = merged(LlamaForCausalLM.from_pretrained(path), modules)

    @torch.no_grad()
    def sequence(self, token_ids: list[int], slot: int = -1) -> Prompt:
        want = self.references[slot](torch.tensor([token_ids])).logits[0]
        pages = self.tiles.take_pages(-(-len(token_ids) // self.page_tokens))
        return Prompt(token_ids, want, pages, slot)

    def build(self, work: list[tuple[Prompt, int]]) -> ForwardBatch:
        return build_batch([s.schedule(n) for s, n in work], "cpu", self.page_tokens)

    def step(self, work: list[tuple[Prompt, int]]) -> None:
        """Run the next n tokens of each sequence and compare the last one's logits."""
        batch = self.build(work)
        logits = self.model.forward(batch, self.tiles.pool, self.views)
        assert sorted(batch.order) == list(range(len(work)))
        for row, i in zip(logits, batch.order, strict=True):
            sequence, num_tokens = work[i]
            sequence.done += num_tokens
            want = sequence.want[sequence.done - 1]
            torch.testing.assert_close(row, want, atol=TOLERANCE, rtol=0)


def merged(model: LlamaForCausalLM, modules: Modules) -> LlamaForCausalLM:
    for (layer, projection), lora in modules.items():
        name = PROJECTIONS[projection]
        block = model.model.layers[layer]
        parent = block.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else block.mlp
        getattr(parent, name).weight.data += lora.scale * (lora.b @ lora.a)
    return model


def adapter(path: Path, rank: int, seed: int, projections: Sequence[int]) -> Modules:
    shape = load_model_spec(str(path)).shape
    generator = torch.Generator().manual_seed(seed)
    return {
        (layer, p): random_lora(rank, *shape.widths(p), generator)
        for layer in range(shape.num_layers)
        for p in projections
    }


def random_tokens(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(256) for i in range(length)]


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="gqa-2"),
        pytest.param({"num_key_value_heads": 4, "tie_word_embeddings": True}, id="mha tied"),
        pytest.param({"head_dim": 24, "num_key_value_heads": 1}, id="mqa, q wider than hidden"),
        pytest.param({"rope_parameters": LLAMA3}, id="llama3"),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            id="linear",
        ),
    ],
)
def test_odd_chunks_then_decode(tmp_path: Path, overrides: dict[str, Any], page_tokens: int) -> None:
    bench = Bench(make_llama(tmp_path, **overrides), page_tokens)
    sequence = bench.sequence(random_tokens(70, seed=1))
    for num_tokens in (1, 7, 13, 1, 5, 33, *[1] * 10):
        bench.step([(sequence, num_tokens)])
    assert sequence.done == 70


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_of_chunks_and_decodes(tmp_path: Path, seed: int) -> None:
    """FR-40: each row equals its solo run, whatever shares the batch, in any order."""
    path = make_llama(tmp_path)
    everything = range(NUM_PROJECTIONS)
    down_only = [PROJECTIONS.index("down_proj")]
    q_and_v = [PROJECTIONS.index("q_proj"), PROJECTIONS.index("v_proj")]
    adapters = [
        adapter(path, 8, 1, everything),
        adapter(path, 64, 2, everything),
        adapter(path, 16, 3, down_only),
        adapter(path, 17, 4, q_and_v),
    ]
    bench = Bench(path, 4, adapters)
    rng = random.Random(seed)
    slots = [0, -1, 1, 0, -1, 2, 3]
    sequences = [bench.sequence(random_tokens(rng.randint(5, 40), i), s) for i, s in enumerate(slots)]
    while running := [s for s in sequences if s.done < len(s.token_ids)]:
        rng.shuffle(running)
        work = [(s, min(rng.choice([1, 1, 1, 4, 11]), len(s.token_ids) - s.done)) for s in running]
        bench.step(work)


def test_the_rows_of_a_batch_are_the_same_in_every_order(tmp_path: Path) -> None:
    """FR-40: A(r8), base, B(r64), A, base, C(r16, only down), each of another length, in all 720 orders."""
    path = make_llama(tmp_path)
    q_and_v = [PROJECTIONS.index("q_proj"), PROJECTIONS.index("v_proj")]
    down_only = [PROJECTIONS.index("down_proj")]
    settings = ((8, q_and_v), (64, q_and_v), (16, down_only))
    bench = Bench(path, 4, [adapter(path, rank, seed, p) for seed, (rank, p) in enumerate(settings)])
    slots, lengths = (0, -1, 1, 0, -1, 2), (5, 17, 1, 33, 2, 9)
    rows = [
        bench.sequence(random_tokens(n, i), slot)
        for i, (n, slot) in enumerate(zip(lengths, slots, strict=True))
    ]
    bench.step([(row, n - 1) for row, n in zip(rows, lengths, strict=True) if n > 1])
    computed: set[tuple[int, ...]] = set()
    for order in itertools.permutations(range(6)):
        batch = bench.build([(rows[i], 1) for i in order])
        placed = tuple(order[at] for at in batch.order)
        token_ids = [rows[i].token_ids[-1] for i in placed]
        assert batch.token_ids.tolist() == token_ids
        if placed in computed:
            continue  # the batch groups rows by adapter: few of the orders differ in what it holds
        computed.add(placed)
        mixed = bench.model.forward(batch, bench.tiles.pool, bench.views)
        disabled = replace(batch, segments=tuple(s._replace(slot=-1) for s in batch.segments))
        base = bench.model.forward(disabled, bench.tiles.pool, None)
        for logits, plain, i in zip(mixed, base, placed, strict=True):
            torch.testing.assert_close(logits, rows[i].want[-1], atol=TOLERANCE, rtol=0)
            assert torch.equal(logits, plain) == (rows[i].slot == -1)


def test_base_rows_are_bit_equal_with_and_without_adapters(tmp_path: Path) -> None:
    """FR-40."""
    path = make_llama(tmp_path)
    bench = Bench(path, 4, [adapter(path, 8, 1, range(NUM_PROJECTIONS))])
    work = [(bench.sequence(random_tokens(9, i), slot), 9) for i, slot in enumerate([0, -1, 0, -1])]
    batch = bench.build(work)
    mixed = bench.model.forward(batch, bench.tiles.pool, bench.views)
    disabled = replace(batch, segments=tuple(s._replace(slot=-1) for s in batch.segments))
    base = bench.model.forward(disabled, bench.tiles.pool, None)
    is_base = torch.tensor([work[i][0].slot == -1 for i in batch.order])
    assert torch.equal(mixed[is_base], base[is_base])
    assert not torch.isclose(mixed[~is_base], base[~is_base]).all(dim=-1).any()


def test_a_cached_prefix_serves_another_sequence(tmp_path: Path) -> None:
    bench = Bench(make_llama(tmp_path), 4)
    tokens = random_tokens(20, 1)
    first = bench.sequence(tokens)
    bench.step([(first, 20)])
    second = bench.sequence(tokens[:16] + random_tokens(9, 2))
    second.page_ids[:4] = first.page_ids[:4]
    second.done = 16
    bench.step([(second, 9)])


def test_a_step_without_logits(tmp_path: Path) -> None:
    bench = Bench(make_llama(tmp_path), 4)
    sequence = bench.sequence(random_tokens(10, 1))
    chunk = sequence.schedule(6)._replace(samples=False)
    batch = build_batch([chunk], "cpu", bench.page_tokens)
    assert bench.model.forward(batch, bench.tiles.pool).shape == (0, 256)
    sequence.done = 6
    bench.step([(sequence, 4)])


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """FR-45: chosen-token logprob within 0.05, mean 0.01, for weights that bf16 holds exactly."""
    path = make_llama(tmp_path, initializer_range=0.05)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(path)
    spec = load_model_spec(str(path))
    bench = Bench(path, 4)
    tokens = random_tokens(64, 5)
    sequence = bench.sequence(tokens)
    ours = LlamaModel(spec, load_weights(spec, torch.bfloat16))
    pool = torch.full_like(bench.tiles.pool, torch.nan, dtype=torch.bfloat16)
    want = model.float()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    errors = []
    for t in range(63):
        logits = ours.forward(bench.build([(sequence, 1)]), pool)
        sequence.done += 1
        errors.append((logits[0].log_softmax(-1)[tokens[t + 1]] - want[t, tokens[t + 1]]).abs())
    assert torch.stack(errors).max() < 0.05
    assert torch.stack(errors).mean() < 0.01
