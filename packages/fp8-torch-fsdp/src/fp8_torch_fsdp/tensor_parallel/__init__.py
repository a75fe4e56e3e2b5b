"""Tensor parallelism with FP8 communication: styles for `parallelize_module`."""
