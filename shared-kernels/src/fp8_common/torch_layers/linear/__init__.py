"""FP8 linear layers: how they are configured, their operands, the matmuls, and the differentiable function."""
