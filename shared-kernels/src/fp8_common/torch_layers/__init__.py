"""Code shared by the PyTorch plugins: FP8 linear functions, sharding, export."""
