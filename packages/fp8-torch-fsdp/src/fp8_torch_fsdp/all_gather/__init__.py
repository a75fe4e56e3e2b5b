"""The weight that FSDP2 gathers in FP8, and its state dicts."""
