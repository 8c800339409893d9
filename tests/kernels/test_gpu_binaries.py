"""What kernels need of a GPU, as its compiler tells without one. Some of it is a promise to others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kernels
from kernels.linear.tiles import FEW_ROWS, FEW_ROWS_BESIDE, MOST_TILE_ROWS
from kernels.peers.triton import programs_per_multiprocessor
from tests.kernels.gpu_binaries import LARGER_WORLDS, Binary

REGISTERS = 65536  # of a multiprocessor
SHARED = 228 << 10
RESERVED = 1 << 10  # shared memory of each program
ELSEWHERE = {
    "_read_kernel": "reads pinned memory, of which there is none without a GPU",
    "_add_delta_kernel": "of groups without peer access",
}
WAITING: dict[str, Callable[[dict[str, int]], int]] = {
    "_all_reduce_kernel": lambda of: 2 * of["BLOCK"] * of["WORLD"],
    "_gather_columns_kernel": lambda of: 2 * of["BLOCK"],
    "_exchange_kernel": lambda of: 4 * of["BLOCK"] * of["ROWS"] * of["WORLD"],
}
"""Kernels whose programs wait for those of other ranks, and the bytes that one says it holds."""


@pytest.fixture(scope="module")
def binaries() -> list[Binary]:
    return compile_for("H200", 1, 2)


def compile_for(gpu: str, *worlds: int) -> list[Binary]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.gpu_binaries", "--gpu", gpu, "--world", *map(str, worlds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FP_FUSION" not in done.stderr, "Triton's default, which changes, was taken"
    return [Binary(**json.loads(line)) for line in done.stdout.splitlines()]


def num_registers(binary: Binary) -> int:
    """Of a program: a thread is given them by eights."""
    return -(-binary.registers // 8) * 8 * 32 * binary.num_warps


def written_kernels() -> set[str]:
    (root,) = kernels.__path__
    source = "".join(path.read_text() for path in Path(root).rglob("*.py"))
    return set(re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)) - ELSEWHERE.keys()


def test_every_kernel_compiles(binaries: list[Binary]) -> None:
    """With the shared memory that a program can have, or Triton would have refused it."""
    assert {binary.kernel for binary in binaries} == written_kernels()


@pytest.mark.parametrize(
    ("gpu", "has_linear"), [("A100", False), ("L40S", False), ("B200", True), ("RTX PRO 6000", False)]
)
def test_other_gpus_get_what_they_can_do(gpu: str, has_linear: bool) -> None:
    """Older ones launch nothing ahead and bring no tiles to shared memory; with less of that, products are
    cuBLAS's.
    """
    binaries = compile_for(gpu, 1)
    is_older = gpu in ("A100", "L40S")
    without = set(WAITING)
    without |= set() if has_linear else {"_linear_kernel"}
    without |= {"rotary_decode_kernel"} if is_older else set()
    assert {binary.kernel for binary in binaries} == written_kernels() - without
    assert any(binary.constants.get("PDL") for binary in binaries) == (not is_older)


def test_programs_that_wait_for_other_ranks_all_run_at_once(binaries: list[Binary]) -> None:
    """Or a rank waits for what a program sends that waits itself for a place."""
    waiting = [b for b in binaries if b.kernel in WAITING]
    assert {b.kernel for b in waiting} == WAITING.keys()
    assert {b.world for b in waiting} == {2, *LARGER_WORLDS}
    for binary in waiting:
        each = programs_per_multiprocessor(WAITING[binary.kernel](binary.constants))
        assert each * num_registers(binary) <= REGISTERS, binary
        assert each * (binary.shared + RESERVED) <= SHARED, binary


def test_a_product_leaves_room_for_a_shrink(binaries: list[Binary]) -> None:
    def leaves_room(binary: Binary) -> bool:
        rows, stages = binary.constants["ROWS"], binary.constants["STAGES"]
        return rows == MOST_TILE_ROWS or (rows, stages) == (FEW_ROWS.rows, FEW_ROWS_BESIDE.num_stages)

    products = [b for b in binaries if b.kernel == "_linear_kernel" and leaves_room(b)]
    shrinks = [b for b in binaries if b.kernel == "shrink_kernel" and b.tokens <= MOST_TILE_ROWS]
    assert products
    assert shrinks
    shared = max(b.shared for b in products) + max(b.shared for b in shrinks) + 2 * RESERVED
    assert shared <= SHARED
    assert max(map(num_registers, products)) + max(map(num_registers, shrinks)) <= REGISTERS
