"""FP8 matmuls, convolutions and casts, with one rule for gradients and observations."""
