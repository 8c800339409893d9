"""Traces against one simulated replica: the real engine core; device and source only take time."""
