"""What the PyTorch plugins share of layers: FP8 linear functions, sharded weights, and the export of weights."""
