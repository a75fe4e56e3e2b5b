"""Gradients that ranks reduce as FP8 codes: reduce-scatter for FSDP2, all-reduce for replicas and DDP."""
