"""Runs requests on a group of two ranks for ever; prints the process id of the second."""

from __future__ import annotations

import sys

from engine import Engine, EngineConfig, SamplingParams
from engine.tensor_parallel.group import GroupRunner


def main(base: str) -> None:
    engine = Engine(
        EngineConfig(model=base, tensor_parallel_size=2, num_pages=60, num_threads=1, step_timeout_s=4.0)
    )
    runner = engine.core._runner
    assert isinstance(runner, GroupRunner)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.generate([(1, 2, 3)], params)
    sys.stdout.write(f"{runner._group.ranks[0].pid}\n")
    sys.stdout.flush()
    while True:
        engine.generate([(1, 2, 3)], params)


if __name__ == "__main__":
    main(sys.argv[1])
