"""Expert parallelism with tokens sent as FP8 codes."""
