"""Tensor parallelism whose activations, gradients and weights travel in FP8; styles for `parallelize_module`."""
