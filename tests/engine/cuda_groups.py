"""Engines on GPUs, alone or groups of ranks, in this process or another. Imports nothing that only judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from engine import Engine, EngineConfig, SamplingParams
from engine.config import Dtype, LoraSharding
from engine.request import RequestOutput
from engine.tensor_parallel.group import GroupRunner

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.9, seed=11, max_tokens=24, repetition_penalty=1.2, ignore_eos=True
)


@dataclass(frozen=True, slots=True)
class Case:
    base: Path
    adapters: Mapping[str, Path]
    prompts: Sequence[Sequence[int]]
    names: Sequence[str | None]  # of each prompt's adapter


@dataclass(frozen=True, slots=True)
class Settings:
    """Of an engine."""

    dtype: Dtype
    lora_sharding: LoraSharding = "replicate"


@dataclass(frozen=True, slots=True)
class Answers:
    greedy: list[RequestOutput]
    sampled: list[RequestOutput]
    has_peers: bool  # sums go through memory that the GPUs share


def run(case: Case, settings: Settings, world: int) -> Answers:
    engine = Engine(
        EngineConfig(
            model=str(case.base), device="cuda", dtype=settings.dtype, num_pages=300, max_num_seqs=8,
            max_rank=24, tensor_parallel_size=world, lora_sharding=settings.lora_sharding,
        )
    )  # fmt: skip
    try:
        for name, path in case.adapters.items():
            engine.load_adapter(name, str(path))
        greedy, sampled = (engine.generate(case.prompts, params, case.names) for params in (GREEDY, SAMPLED))
        return Answers(greedy, sampled, _has_peers(engine))
    finally:
        engine.close()


@contextmanager
def groups_of_two(case: Case, groups: Sequence[Settings]) -> Iterator[Connection]:
    """In a process of their own, one after the other; each one's answers come here."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_groups, args=(theirs, case, groups))
    process.start()
    theirs.close()  # so that its death is the end of the stream
    try:
        yield ours
    finally:
        process.kill()  # the other rank ends with it
        process.join()
        ours.close()


def _run_groups(answers: Connection, case: Case, groups: Sequence[Settings]) -> None:
    for settings in groups:
        answers.send(run(case, settings, world=2))


def _has_peers(engine: Engine) -> bool:
    runner = engine.core._runner
    return isinstance(runner, GroupRunner) and runner._local._model._peers is not None  # type: ignore[attr-defined]
