"""What a GPU can do that not all can. Measured on an H200; for others kernels are compiled in tests."""

from __future__ import annotations

import functools

import torch
import triton

MIN_CAPABILITY = (8, 0)
"""Of any use: tensor cores for bf16, and copies to shared memory that do not wait."""
_HOPPER = (9, 0)


@functools.cache
def is_at_least_hopper(device: torch.device) -> bool:
    """It has a tensor memory accelerator, and starts a launch before the one before it has ended.

    So has the interpreter, on a CPU.
    """
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _HOPPER


@functools.cache
def most_shared_bytes(device: torch.device) -> float:
    """Shared memory that a program can have."""
    if device.type == "cpu":
        return float("inf")
    driver = triton.runtime.driver.active
    index = driver.get_current_device() if device.index is None else device.index
    return float(driver.utils.get_device_properties(index)["max_shared_mem"])
