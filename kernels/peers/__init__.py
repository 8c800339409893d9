"""Memory that the GPUs of a group share: no op, but what kernels of several send and receive by."""
