"""FP8 linear layers: configuration, operands, matmuls, and differentiable function."""
