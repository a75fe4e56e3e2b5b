"""float32 masters of FP8 weights: their initial values and their optimizer."""
