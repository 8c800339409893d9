"""Runs requests on a group of two ranks for ever; first prints the process id of the second.

With an address the second rank connects, and a line "serving" takes the place of its id.
"""

from __future__ import annotations

import sys

from engine import Engine, EngineConfig, SamplingParams
from engine.tensor_parallel.group import GroupRunner
from engine.tensor_parallel.seats import Child


def main(base: str, address: str | None = None) -> None:
    engine = Engine(
        EngineConfig(
            model=base,
            tensor_parallel_size=2,
            num_pages=60,
            num_threads=1,
            step_timeout_s=4.0,
            rank_address=address,
        )
    )
    runner = engine.core._runner
    assert isinstance(runner, GroupRunner)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.generate([(1, 2, 3)], params)
    (rank,) = runner._group.ranks
    sys.stdout.write(f"{rank.seat.pid if isinstance(rank.seat, Child) else 'serving'}\n")
    sys.stdout.flush()
    while True:
        engine.generate([(1, 2, 3)], params)


if __name__ == "__main__":
    main(*sys.argv[1:])
