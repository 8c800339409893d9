"""A random model of Llama-3-8B's shape, layer by layer: the hidden states are those of a float32 reference.

How near they have to be is measured. transformers' own bfloat16 forward pass over the same weights rounds at
about the same places: behind every linear and norm, the product of gate and up, the sum with the residual. So
its distance from the float32 pass, layer by layer, is what bfloat16 costs, and ours must not be larger.
"""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaModel

from engine.adapters.image import ImageFormat
from engine.adapters.loading import load_image
from engine.config import EngineConfig
from engine.model import llama_cuda
from engine.model.loading import LlamaWeights
from engine.model.spec import ModelSpec
from engine.plan import AdapterLoad, ScheduledChunk, StepPlan
from engine.runner import buckets, cuda
from engine.shape import PROJECTIONS
from kernels.rms_norm.triton import add_rms_norm
from load_tests.random_engine import PAGE_TOKENS, SPEC, random_weights

pytestmark = pytest.mark.gpu

MAX_TOKENS = 1024  # a step's
MAX_MODEL_LEN = 256
NUM_PAGES = 1000


class Lora(NamedTuple):
    """[rank, in] and [out, rank] of each (layer, projection), on the device, in bfloat16."""

    scale: float
    modules: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


def random_lora(spec: ModelSpec, rank: int, targets: tuple[str, ...], seed: int, device: str) -> Lora:
    """Its part of a linear is about half as large as the base's."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).mul_(std).bfloat16()

    modules = {}
    for layer, name in itertools.product(range(spec.shape.num_layers), targets):
        widths = spec.shape.widths(PROJECTIONS.index(name))
        a = normal(rank, widths.in_features, widths.in_features**-0.5)
        modules[layer, name] = (a, normal(widths.out_features, rank, 0.3 * rank**-0.5))
    return Lora(2.0, modules)


def save_lora(lora: Lora, path: Path) -> Path:
    """As PEFT does."""
    path.mkdir()
    tensors = {}
    for (layer, name), pair in lora.modules.items():
        part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        for side, tensor in zip("AB", pair, strict=True):
            key = f"base_model.model.model.layers.{layer}.{part}.{name}.lora_{side}.weight"
            tensors[key] = tensor.cpu()
    rank = next(iter(lora.modules.values()))[0].shape[0]
    targets = sorted({name for _, name in lora.modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": lora.scale * rank, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


class AddLora(NamedTuple):
    """A forward hook of a linear."""

    scale: float
    a: torch.Tensor
    b: torch.Tensor

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return y + self.scale * ((args[0] @ self.a.T) @ self.b.T)


class Reference:
    """transformers' Llama with our weights."""

    def __init__(self, spec: ModelSpec, weights: LlamaWeights, dtype: torch.dtype) -> None:
        shape = spec.shape
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            max_position_embeddings=spec.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
            attn_implementation="eager",
        )
        self._device = weights.embed.device
        with self._device:
            self._model = LlamaModel(config).to(dtype).eval()
        self._model.norm = nn.Identity()  # the last layer's state as it is
        self._model.embed_tokens.weight.data.copy_(weights.embed)
        for theirs, ours in zip(self._model.layers, weights.layers, strict=True):
            qkv = torch.split(ours.qkv, [shape.q_size, shape.kv_size, shape.kv_size])
            attention, mlp = theirs.self_attn, theirs.mlp
            linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                       mlp.gate_proj, mlp.up_proj, mlp.down_proj)  # fmt: skip
            for linear, weight in zip(
                linears, (*qkv, ours.o, *ours.gate_up.chunk(2), ours.down), strict=True
            ):
                linear.weight.data.copy_(weight)
            theirs.input_layernorm.weight.data.copy_(ours.input_norm)
            theirs.post_attention_layernorm.weight.data.copy_(ours.post_norm)

    @torch.inference_mode()
    def states(self, token_ids: list[int], lora: Lora | None) -> torch.Tensor:
        """[layers, tokens, hidden], in float32: the residual behind each layer."""
        with self._adapted(lora):
            output = self._model(
                torch.tensor([token_ids], device=self._device), output_hidden_states=True, use_cache=False
            )
        states: torch.Tensor = torch.cat(output.hidden_states[1:])
        return states.float()

    @contextmanager
    def _adapted(self, lora: Lora | None) -> Iterator[None]:
        hooks = []
        scale, modules = lora or Lora(0.0, {})
        for (layer, name), (a, b) in modules.items():
            block = self._model.layers[layer]
            module = getattr(block.self_attn, name, None) or getattr(block.mlp, name)
            dtype = module.weight.dtype
            hooks.append(module.register_forward_hook(AddLora(scale, a.to(dtype), b.to(dtype))))
        yield
        for hook in hooks:
            hook.remove()


@dataclass(slots=True)
class Sequence:
    """What has been computed of it, and where; `states` of each step, [layers, tokens, hidden]."""

    name: str
    adapter: str | None
    slot: int
    page_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


