"""Training logs: statistics of FP8 tensors, limits, and `fp8 watch`."""
