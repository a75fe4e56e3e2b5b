"""Matmuls, convolutions and casts in FP8: one rule for values, gradients and observations of all of them."""
