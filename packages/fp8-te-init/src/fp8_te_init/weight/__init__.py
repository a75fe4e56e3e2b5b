"""The FP8 weight: its storage, operators, all-gather and checkpoints."""
