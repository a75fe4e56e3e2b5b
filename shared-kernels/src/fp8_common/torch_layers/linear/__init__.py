"""FP8 linear layers: configuration, operands, matmuls, differentiable functions."""
