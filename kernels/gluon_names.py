"""Gluon's operations that its versions name differently. Gluon is Triton's language for explicit layouts.

It is experimental: where a version of Triton lacks what is imported here, kernels without it do the work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # since Triton 3.9
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # likewise


@gluon.jit
def gdc_wait() -> None:
    """As triton.language.extra.cuda has it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gdc_launch_dependents() -> None:
    """As triton.language.extra.cuda has it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
