"""FP8 weights under FSDP2, as all PyTorch plugins share them: its private parts, buffers, gathered weights."""
