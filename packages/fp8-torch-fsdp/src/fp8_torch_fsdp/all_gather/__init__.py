"""The weight that FSDP2 gathers in FP8, and what state dicts see of it."""
