"""Memory that the GPUs of a group share."""
