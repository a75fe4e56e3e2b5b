"""float32 masters of FP8 weights: where they start, and the optimizer that trains them."""
