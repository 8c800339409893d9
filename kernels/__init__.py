"""Ops over tensors, each folder one op: reference (the specification), kernel, benchmark."""
