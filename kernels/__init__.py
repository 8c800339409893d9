"""Ops over tensors, each folder one op: reference (the specification), kernel, benchmark."""

import os

# Triton 3.10 will not contract a * b + c unless told to; the kernels were made and measured with that
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
