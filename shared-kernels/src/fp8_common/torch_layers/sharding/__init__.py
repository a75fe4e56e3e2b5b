"""Sharded FP8 weights: scales, FSDP2, gathered weights, gradients, replaced parameters."""
