"""A group of processes over gloo: the tokens of one process, whatever is split how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import AdapterRefused, InvalidRequest
from engine.model.spec import load_model_spec
from engine.request import RequestOutput
from engine.sharding import Shard, shard_shape
from engine.tensor_parallel.comm import Ranks
from engine.tensor_parallel.group import Group, GroupRunner
from tests.engine.test_against_peft import prompt
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.9, seed=11, max_tokens=24, repetition_penalty=1.2, ignore_eos=True
)
BASES: dict[str, dict[str, Any]] = {
    "2 KV heads, untied": {},
    "8 KV heads, tied": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "3 KV heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    **{name: {"rank": 8, "targets": [name]} for name in ALL_LINEAR},
    "r3-all": {"rank": 3, "targets": ALL_LINEAR},
    "r4-all": {"rank": 4, "targets": ALL_LINEAR},
    "r24-all": {"rank": 24, "targets": ALL_LINEAR, "use_rslora": True},
}
NAMES = [None, *ADAPTERS]


class Setup:
    def __init__(self, path: Path, base: str) -> None:
        self.base = make_llama(path / "base", **BASES[base])
        self.adapters = {
            name: make_adapter(self.base, path / name, seed=seed, **settings)
            for seed, (name, settings) in enumerate(ADAPTERS.items())
        }
        alone = self.engine(1)
        self.greedy = outputs(alone, GREEDY)
        self.sampled = outputs(alone, SAMPLED)
        alone.close()

    def engine(self, world: int, **config: Any) -> Engine:
        settings = {"num_pages": 200, "max_rank": 24, "num_threads": 1, "debug": True} | config
        engine = Engine(EngineConfig(model=str(self.base), tensor_parallel_size=world, **settings))
        for name, path in self.adapters.items():
            engine.load_adapter(name, str(path))
        return engine


def outputs(engine: Engine, params: SamplingParams) -> list[RequestOutput]:
    """Of one mixed batch."""
    prompts = [prompt(i, 1 + 5 * i) for i in range(len(NAMES))]
    return engine.generate(prompts, params, NAMES)


@pytest.fixture(scope="module", params=list(BASES))
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("tp"), request.param)


@pytest.fixture
def engine(setup: Setup) -> Iterator[Engine]:
    engine = setup.engine(2, lora_sharding="replicate")
    yield engine
    engine.close()


def test_two_ranks_equal_one_and_take_two_sums_a_layer(setup: Setup, engine: Engine) -> None:
    """FR-38, FR-45; sums with adapters, all projections of them, as without."""
    check_equal(setup, engine)
    for name in (None, "r24-all"):
        assert collectives_a_layer(engine, name) == (2, 0)
    check_bytes(setup, engine, 2, is_full=False)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fully_sharded_adapters_give_the_same_for_four_small_collectives_a_layer(
    setup: Setup, num_ranks: int
) -> None:
    if num_ranks > load_model_spec(str(setup.base)).shape.num_kv_heads == 3:
        pytest.skip("four ranks cannot share three KV heads")
    engine = setup.engine(num_ranks, lora_sharding="full")
    check_equal(setup, engine)
    for name, num_exchanged in ((None, 0), ("r24-all", 4), ("k_proj", 1), ("down_proj", 1)):
        assert collectives_a_layer(engine, name) == (2, num_exchanged)
    check_bytes(setup, engine, num_ranks, is_full=True)
    engine.close()


def collectives_a_layer(engine: Engine, name: str | None) -> tuple[float, float]:
    """Of the base and of adapters, in every step of a request."""
    comm, stats = comm_of(engine), engine.core.stats
    steps, sums, exchanges = stats.steps, comm.num_reduced, comm.num_exchanged
    engine.generate([prompt(0, 9)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), [name])
    layers = 2 * (stats.steps - steps)
    return (comm.num_reduced - sums) / layers, (comm.num_exchanged - exchanges) / layers


def check_equal(setup: Setup, engine: Engine) -> None:
    for ours, alone in zip(outputs(engine, GREEDY), setup.greedy, strict=True):
        assert ours.token_ids == alone.token_ids
        assert ours.logprobs is not None
        assert alone.logprobs is not None
        pairs = zip(ours.logprobs, alone.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) <= 1e-4
    sampled = outputs(engine, SAMPLED)
    assert [o.token_ids for o in sampled] == [o.token_ids for o in setup.sampled]


def check_bytes(setup: Setup, engine: Engine, num_ranks: int, is_full: bool) -> None:
    """A of projections split by output, and B of the others, are whole or cut into rows of the rank."""
    rank = 24
    full = load_model_spec(str(setup.base)).shape
    sharded = shard_shape(full, Shard(0, num_ranks))
    elements = 0
    for projection, part in enumerate(sharded.parts):
        in_features, out_features = full.widths(projection)
        other = in_features if part.by_output else out_features
        elements += rank * (part.end - part.start) + (rank // num_ranks if is_full else rank) * other
    image = engine.core.manager.image(engine.core.manager.names["r24-all"])
    assert image.report["bytes"] == 4 * full.num_layers * elements
    assert sum(int((page != 0).sum()) for page in image.pages) <= full.num_layers * elements
    assert sum(int((page != 0).sum()) for page in image.pages) > 0.99 * full.num_layers * elements


def test_four_ranks_share_two_kv_heads(tmp_path: Path) -> None:
    """FR-38."""
    setup = Setup(tmp_path, "2 KV heads, untied")
    engine = setup.engine(4)
    check_equal(setup, engine)
    engine.close()


def test_a_small_pool_evicts_on_all_ranks_and_dropped_images_go_everywhere(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "2 KV heads, untied")
    engine = setup.engine(
        2, num_pages=40, max_adapters=3, max_num_seqs=4, max_num_batched_tokens=32, host_cache_bytes=160_000
    )
    for _ in range(2):
        for ours, alone in zip(outputs(engine, GREEDY), setup.greedy, strict=True):
            assert ours.token_ids == alone.token_ids
    assert sum(engine.stats()["evictions"]["hbm"].values()) > 0
    assert engine.core.manager.num_evicted > 0
    broken = tmp_path / "r4-all" / "adapter_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-9])
    with pytest.raises(AdapterRefused):
        engine.load_adapter("broken", str(broken.parent))
    for name in list(engine.core.manager.names):
        engine.unload_adapter(name)
    assert group_of(engine)._images == {}
    engine.close()


def test_too_many_ranks_are_refused_before_any_is_started(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    with pytest.raises(InvalidRequest) as error:
        Engine(EngineConfig(model=str(base), tensor_parallel_size=16, num_pages=60))
    assert error.value.param == "tensor_parallel_size"


def test_an_engine_that_cannot_be_made_leaves_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: str) -> None:
        raise OSError(f"{model} has no tokenizer")

    base = make_llama(tmp_path / "base")
    monkeypatch.setattr("engine.engine.Tokenizer.from_pretrained", fail)
    with pytest.raises(OSError, match="no tokenizer"):
        Engine(EngineConfig(model=str(base), tensor_parallel_size=2, num_pages=60, num_threads=1))
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_group_within_ten_seconds(tmp_path: Path, kind: int) -> None:
    """The group's own process ends as well: what started it has others to send to, and starts a new one."""
    base = make_llama(tmp_path / "base")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.group_process", str(base)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), kind)
    began = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert time.monotonic() - began < 10


def comm_of(engine: Engine) -> Ranks:
    runner = engine.core._runner
    assert isinstance(runner, GroupRunner)
    comm = runner._local._model._comm  # type: ignore[attr-defined]
    assert isinstance(comm, Ranks)
    return comm


def group_of(engine: Engine) -> Group:
    runner = engine.core._runner
    assert isinstance(runner, GroupRunner)
    return runner._group
