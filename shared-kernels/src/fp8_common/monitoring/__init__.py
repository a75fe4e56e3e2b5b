"""The log of a training run: statistics of FP8 tensors, limits for them, a file of JSON lines, and `fp8 watch`."""
