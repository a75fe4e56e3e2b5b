"""FP8 all-gathers of FSDP2: sharded weights, their state dicts, and MX gathers."""
