"""Sharded FP8 weights: scales, FSDP2, gathers, gradient messages, replaced parameters."""