class Recorder:
    """Stands for add_rms_norm, and keeps the residual behind each layer in one place.

    A graph that is captured meanwhile writes there whenever it is replayed.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.states = torch.empty(
            spec.shape.num_layers, MAX_TOKENS, spec.shape.hidden_size, dtype=torch.bfloat16, device="cuda"
        )
        self._norms = itertools.cycle(range(2 * spec.shape.num_layers))  # two in a layer

    def __call__(self, residual: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        normed = add_rms_norm(residual, *args, **options)
        layer, is_last = divmod(next(self._norms), 2)
        if is_last:
            self.states[layer, : len(residual)].copy_(residual)
        return normed


class Setup:
    """Adapters' slots are in the order of their names."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        weights = random_weights()
        for layer in weights.layers:
            for norm in (layer.input_norm, layer.post_norm):
                norm.uniform_(0.5, 1.5)
        self.loras = {
            "r16-all": random_lora(SPEC, 16, PROJECTIONS, 1, "cuda"),
            "r64-some": random_lora(SPEC, 64, ("q_proj", "v_proj", "down_proj"), 2, "cuda"),
            "r8-all": random_lora(SPEC, 8, PROJECTIONS, 3, "cuda"),
        }
        self.recorder = Recorder(SPEC)
        patch.setattr(llama_cuda, "add_rms_norm", self.recorder)
        patch.setattr(buckets, "DECODE_BUCKETS", (8,))  # decodes of up to eight sequences are replayed
        patch.setattr(buckets, "PREFILL_BUCKETS", ())  # and nothing else
        config = EngineConfig(
            "random", "cuda", max_num_seqs=8, max_num_batched_tokens=MAX_TOKENS, max_adapters=3, max_rank=64
        )
        self.runner = cuda.CudaRunner(SPEC, weights, config, NUM_PAGES, PAGE_TOKENS, MAX_MODEL_LEN)
        self.runner.warm_up()
        self._free_pages = iter(range(NUM_PAGES))
        form = ImageFormat(SPEC.shape, SPEC.shape.page_elems(PAGE_TOKENS), torch.bfloat16, config.max_rank)
        loads, images = [], {}
        for slot, (name, lora) in enumerate(self.loras.items()):
            images[name] = load_image(str(save_lora(lora, path / name)), form)
            loads.append(AdapterLoad(name, slot, self._pages(images[name].num_pages), after_steps=False))
        self.runner.submit(StepPlan((), (), tuple(loads), (), (), (), ()), images)
        self.runner.collect()
        self.exact = Reference(SPEC, weights, torch.float32)
        self.coarse = Reference(SPEC, weights, torch.bfloat16)

    def sequences(self, adapters: list[str | None]) -> list[Sequence]:
        slots = {name: slot for slot, name in enumerate(self.loras)}
        rows = [
            Sequence(f"{i}", name, slots[name] if name else -1, self._pages(MAX_MODEL_LEN // PAGE_TOKENS))
            for i, name in enumerate(adapters)
        ]
        return sorted(rows, key=lambda row: row.slot)  # as the runner does, so that states are in this order

    def step(self, rows: list[Sequence], lengths: list[int], rng: random.Random) -> None:
        """So many more tokens of each."""
        chunks = []
        for row, length in zip(rows, lengths, strict=True):
            token_ids = [rng.randrange(SPEC.shape.vocab_size) for _ in range(length)]
            start = len(row.token_ids)
            chunks.append(
                ScheduledChunk(
                    row.name, start, tuple(token_ids), array("i", row.page_ids), row.slot, samples=False
                )
            )
            row.token_ids += token_ids
        self.runner.submit(StepPlan((), (), (), tuple(chunks), (), (), ()), {})
        self.runner.collect()
        states = torch.split(self.recorder.states[:, : sum(lengths)].float(), lengths, dim=1)
        for row, state in zip(rows, states, strict=True):
            row.states.append(state)

    def _pages(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._free_pages, count))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with pytest.MonkeyPatch.context() as patch:
        yield Setup(tmp_path_factory.mktemp("layers"), patch)


MIXED = ["r8-all", None, "r64-some", "r16-all", "r8-all", None]
PREFILLS = ([40, 1, 33, 97, 130, 64], [20, 60, 1, 1, 17, 20])  # new ones; then chunks behind a cached prefix
NUM_DECODES = 4


@pytest.mark.parametrize("adapters", [[None] * len(MIXED), MIXED], ids=["base", "mixed ranks"])
def test_states_behind_every_layer(setup: Setup, adapters: list[str | None]) -> None:
    rng = random.Random(0)
    rows = setup.sequences(adapters)
    for lengths in PREFILLS:
        setup.step(rows, lengths, rng)
    for _ in range(NUM_DECODES):
        setup.step(rows, [1] * len(rows), rng)
    exact, coarse = (
        [judge.states(row.token_ids, setup.loras.get(row.adapter or "")) for row in rows]
        for judge in (setup.exact, setup.coarse)
    )
    ours = [torch.cat(row.states, dim=1) for row in rows]
    for phase in (slice(None, -NUM_DECODES), slice(-NUM_DECODES, None)):
        target = torch.cat([states[:, phase] for states in exact], dim=1)
        our_error, their_error = (
            distance(torch.cat([states[:, phase] for states in side], dim=1), target)
            for side in (ours, coarse)
        )
        assert (our_error <= their_error).all(), (our_error, their_error)


@pytest.mark.parametrize("name", ["r16-all", "r64-some", "r8-all"])
def test_what_an_adapter_adds_is_far_above_rounding(setup: Setup, name: str) -> None:
    """Else the test above could not tell that it is missing."""
    token_ids = list(range(50))
    base = setup.exact.states(token_ids, None)
    rounding = distance(setup.coarse.states(token_ids, None), base)
    assert (distance(setup.exact.states(token_ids, setup.loras[name]), base) > 10 * rounding).all()


def distance(states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[layers], relative to the target's length."""
    error: torch.Tensor = (states - target).norm(dim=(1, 2)) / target.norm(dim=(1, 2))
    return error
