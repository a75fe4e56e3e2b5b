"""Sharded FP8 weights: their scales, FSDP2, what the all-gather makes, gradients, replaced parameters."""
